"""AUROC of each of several labels and their mean, with intervals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedxl.evaluation.intervals import DRAWS, LEVEL, Interval, delong
from fedxl.evaluation.labelled import LabelScores
from fedxl.metrics import area_under, interval, ranking

MEAN = "mean"


class LabelRow(NamedTuple):
    """One line of the table."""

    name: str
    positives: int
    negatives: int
    auroc: Interval


def label_table(found: LabelScores, level: float = LEVEL, draws: int = DRAWS, seed: int = 0) -> list[LabelRow]:
    """A row for each label, with DeLong's interval, and one for their mean, with a bootstrap of the examples.

    Labels of one example go together, so the mean's interval needs draws of whole examples.
    """
    rows = []
    for number, name in enumerate(found.names):
        one = found.label(number)
        positives = int(one.labels.sum())
        rows.append(LabelRow(name, positives, len(one) - positives, delong(one.scores, one.labels, level)))
    total = sum(row.positives for row in rows), sum(row.negatives for row in rows)
    return [*rows, LabelRow(MEAN, *total, mean_auroc(found, level, draws, seed))]


def mean_auroc(found: LabelScores, level: float = LEVEL, draws: int = DRAWS, seed: int = 0) -> Interval:
    """The mean over labels of their AUROC, with a percentile interval of a bootstrap of the examples.

    A label of which a draw holds one class only is left out of that draw.
    """
    known = [np.flatnonzero(column >= 0) for column in found.labels.T]
    ranked = [
        ranking(found.scores[rows, number], found.labels[rows, number]) if len(rows) else None
        for number, rows in enumerate(known)
    ]

    def value(weights: np.ndarray) -> float:
        areas = []
        for rows, one in zip(known, ranked, strict=True):
            if one is not None:
                false, true = one.counts(weights[rows])
                if false[-1] > 0 and true[-1] > 0:
                    areas.append(area_under(false / false[-1], true / true[-1], 1.0))
        return float(np.mean(areas)) if areas else float("nan")

    size, rng = len(found.scores), np.random.default_rng(seed)
    here = value(np.ones(size))
    if np.isnan(here):
        return Interval(here, here, here, level, "not defined: no label has both classes")
    drawn = [
        value(np.bincount(rng.integers(size, size=size), minlength=size).astype(np.float64)) for _ in range(draws)
    ]
    return Interval(
        here, *interval([each for each in drawn if not np.isnan(each)], level), level, "bootstrap of examples"
    )


def as_markdown(rows: list[LabelRow]) -> str:
    """The table for people to read."""
    lines = ["| label | positives | negatives | AUROC | interval |", "|---|---:|---:|---:|---|"]
    for row in rows:
        ends = f"{row.auroc.low:.3f} to {row.auroc.high:.3f}" if np.isfinite(row.auroc.low) else row.auroc.how
        lines.append(f"| {row.name} | {row.positives:,} | {row.negatives:,} | {row.auroc.value:.3f} | {ends} |")
    return "\n".join(lines) + "\n"
