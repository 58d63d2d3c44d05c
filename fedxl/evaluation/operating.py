"""Operating points: what a threshold does. An example is called positive if its score is at or above the threshold.

A threshold is chosen on one set of examples (validation) and measured on another (test):

>>> chosen = at_specificity([0.1, 0.2, 0.3, 0.4, 0.8, 0.9], [0, 0, 0, 1, 0, 1], 0.75)
>>> tested = at_threshold([0.1, 0.3, 0.5, 0.7], [0, 1, 0, 1], chosen.threshold)
>>> round(chosen.threshold, 2), tested.sensitivity.value, tested.specificity.value
(0.35, 0.5, 0.5)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fedxl import metrics
from fedxl.errors import require
from fedxl.evaluation.intervals import LEVEL, Interval, as_arrays, proportion
from fedxl.evaluation.scores import Floats


class OperatingPoint(NamedTuple):
    """What a threshold does to these examples. Intervals take the threshold as given, and are Wilson's."""

    threshold: float  # NaN if none could be chosen
    sensitivity: Interval  # of the positives, those called positive
    specificity: Interval  # of the negatives, those called negative
    ppv: Interval  # of those called positive, the positives: holds for the prevalence of these examples
    npv: Interval  # of those called negative, the negatives

    def same_examples(self) -> OperatingPoint:
        """The same point; it says that its threshold was chosen on these examples, which intervals do not know."""
        intervals: list[Interval] = [*self[1:]]
        how = "threshold from the same examples"
        return OperatingPoint(
            self.threshold,
            *(each if math.isnan(each.value) else each._replace(how=f"{each.how}; {how}") for each in intervals),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            name: value._asdict() if isinstance(value, Interval) else value for name, value in self._asdict().items()
        }


class NetBenefit(NamedTuple):
    """Net benefit at each threshold probability; treating nobody has 0."""

    thresholds: Floats  # [k]
    model: Floats  # [k]
    treat_all: Floats  # [k]


def at_threshold(scores: Any, labels: Any, threshold: float, level: float = LEVEL) -> OperatingPoint:
    """What a threshold, chosen elsewhere, does to these examples."""
    values, classes = as_arrays(scores, labels, level)
    if not np.isfinite(values).all() or math.isnan(threshold):
        why = "no threshold" if math.isnan(threshold) else "scores are not finite"
        nothing = Interval(math.nan, math.nan, math.nan, level, f"not defined: {why}")
        return OperatingPoint(threshold, nothing, nothing, nothing, nothing)
    called, positive = values >= threshold, classes > 0
    hits, rest = int((called & positive).sum()), int((~called & ~positive).sum())
    return OperatingPoint(
        float(threshold),
        sensitivity=proportion(hits, int(positive.sum()), level),
        specificity=proportion(rest, int((~positive).sum()), level),
        ppv=proportion(hits, int(called.sum()), level),
        npv=proportion(rest, int((~called).sum()), level),
    )


def at_specificity(scores: Any, labels: Any, specificity: float, level: float = LEVEL) -> OperatingPoint:
    """The lowest threshold that calls at least this share of the negatives negative."""
    return _chosen(scores, labels, "specificity", specificity, level)


def at_sensitivity(scores: Any, labels: Any, sensitivity: float, level: float = LEVEL) -> OperatingPoint:
    """The highest threshold that calls at least this share of the positives positive."""
    return _chosen(scores, labels, "sensitivity", sensitivity, level)


def _chosen(scores: Any, labels: Any, kind: str, share: float, level: float) -> OperatingPoint:
    require(0 <= share <= 1, f"{kind} must lie between 0 and 1, as in 0.95, not {share}")
    values, classes = as_arrays(scores, labels, level)
    positive, threshold = kind == "sensitivity", math.nan
    if (classes == positive).any() and np.isfinite(values).all():
        false, true = metrics.counts(values, classes)  # at or above each cut, from the highest down
        right = true if positive else false[-1] - false
        enough = right >= share * right.max() * (1 - 1e-12)  # 0.95 * 20 is no more than 19 in decimals
        threshold = float(_cuts(values)[np.flatnonzero(enough)[0 if positive else -1]])
    return at_threshold(values, classes, threshold, level).same_examples()


def _cuts(values: Floats) -> Floats:
    """Thresholds between neighbouring scores, and one beyond each end, from the highest down.

    Half-way, because a score computed again, in other batches or on another machine, differs by rounding.
    """
    ranked = np.unique(values)[::-1]
    gaps = ranked[:-1] - ranked[1:]
    first, last = (gaps[0], gaps[-1]) if len(gaps) else (1.0, 1.0)
    middle = ranked[1:] + gaps / 2
    middle = np.where(middle > ranked[1:], middle, ranked[:-1])  # neighbours in floating point
    beyond = max(ranked[0] + first / 2, np.nextafter(ranked[0], math.inf)), ranked[-1] - last / 2
    return np.asarray([beyond[0], *middle, beyond[1]])


def net_benefit(probabilities: Any, labels: Any, thresholds: Any) -> NetBenefit:
    """What acting on the model is worth: true positives less false positives, weighed by the threshold's odds.

    A. Vickers, E. Elkin, "Decision curve analysis: a novel method for evaluating prediction models", Medical Decision
    Making 26, 2006. At threshold probability p a false positive counts p / (1 - p) of a true positive.
    """
    values, classes = as_arrays(probabilities, labels)
    require(bool(((values >= 0) & (values <= 1)).all()), "net benefit needs probabilities; calibrate scores first")
    limits = np.atleast_1d(np.asarray(thresholds, np.float64))
    require(bool(((limits > 0) & (limits < 1)).all()), "threshold probabilities must lie between 0 and 1")
    require(len(values) > 0, "net benefit needs examples")
    odds, prevalence = limits / (1 - limits), float(classes.mean())
    ranked = [np.sort(values[classes == side]) for side in (0, 1)]
    false, true = ((len(side) - np.searchsorted(side, limits)) / len(values) for side in ranked)
    return NetBenefit(limits, true - false * odds, prevalence - (1 - prevalence) * odds)
