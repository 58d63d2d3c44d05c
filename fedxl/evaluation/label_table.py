"""AUROC of each of several labels and their mean, with intervals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedxl.evaluation.intervals import LEVEL, Interval, delong
from fedxl.evaluation.label_means import means
from fedxl.evaluation.labelled import LabelScores

MEAN = "mean"


class LabelRow(NamedTuple):
    """One line of the table."""

    name: str
    positives: int
    negatives: int
    auroc: Interval


def label_table(found: LabelScores, level: float = LEVEL) -> list[LabelRow]:
    """A row for each label, with DeLong's interval, and one for their mean, with a jackknife of the examples.

    Labels of one example go together, so that whole examples are left out.
    """
    rows = []
    for number, name in enumerate(found.names):
        one = found.label(number)
        positives = int(one.labels.sum())
        rows.append(LabelRow(name, positives, len(one) - positives, delong(one.scores, one.labels, level)))
    total = sum(row.positives for row in rows), sum(row.negatives for row in rows)
    return [*rows, LabelRow(MEAN, *total, mean_auroc(found, level))]


def mean_auroc(found: LabelScores, level: float = LEVEL) -> Interval:
    """The mean over labels of their AUROC, with the interval of `means`."""
    return means(["auroc"], found, level)["auroc"]


def as_markdown(rows: list[LabelRow]) -> str:
    """The table for people to read."""
    lines = ["| label | positives | negatives | AUROC | interval |", "|---|---:|---:|---:|---|"]
    for row in rows:
        ends = f"{row.auroc.low:.3f} to {row.auroc.high:.3f}" if np.isfinite(row.auroc.low) else row.auroc.how
        lines.append(f"| {row.name} | {row.positives:,} | {row.negatives:,} | {row.auroc.value:.3f} | {ends} |")
    return "\n".join(lines) + "\n"
