"""Metrics as means over several labels, with intervals by leaving out whole examples.

Labels of one example go together, so that whole examples are left out: each in turn, or of many examples each of
`groups` random groups. The values t_k without group k of G give

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
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from fedxl import metrics
from fedxl.evaluation.delong import wilson_low
from fedxl.evaluation.intervals import LEVEL, Interval, delong, one_metric
from fedxl.evaluation.resampling import BATCH, Floats, Ints, Statistic, affordable, is_corrected, measured
from fedxl.evaluation.scored import LabelScores, judge_labels

GROUPS = 1000  # that are left out, at most
HOW = "jackknife of examples, Wilson's form"
TINY = 1e-20  # a variance that is rounding


class _Label(NamedTuple):
    """A label that holds both classes: which examples, and its metrics as functions of their weights."""

    positives: Ints
    negatives: Ints
    statistics: Mapping[str, Statistic]


def means(
    wanted: Sequence[str], found: LabelScores, level: float = LEVEL, groups: int = GROUPS, seed: int = 0
) -> dict[str, Interval]:
    """The mean over labels of each metric, with the interval of `jackknifed`.

    A label that has one class only without a group does not count there. The interval of average precision rests on
    its less biased estimate (`resampling`); `value` is the metric itself.
    """
    named = {name: one_metric(name) for name in wanted}
    here, _ = judge_labels(named.values(), found)
    labels = [one for number in range(len(found.names)) if (one := _label(found, number, named)) is not None]
    if not labels:
        why = "not defined: no label has both classes and finite scores"
        return {name: Interval(math.nan, math.nan, math.nan, level, why) for name in wanted}
    size = len(found.scores)
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


def jackknifed(value: float, left: Floats, level: float) -> tuple[float, float]:
    """Both ends, from the value of all examples and those without each group, [G]; the values must differ."""
    count, apart = len(left), left - left.mean()
    variance = (count - 1) / count * float((apart**2).sum())
    kurtosis = float((apart**4).mean() / (apart**2).mean() ** 2)
    reach = float(stdtrit(2 * count / (kurtosis - (count - 3) / (count - 1)), (1 + level) / 2))
    corrected = count * value - (count - 1) * float(left.mean())
    centre = corrected if 0 < corrected < 1 else value
    trials = centre * (1 - centre) / variance
    return wilson_low(centre, trials, reach), 1 - wilson_low(1 - centre, trials, reach)


def _interval(shown: float, value: float, left: Floats, level: float) -> Interval:
    if not np.isfinite(left).all():
        return Interval(shown, math.nan, math.nan, level, "not defined: a class has one example")
    if len(left) < 3 or float(np.var(left)) <= TINY:  # as of a perfect ranking of few examples
        return Interval(shown, math.nan, math.nan, level, "not defined: no example makes a difference")
    return Interval(shown, *jackknifed(value, left, level), level, HOW)


def _label(found: LabelScores, number: int, named: Mapping[str, metrics.NamedMetric]) -> _Label | None:
    classes = found.labels[:, number]
    known = np.flatnonzero(classes >= 0)
    scores, labels = found.scores[known, number], classes[known]
    if not 0 < labels.sum() < len(labels) or not np.isfinite(scores).all():
        return None
    each = {name: measured(metric, scores, labels, corrected=is_corrected(metric)) for name, metric in named.items()}
    return _Label(known[labels > 0], known[labels == 0], each)


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


MEAN = "mean"


class LabelRow(NamedTuple):
    """One line of the table."""

    name: str
    positives: int
    negatives: int
    auroc: Interval


def label_table(found: LabelScores, level: float = LEVEL) -> list[LabelRow]:
    """A row for each label, with DeLong's interval, and one for their mean, with a jackknife of the examples."""
    rows = []
    for name, one in found.by_label().items():
        positives = int(one.labels.sum())
        rows.append(LabelRow(name, positives, len(one) - positives, delong(one.scores, one.labels, level)))
    total = sum(row.positives for row in rows), sum(row.negatives for row in rows)
    return [*rows, LabelRow(MEAN, *total, mean_auroc(found, level))]


def mean_auroc(found: LabelScores, level: float = LEVEL) -> Interval:
    """The mean over labels of their AUROC, with the interval of `means`."""
    return means(["auroc"], found, level)["auroc"]
