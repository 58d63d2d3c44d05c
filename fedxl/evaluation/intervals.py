"""Intervals: how far a metric on these examples may be from the metric on all that could have been drawn.

With several labels a metric is its mean over labels. Labels of one example go together, so that whole examples are
left out: each in turn, or of many examples each of `GROUPS` random groups. The values t_k without group k of G give

    an estimate with less bias    c = G t - (G - 1) mean(t_k)             (M. Quenouille, Biometrika 43, 1956)
    its variance                  V = (G - 1) / G  sum (t_k - mean(t_k))^2
    V's degrees of freedom        2 G / (kurtosis - (G - 3) / (G - 1))    (B. O'Neill, American Statistician 68, 2014)

and the interval is Wilson's, as of a share c of c (1 - c) / V trials, with Student's t. The bias matters more for a
mean than for one label: means over more labels vary less, and are as biased. The kurtosis says how few examples
decide: positives, where they are rare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit
from scipy.stats import binomtest

from fedxl import metrics
from fedxl.errors import require
from fedxl.evaluation.areas import average_precision_ends, partial_auc_ends
from fedxl.evaluation.delong import auroc_ends, covariance, placements, wilson_low
from fedxl.evaluation.resampling import BATCH, Statistic, affordable, is_corrected, measured, resample
from fedxl.evaluation.scores import Floats, Ints, Scores, measure

LEVEL = 0.95
DRAWS = 2000
GROUPS = 1000  # that are left out, at most
JACKKNIFE = "jackknife of examples, Wilson's form"
TINY = 1e-20  # a variance that is rounding
MEAN = "mean"
NO_ERRORS = "Wilson's form, a model's variance: all pairs agree"


class Interval(NamedTuple):
    """A metric and where it lies with confidence `level`. Ends that are not known are NaN, and `how` says why."""

    value: float
    low: float
    high: float
    level: float
    how: str  # the method


def as_arrays(scores: Any, labels: Any, level: float = LEVEL) -> tuple[Floats, Ints]:
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
    """AUROC with DeLong's variance, in Wilson's form (`auroc_ends`), which covers better than the plain interval.

    A perfect ranking has variance 0; its interval rests on a model's variance, and ends at 1.

    >>> found = delong([0.1, 0.4, 0.35, 0.8, 0.7, 0.2], [0, 0, 1, 1, 1, 0])
    >>> f"{found.value:.3f} {found.low:.3f} {found.high:.3f}"
    '0.889 0.346 0.989'
    """
    values, classes = as_arrays(scores, labels, level)
    why = undefined(values, classes)
    if why:
        return Interval(metrics.auroc(values, classes), math.nan, math.nan, level, why)
    placed = placements(values, classes)
    area = placed.auroc
    if area in (0.0, 1.0):
        return Interval(area, *auroc_ends(placed, level), level, NO_ERRORS)
    if covariance(placed)[0, 0] == 0:
        return Interval(area, math.nan, math.nan, level, "not defined: all scores are the same")
    return Interval(area, *auroc_ends(placed, level), level, "DeLong, Wilson's form")


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


def interval(
    metric: metrics.Item, scores: Any, labels: Any, level: float = LEVEL, *, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Any metric with its interval.

    AUROC: `delong`. Partial AUC and average precision: `areas`. Any other: `bootstrap`. `metric` is a name ("ap",
    "pauc@0.3"), a `Metric`, or a function.
    """
    values, classes = as_arrays(scores, labels, level)
    named = one_metric(metric)
    compute = named.metric.compute
    if compute is metrics.auroc:
        return delong(values, classes, level)
    if compute not in (metrics.partial_auc, metrics.partial_auc_raw, metrics.average_precision):
        return bootstrap(metric, values, classes, level=level, draws=draws, seed=seed)
    value, why = named.value(values, classes), undefined(values, classes)
    if why:
        return Interval(value, math.nan, math.nan, level, why)
    if compute is metrics.average_precision:
        ends, how = average_precision_ends(values, classes, level, draws, seed), "test inversion, binormal model"
    else:
        limit = named.limit or 1.0
        ends, how = partial_auc_ends(values, classes, limit, level), "DeLong, Wilson's form"
        if compute is metrics.partial_auc_raw:  # McClish's scale is linear
            least, most = metrics.mcclish(0.0, limit), metrics.mcclish(limit, limit)
            low, high = (limit * (end - least) / (most - least) for end in ends)
            ends = low, high
    how = how if math.isfinite(ends[0]) else "not defined: all scores are the same"
    return Interval(value, *ends, level, how)


def bootstrap(
    metric: metrics.Item, scores: Any, labels: Any, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Any metric with a bootstrap within each class: BCa, the bias-corrected and accelerated interval.

    A function of your own is called once per draw and per example. With few positives a bootstrap covers too little.
    """
    values, classes = as_arrays(scores, labels, level)
    named = one_metric(metric)
    value, why = named.value(values, classes), undefined(values, classes)
    if why or not math.isfinite(value):
        return Interval(value, math.nan, math.nan, level, why or "not defined: the metric is not finite")
    found = resample(measured(named, values, classes), classes, level, affordable(draws, len(values)), seed)
    return Interval(value, found.low, found.high, level, found.how)


def one_metric(metric: metrics.Item) -> metrics.NamedMetric:
    """A metric by its name, or a function."""
    found = metrics.resolve([metric])
    limit = 365 if metric in metrics.TIME_METRICS else 0.3
    require(len(found) == 1, f"the metric '{metric}' needs a limit, as in '{metric}@{limit}'")
    return found[0]


def reported(timed: bool, fpr: float) -> list[str]:
    """The metrics that are measured with intervals. timed: whether scores are of time to event.

    Those that need a time besides, such as Uno's C, need validation data that choose it (`survival_part`).
    """
    return ["cindex"] if timed else ["auroc", f"pauc@{fpr:g}", "ap"]


def intervals(wanted: Sequence[str], found: Scores, level: float = LEVEL) -> dict[str, Interval]:
    """These metrics with their intervals; of several labels, their means over labels."""
    if len(found.labels) > 1:
        return means(wanted, found, level)
    (one,) = found.by_label().values()
    if one.time is not None:
        from fedxl.evaluation import survival  # builds on this module

        return {name: survival.interval(name, *one.flat, one.time, level) for name in wanted}
    return {name: interval(name, *one.flat, level) for name in wanted}


class LabelRow(NamedTuple):
    """One line of a table of labels."""

    name: str
    positives: int
    negatives: int
    auroc: Interval


def label_table(found: Scores, level: float = LEVEL) -> list[LabelRow]:
    """A row for each label and, of several, one for their mean."""
    each = found.by_label() | ({MEAN: found} if len(found.labels) > 1 else {})
    return [
        LabelRow(name, one.positives, one.negatives, intervals(["auroc"], one, level)["auroc"])
        for name, one in each.items()
    ]


class _Label(NamedTuple):
    """A label that holds both classes: which examples, and its metrics as functions of their weights."""

    positives: Ints
    negatives: Ints
    statistics: Mapping[str, Statistic]


def means(
    wanted: Sequence[str], found: Scores, level: float = LEVEL, groups: int = GROUPS, seed: int = 0
) -> dict[str, Interval]:
    """The mean over labels of each metric, with the interval of `jackknifed`.

    A label that has one class only without a group does not count there. The interval of average precision rests on
    its less biased estimate (`resampling`); `value` is the metric itself.
    """
    named = {name: one_metric(name) for name in wanted}
    here, _ = measure(named.values(), found)
    labels = _labels(found, named)
    if not labels:
        why = "not defined: no label has both classes and finite scores"
        return {name: Interval(math.nan, math.nan, math.nan, level, why) for name in wanted}
    size = len(found)
    whole = _values(labels, np.ones((1, size)))
    # Without each group, a batch of groups at a time.
    count = min(size, affordable(groups, size * len(labels)))
    group = np.random.default_rng(seed).permutation(np.arange(size) % count) if count < size else np.arange(size)
    batches = np.array_split(np.arange(count), math.ceil(count / max(1, BATCH // size)))
    each = [_values(labels, (group[None] != batch[:, None]).astype(np.float64)) for batch in batches]
    left = {name: np.concatenate([batch[name] for batch in each]) for name in wanted}
    return {
        name: _interval(here[metric.name], float(whole[name][0]), left[name], level) for name, metric in named.items()
    }


def of_labels(metric: metrics.NamedMetric, found: Scores) -> Statistic:
    """A mean over labels as a function of the examples' weights, [rows, n]."""
    labels = _labels(found, {metric.name: metric}, corrects=False)
    return lambda weight: _values(labels, weight)[metric.name]


def jackknifed(value: float, left: Floats, level: float) -> tuple[float, float]:
    """Both ends, from the value of all examples and those without each group, [G]; the values must differ."""
    count, apart = len(left), left - left.mean()
    variance = (count - 1) / count * float((apart**2).sum())
    reach = float(stdtrit(degrees_of_freedom(apart), (1 + level) / 2))
    corrected = count * value - (count - 1) * float(left.mean())
    centre = corrected if 0 < corrected < 1 else value
    trials = centre * (1 - centre) / variance
    return wilson_low(centre, trials, reach), 1 - wilson_low(1 - centre, trials, reach)


def degrees_of_freedom(apart: Floats) -> float:
    """Of a variance, from its values less their mean, by their kurtosis: few values that decide leave few."""
    count, kurtosis = len(apart), float((apart**4).mean() / (apart**2).mean() ** 2)
    return 2 * count / (kurtosis - (count - 3) / (count - 1))


def _interval(shown: float, value: float, left: Floats, level: float) -> Interval:
    if not np.isfinite(left).all():
        return Interval(shown, math.nan, math.nan, level, "not defined: a class has one example")
    if len(left) < 3 or float(np.var(left)) <= TINY:  # as of a perfect ranking of few examples
        return Interval(shown, math.nan, math.nan, level, "not defined: no example makes a difference")
    return Interval(shown, *jackknifed(value, left, level), level, JACKKNIFE)


def _labels(found: Scores, named: Mapping[str, metrics.NamedMetric], corrects: bool = True) -> list[_Label]:
    """Those that hold both classes and finite scores. corrects: whether metrics are the less biased ones."""
    each = []
    for classes, column in zip(found.y.T, found.scores.T, strict=True):
        known = np.flatnonzero(classes >= 0)
        scores, labels = column[known], classes[known]
        if 0 < labels.sum() < len(labels) and np.isfinite(scores).all():
            statistics = {
                name: measured(metric, scores, labels, corrected=corrects and is_corrected(metric))
                for name, metric in named.items()
            }
            each.append(_Label(known[labels > 0], known[labels == 0], statistics))
    return each


def _values(labels: Sequence[_Label], weight: Floats) -> dict[str, Floats]:
    """The means of each metric, for weights of the examples, [rows, n]."""
    sides = [(weight[:, one.positives], weight[:, one.negatives]) for one in labels]
    both = np.stack([(true.sum(1) > 0) & (false.sum(1) > 0) for true, false in sides])  # [L, rows]
    with np.errstate(all="ignore"):  # of labels with one class, which do not count
        each = {
            name: np.stack([one.statistics[name](*side) for one, side in zip(labels, sides, strict=True)])
            for name in labels[0].statistics
        }  # [L, rows]
        return {name: np.where(both, values, 0.0).sum(0) / both.sum(0) for name, values in each.items()}
