"""Counts in bins of several labels: label_curves.npz, and the metrics that follow, with bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fedxl.errors import require
from fedxl.evaluation import binned
from fedxl.evaluation.binned import Binned, Curves, pooled
from fedxl.evaluation.scored import Scored, mean_defined
from fedxl.metrics import COUNTS, NamedMetric

LabelCurves = Mapping[str, Curves]  # by label and site
BETWEEN = ":"  # a split and a label in the names of arrays; no split has it in its name


class Counted(NamedTuple):
    """Metrics that follow from counts."""

    values: dict[str, float]  # means over the labels for which they are defined; counts are those of all labels
    by_label: dict[str, dict[str, float]]
    bounds: dict[str, dict[str, float]]  # by label: how far a metric may be from that of the scores
    noise: dict[str, float]  # how far noise moves each mean, as a root mean square; empty without noise

    @property
    def mean_bounds(self) -> dict[str, float]:
        """Of the means: each label's metric may be off by its own bound, all in one direction."""
        names = next(iter(self.bounds.values()))
        return {name: mean_defined(each[name] for each in self.bounds.values()) for name in names}


def judge(wanted: Iterable[NamedMetric], found: LabelCurves, noise: bool = True) -> Counted:
    """The metrics of all sites' counts together, label by label, and their means.

    noise: whether to find out, by drawing it again, how far noise moves them.
    """
    wanted = list(wanted)
    together = {label: pooled(sites.values()) for label, sites in found.items()}
    each = {label: binned.judge(wanted, one) for label, one in together.items()}
    by_label = {
        label: {name: value.value for name, value in values.items()} | binned.example_counts(together[label])
        for label, values in each.items()
    }
    bounds = {label: {name: value.bound for name, value in values.items()} for label, values in each.items()}
    names = next(iter(each.values()))
    values = {name: mean_defined(row[name] for row in by_label.values()) for name in names}
    values |= {count: sum(row[count] for row in by_label.values()) for count in COUNTS}
    moved = {}
    if noise and any(one.noise for one in together.values()):
        errors = {label: binned.noise_errors(wanted, list(sites.values())) for label, sites in found.items()}
        for name in names:
            # Each label has noise of its own, so the squares add up.
            each_error = [errors[label][name] for label in found if not math.isnan(by_label[label][name])]
            moved[name] = math.sqrt(sum(e**2 for e in each_error)) / len(each_error) if each_error else math.nan
    return Counted(values, by_label, bounds, moved)


def save(path: Path, splits: Mapping[str, LabelCurves]) -> None:
    """Write the counts of some splits into one .npz file."""
    named = {f"{split}{BETWEEN}{label}": each for split, found in splits.items() for label, each in found.items()}
    binned.save(path, named)


def load(path: Path) -> dict[str, dict[str, dict[str, Binned]]]:
    """What `save` wrote, by split, label and site; nothing if there is no such file."""
    found: dict[str, dict[str, dict[str, Binned]]] = {}
    for name, each in binned.load(path).items():
        split, between, label = name.partition(BETWEEN)
        require(bool(between), f"{path} holds counts of no label; remove it to do without its curves")
        found.setdefault(split, {})[label] = each
    return found


def as_scored(found: LabelCurves) -> dict[str, Scored]:
    """Scores with the counts of all sites, label by label. Which of them are of one example is not known."""
    return {label: binned.together(sites) for label, sites in found.items()}
