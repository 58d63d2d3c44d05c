"""Which round is the best, and how sure that is: validation data may be too few to tell rounds apart.

It loads no torch: `fedxl watch` follows the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedxl import metrics
from fedxl.evaluation.scores import Scores

AREAS = ("auroc", "pauc", "ap")
FEW = 30  # examples of a class from which on nothing is said


class Choice(NamedTuple):
    """How well validation data tell the rounds apart."""

    metric: str
    error: float  # the standard error of the best round's metric
    near: int  # evaluations within one standard error of the best
    evaluations: int
    fewest: int  # validation examples of the smaller class

    def __str__(self) -> str:
        return (
            f"validation data hold {self.fewest} examples of the smaller class: {self.metric} is known to ± "
            f"{self.error:.3f} (one standard error), and {self.near} of {self.evaluations} evaluations lie that "
            "close to the best, so they cannot be told apart"
        )


def how_sure(metric: str, values: Sequence[float], best: float, found: Scores) -> Choice | None:
    """How sure the choice is; None for metrics that are no areas. values: of all evaluations, the larger the better.

    The standard error is that of Hanley and McNeil (1982) for AUROC of this size: it needs no other pass over the
    data, and gives the order of magnitude for partial areas and average precision, too.
    """
    pairs = [(one.positives, len(one) - one.positives) for one in found.by_label().values()]
    m, n = min(pairs, key=min)
    if not m or not n or not 0 <= best <= 1 or metric.partition("@")[0] not in AREAS:
        return None
    area = float(np.clip(best, 0.5, 1 - 0.5 / (m * n)))  # a perfect ranking is not known to be perfect
    upper, lower = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (m - 1) * (upper - area**2) + (n - 1) * (lower - area**2)
    error = math.sqrt(variance / (m * n))
    near = sum(value >= best - error for value in values)
    return Choice(metric, error, near, len(values), min(m, n))


def better(row: Mapping[str, Any], best: Mapping[str, Any] | None, select: str) -> bool:
    """Whether a metrics row is better on validation data than the best so far.

    Ties, as of a perfect ranking, go to the smaller risk, then to the later round.
    """
    mine = metrics.value_of(row.get("validation") or {}, select)
    if math.isnan(mine):
        return False  # no site replied
    if best is None:
        return True
    if best.get("validation_from") != row.get("validation_from"):
        # Metrics of different sites, or from scores and from metrics, cannot be compared directly.
        return _better_at_common_sites(row, best, select)
    theirs = metrics.value_of(best["validation"], select)
    if mine != theirs:
        return mine > theirs
    return not _risk(row) > _risk(best)


def best_row(rows: Iterable[Mapping[str, Any]], select: str) -> Mapping[str, Any] | None:
    """The best of these metrics rows; None if none has the metric."""
    best: Mapping[str, Any] | None = None
    for row in rows:
        best = row if better(row, best, select) else best
    return best


def _risk(row: Mapping[str, Any]) -> float:
    value = row["validation"].get("risk")
    return math.nan if value is None else float(value)


def pairs_in(values: Mapping[str, float]) -> float:
    """How many pairs of a positive and a negative metrics rest on."""
    return values.get("positives", 1) * values.get("negatives", 1)


def _better_at_common_sites(row: Mapping[str, Any], best: Mapping[str, Any], select: str) -> bool:
    """Of two evaluations by different sites: whether the first is better at those that took part in both."""
    change = 0.0
    for name, mine in row.get("validation_by_site", {}).items():
        theirs = best.get("validation_by_site", {}).get(name)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            difference = metrics.value_of(mine, select) - metrics.value_of(theirs, select)
            change += 0.0 if math.isnan(difference) else pairs_in(mine) * difference
    return change > 0
