"""Intervals: how far a metric on these examples may be from the metric on all that could have been drawn."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import binomtest

from fedxl import metrics
from fedxl.errors import require
from fedxl.evaluation.delong import area_ends, covariance, placements
from fedxl.evaluation.resampling import is_corrected, measured, resample

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LEVEL = 0.95
DRAWS = 2000
NO_ERRORS = "Wilson's form, a model's variance: all pairs agree"


class Interval(NamedTuple):
    """A metric and where it lies with confidence `level`. Ends that are not known are NaN, and `how` says why."""

    value: float
    low: float
    high: float
    level: float
    how: str  # the method


def checked(scores: Any, labels: Any, level: float = LEVEL) -> tuple[Floats, Ints]:
    """One finite or NaN score and one label of 0 or 1 each."""
    values, classes = np.asarray(scores, np.float64), np.asarray(labels)
    shapes = f"of shapes {values.shape} and {classes.shape}"
    same = values.ndim == 1 and values.shape == classes.shape
    require(same, f"scores and labels must be two lists of one length, not {shapes}")
    require(bool(np.isin(classes, (0, 1)).all()), "labels must be 0 or 1")
    require(0 < level < 1, f"level must lie between 0 and 1, as in 0.95, not {level}")
    return values, classes.astype(np.int64)


def undefined(scores: Floats, labels: Ints) -> str:
    """Why no interval can be computed from these examples; empty if it can."""
    positives = int(labels.sum())
    if not np.isfinite(scores).all():
        return "not defined: scores are not finite"
    if positives in (0, len(labels)):
        return "not defined: one class"
    if min(positives, len(labels) - positives) < 2:
        return "not defined: a class has one example"
    return ""


def delong(scores: Any, labels: Any, level: float = LEVEL) -> Interval:
    """AUROC with DeLong's variance, in Wilson's form (`area_ends`), which covers better than the plain interval.

    A perfect ranking has variance 0; its interval rests on a model's variance, and ends at 1.

    >>> found = delong([0.1, 0.4, 0.35, 0.8, 0.7, 0.2], [0, 0, 1, 1, 1, 0])
    >>> f"{found.value:.3f} {found.low:.3f} {found.high:.3f}"
    '0.889 0.346 0.989'
    """
    values, classes = checked(scores, labels, level)
    why = undefined(values, classes)
    if why:
        return Interval(metrics.auroc(values, classes), math.nan, math.nan, level, why)
    placed = placements(values, classes)
    area = placed.auroc
    if area in (0.0, 1.0):
        return Interval(area, *area_ends(placed, level), level, NO_ERRORS)
    if covariance(placed)[0, 0] == 0:
        return Interval(area, math.nan, math.nan, level, "not defined: all scores are the same")
    return Interval(area, *area_ends(placed, level), level, "DeLong, Wilson's form")


def proportion(hits: int, of: int, level: float = LEVEL) -> Interval:
    """A share with Wilson's interval.

    >>> found = proportion(9, 10)
    >>> f"{found.value:.1f} {found.low:.3f} {found.high:.3f}"
    '0.9 0.596 0.982'
    """
    if not of:
        return Interval(math.nan, math.nan, math.nan, level, "not defined: no examples")
    found = binomtest(int(hits), int(of)).proportion_ci(level, method="wilson")
    return Interval(hits / of, float(found.low), float(found.high), level, "Wilson")


def bootstrap(
    metric: metrics.Item, scores: Any, labels: Any, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Any metric with a bootstrap within each class: BCa, the bias-corrected and accelerated interval.

    That of average precision is corrected for few positives (`resampling`); `value` is the metric itself. `metric` is
    a name ("ap", "pauc@0.3"), a `Metric`, or a function, which is called once per draw and per example.
    """
    values, classes = checked(scores, labels, level)
    named = one_metric(metric)
    value, why = named.value(values, classes), undefined(values, classes)
    if why or not math.isfinite(value):
        return Interval(value, math.nan, math.nan, level, why or "not defined: the metric is not finite")
    perfect = values[classes > 0].min() > values[classes == 0].max()
    if perfect and named.metric.compute in (metrics.auroc, metrics.partial_auc, metrics.partial_auc_raw):
        # All draws agree. What AUROC may lack, the partial area may lack.
        whole, limit = delong(values, classes, level), named.limit or 1.0
        span = 2 * limit - limit**2 if named.metric.compute is metrics.partial_auc else 1.0  # McClish's scale
        return whole._replace(value=value, low=max(0.0, value - (1 - whole.low) / span), high=value)
    corrected = is_corrected(named)
    statistic = measured(named, values, classes, corrected=corrected)
    found = resample(statistic, classes, level, draws, seed, widened=corrected)
    return Interval(value, found.low, found.high, level, found.how)


def one_metric(metric: metrics.Item) -> metrics.NamedMetric:
    """A metric by its name, or a function."""
    found = metrics.resolve([metric])
    require(len(found) == 1, f"the metric '{metric}' needs a limit, as in '{metric}@0.3'")
    return found[0]
