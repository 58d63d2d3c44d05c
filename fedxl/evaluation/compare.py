"""Two models on the same examples: how much better the first one is, and whether that is more than chance.

An interval and its p are of one method: p is below 0.05 exactly if the interval of 95 % leaves out 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtr, stdtrit

from fedxl import metrics
from fedxl.errors import UserError, printable, require
from fedxl.evaluation.delong import Placements, auroc_ends, covariance, placements, satterthwaite
from fedxl.evaluation.intervals import (
    DRAWS,
    LEVEL,
    Interval,
    as_arrays,
    degrees_of_freedom,
    intervals,
    of_labels,
    one_metric,
    reported,
    undefined,
)
from fedxl.evaluation.resampling import Statistic, jackknife, measured, resample
from fedxl.evaluation.scores import Floats, Scores, measure
from fedxl.metrics import NamedMetric

MOST_GROUPS = 1000  # of a class that are left out in turn; more would take long
TINY = 1e-12  # a standard error that is rounding
SURE = 1e-9  # the smallest p that is looked for


class Difference(NamedTuple):
    """The metric of the first model less that of the second, and where the difference lies."""

    value: float
    low: float
    high: float
    p: float  # two-sided, of no difference
    how: str
    level: float = LEVEL


# One label, two models.


def delong_difference(first: Any, second: Any, labels: Any, level: float = LEVEL) -> Difference:
    """AUROC of the first scores less that of the second.

    The interval joins both AUROCs' intervals (`difference_ends`): near 1 it leans as they do. p is one less the
    level from which on it holds 0.
    """
    (one, classes), (two, _) = as_arrays(first, labels, level), as_arrays(second, labels, level)
    why = undefined(one, classes) or undefined(two, classes)
    value = metrics.auroc(one, classes) - metrics.auroc(two, classes)
    if why:
        return Difference(value, math.nan, math.nan, math.nan, why, level)
    if same_ranking(one, two):
        return _no_difference("DeLong", level)
    both = placements(one, classes), placements(two, classes)
    spread = covariance(*both)
    apart = float(spread[0, 0] + spread[1, 1] - 2 * spread[0, 1])
    if apart <= 0 and spread[0, 0] > 0:  # they differ within a class only
        alike = "not defined: both models rank positives against negatives alike"
        return Difference(value, math.nan, math.nan, math.nan, alike, level)

    def ends(sure: float) -> tuple[float, float]:
        return difference_ends(_area(both[0], sure), _area(both[1], sure), spread)

    p = p_of(value, ends) if apart > 0 else math.nan
    return Difference(value, *ends(level), p, "DeLong, both intervals joined", level)


def p_of(value: float, ends: Callable[[float], tuple[float, float]]) -> float:
    """One less the level from which on the interval of a difference holds 0. ends: both ends, at a level."""

    def beyond(p: float) -> float:
        """How far 0 lies outside of the interval of level 1 - p."""
        low, high = ends(1 - p)
        return low if value > 0 else -high

    if beyond(1 - SURE) <= 0:
        return 1.0
    return SURE if beyond(SURE) >= 0 else float(brentq(beyond, SURE, 1 - SURE))


def _area(placed: Placements, level: float) -> Interval:
    """AUROC; one value if all scores are the same, because AUROC is 1/2 then, whatever the examples."""
    area = placed.auroc
    varies = area in (0.0, 1.0) or covariance(placed)[0, 0] > 0
    return Interval(area, *(auroc_ends(placed, level) if varies else (area, area)), level, "")


def difference_ends(first: Interval, second: Interval, spread: Floats) -> tuple[float, float]:
    """The interval of first - second, from both intervals and the covariance of the two, [2, 2].

    The difference is low if the first is low or the second high. Of independent values these distances add as squares
    (G. Zou, A. Donner, "Construction of confidence limits about effect measures: a general approach", Statistics in
    Medicine 27, 2008). What the models share makes both smaller, by as much as it does for DeLong's variance: two
    models that hardly differ have a narrow interval, however uncertain each of them is.
    """
    apart, each = spread[0, 0] + spread[1, 1] - 2 * spread[0, 1], spread[0, 0] + spread[1, 1]
    share = math.sqrt(max(0.0, float(apart / each))) if each > 0 else 1.0
    down = math.hypot(first.value - first.low, second.high - second.value)
    up = math.hypot(first.high - first.value, second.value - second.low)
    gap = first.value - second.value
    return gap - share * down, gap + share * up


def metric_difference(
    metric: metrics.Item,
    first: Any,
    second: Any,
    labels: Any,
    *,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Difference:
    """Any metric of the first scores less that of the second, with Student's interval and p of the same t.

    The standard error of fedxl's own metrics is the jackknife's, within each class and the same for both models
    (J. Arvesen, "Jackknifing U-statistics", Annals of Mathematical Statistics 40, 1969). A function may be as rough
    as a median, for which the jackknife is wrong: there it is the standard deviation of bootstrap draws.
    """
    (one, classes), (two, _) = as_arrays(first, labels, level), as_arrays(second, labels, level)
    named = one_metric(metric)
    value, why = named.value(one, classes) - named.value(two, classes), undefined(one, classes)
    why = why or undefined(two, classes) or ("" if math.isfinite(value) else "not defined: the metric is not finite")
    if why:
        return Difference(value, math.nan, math.nan, math.nan, why, level)
    ours = named.metric in metrics.METRICS.values()
    if ours and same_ranking(one, two):
        return _no_difference("jackknife", level)
    gap = _gap(measured(named, one, classes), measured(named, two, classes))
    sizes = int(classes.sum()), int((1 - classes).sum())
    if ours:
        return _student(value, *jackknife(gap, sizes, MOST_GROUPS, seed), "jackknife, Student's t", level)
    found = resample(gap, classes, level, draws, seed)
    if not found.error > 0:
        return Difference(value, math.nan, math.nan, math.nan, found.how, level)
    # Those of the smaller class: the fewest degrees of freedom that the sum of two variances may have.
    return _student(value, found.error, min(sizes) - 1, f"bootstrap, {draws} draws, Student's t", level, math.inf)


def _gap(first: Statistic, second: Statistic) -> Statistic:
    return lambda *drawn: first(*drawn) - second(*drawn)


def _student(value: float, error: float, free: float, how: str, level: float, most: float = 1.0) -> Difference:
    """Student's interval and p. most: how far two values can lie apart."""
    if not error > TINY:
        return Difference(value, math.nan, math.nan, math.nan, _why_no_error(error), level)
    reach = float(stdtrit(free, (1 + level) / 2)) * error
    p = float(2 * stdtr(free, -abs(value) / error))
    return Difference(value, max(-most, value - reach), min(most, value + reach), p, how, level)


def _why_no_error(error: float) -> str:
    return f"not defined: {'a class has one example' if math.isnan(error) else 'no example makes a difference'}"


# Runs: any number of labels, any number of seeds.

Runs = Scores | Sequence[Scores]  # of one run, or of runs that differ by their seed


def differences(
    first: Runs,
    second: Runs,
    *,
    same: bool = True,
    fpr: float = 0.3,
    names: Sequence[str] = (),
    level: float = LEVEL,
) -> dict[str, Difference]:
    """AUROC, partial AUC and average precision of the first runs less those of the second; of times, Harrell's C.

    With several labels these are means over labels. Of several seeds give lists: runs that stand at the same place
    form a pair, and must have been scored on the same examples. same: whether all seeds were. names: other metrics.
    """
    firsts, seconds = ([each] if isinstance(each, Scores) else list(each) for each in (first, second))
    require(len(firsts) == len(seconds) > 0, "give as many runs on both sides, in the order of their seeds")
    pairs = [paired(*both) for both in zip(firsts, seconds, strict=True)]
    found = {}
    one, other = pairs[0]
    for name in names or reported(one.time is not None, fpr):
        if len(pairs) > 1 or len(one.labels) > 1:
            value, error, free = over_seeds(name, [pair[0] for pair in pairs], [pair[1] for pair in pairs], same)
            how = f"{len(pairs)} seeds and jackknife" if len(pairs) > 1 else "jackknife of examples"
            found[name] = _student(value, error, free, f"{how}, Student's t", level)
            if error <= TINY and all(_alike(*pair) for pair in pairs):
                found[name] = _no_difference(how, level)
        elif one.time is not None:
            from fedxl.evaluation import survival  # builds on this module

            found[name] = survival.difference(name, one.flat[0], other.flat[0], one.flat[1], one.time, level)
        elif name == "auroc":
            found[name] = delong_difference(one.flat[0], *other.flat, level=level)
        else:
            found[name] = metric_difference(name, one.flat[0], *other.flat, level=level)
    return found


def seed_intervals(
    wanted: Sequence[str], runs: Sequence[Scores], same: bool, level: float = LEVEL
) -> dict[str, Interval]:
    """The mean of each metric over runs that differ by their seed, with the seeds' variance in its interval."""
    if len(runs) == 1:
        return intervals(wanted, runs[0], level)
    found = {}
    for name in wanted:
        value, error, free = over_seeds(name, runs, [], same)
        how = f"{len(runs)} seeds and jackknife, Student's t"
        reach = float(stdtrit(free, (1 + level) / 2)) * error if error > TINY else math.nan
        found[name] = Interval(value, max(0.0, value - reach), min(1.0, value + reach), level, how)
        if math.isnan(reach):
            found[name] = found[name]._replace(low=math.nan, high=math.nan, how=_why_no_error(error))
    return found


def over_seeds(
    name: str, first: Sequence[Scores], second: Sequence[Scores], same: bool
) -> tuple[float, float, float]:
    """The mean over runs, or of their differences, its standard error and degrees of freedom.

    The variance is that of the examples plus that of training. On the same examples, runs differ by training alone:
    it is the variance of S runs over S. On examples of their own they differ by both, and what is beyond the variance
    of the examples is that of training. Degrees of freedom are those of a sum of two variances (Satterthwaite).
    """
    named = one_metric(name)
    others: Sequence[Scores | None] = list(second) or [None] * len(first)
    both = list(zip(first, others, strict=True))
    values = [_value(named, one) - (0.0 if other is None else _value(named, other)) for one, other in both]
    value, count = float(np.mean(values)), len(values)
    if not math.isfinite(value):
        return value, math.nan, math.nan
    errors = _errors_of_times if first[0].time is not None else _errors
    each = errors(named, first, others, same)  # [1 or S, 2]
    if math.isnan(each[0, 0]):
        return value, math.nan, math.nan
    examples, free = float(np.square(each[:, 0]).mean()) / len(each), float(np.nansum(each[:, 1]))
    seeds = float(np.var(values, ddof=1)) / count if count > 1 else 0.0
    seeds = seeds if same else max(0.0, seeds - examples)
    parts = [part for part in ((examples, free), (seeds, count - 1.0)) if part[0] > 0]
    if not parts:
        return value, 0.0, math.nan
    variances, freedoms = zip(*parts, strict=True)
    return value, math.sqrt(sum(variances)), satterthwaite(variances, freedoms)


def _errors(named: NamedMetric, first: Sequence[Scores], others: Sequence[Scores | None], same: bool) -> Floats:
    """The standard error and degrees of freedom of the mean over runs, or of each run, [1 or S, 2]."""
    statistics, sizes = [], []
    for one, other in zip(first, others, strict=True):
        statistic, size = _statistic(named, one)
        statistics.append(statistic if other is None else _gap(statistic, _statistic(named, other)[0]))
        sizes.append(size)
    if min(map(min, sizes)) < 2:  # without its only example, a class is empty
        return np.full((1, 2), math.nan)

    def mean(*drawn: Floats) -> Floats:
        return np.asarray(np.mean([each(*drawn) for each in statistics], 0))

    runs = [(mean, sizes[0])] if same else list(zip(statistics, sizes, strict=True))
    return np.array([jackknife(statistic, size, MOST_GROUPS) for statistic, size in runs])


def _errors_of_times(
    named: NamedMetric, first: Sequence[Scores], others: Sequence[Scores | None], same: bool
) -> Floats:
    """The same of time to event: how much each example moves the metric."""
    from fedxl.evaluation import survival  # builds on this module

    if min(one.positives for one in first) < 2:
        return np.full((1, 2), math.nan)
    each = [
        survival.influence(named.name, one) - (0.0 if other is None else survival.influence(named.name, other))
        for one, other in zip(first, others, strict=True)
    ]
    moved = [np.mean(each, 0)] if same else each
    return np.array([(math.sqrt(float(one @ one)), degrees_of_freedom(one - one.mean())) for one in moved])


def _value(named: NamedMetric, found: Scores) -> float:
    return measure([named], found)[0][named.name]


def _statistic(named: NamedMetric, found: Scores) -> tuple[Statistic, tuple[int, ...]]:
    """The metric as a function of weights: of positives and negatives; of several labels, of whole examples."""
    if len(found.labels) > 1:
        return of_labels(named, found), (len(found),)
    scores, labels = found.flat
    return measured(named, scores, labels), (found.positives, found.negatives)


def paired(first: Scores, second: Scores) -> tuple[Scores, Scores]:
    """The scores of two runs for the same examples, the second in the order of the first.

    Raises UserError if rows or sites, where both runs know them, or else labels, times and their order differ.
    """
    require(len(first) == len(second), _not_same(f"one has {len(first)} examples, the other {len(second)}"))
    require(first.labels == second.labels, _not_same("they are of other labels"))
    if first.row and second.row:
        second = _in_order(first, second)
    same = np.array_equal(first.y, second.y)
    require(same, _not_same("labels differ, so that examples or their order do"))
    one, other = (np.zeros(0) if each.time is None else each.time for each in (first, second))
    require(np.array_equal(one, other), _not_same("times differ, so that examples or their order do"))
    if first.site is not None and second.site is not None:
        require(_sites(first) == _sites(second), _not_same("sites differ"))
    return first, second


def _no_difference(how: str, level: float) -> Difference:
    return Difference(0.0, 0.0, 0.0, 1.0, f"{how} (the same ranking)", level)


def same_ranking(first: Floats, second: Floats) -> bool:
    """Whether both order all examples alike, ties included."""
    one, two = (np.unique(scores, return_inverse=True)[1] for scores in (first, second))
    return bool(np.array_equal(one, two))


def _alike(first: Scores, second: Scores) -> bool:
    """Whether two runs order the examples of each label alike."""
    each = zip(first.by_label().values(), second.by_label().values(), strict=True)
    return all(same_ranking(one.scores, other.scores) for one, other in each)


def _in_order(first: Scores, second: Scores) -> Scores:
    """The second's examples in the order of the first's rows."""
    sites = first.site is not None and second.site is not None
    wanted, there = _keys(first, sites), {key: index for index, key in enumerate(_keys(second, sites))}
    require(len(there) == len(second) and len(set(wanted)) == len(wanted), _not_same("a row appears twice"))
    missing = next((key for key in wanted if key not in there), None)
    if missing is not None:
        raise UserError(_not_same(f"row '{printable(missing[1], 60)}' is in one of them only"))
    return second.take(np.array([there[key] for key in wanted], np.int64))


def _keys(found: Scores, sites: bool) -> list[tuple[str, str]]:
    """What identifies an example: two sites may use the same name for a row."""
    return list(zip(_sites(found) if sites else [""] * len(found), found.row, strict=True))


def _sites(found: Scores) -> list[str]:
    assert found.site is not None
    return [found.sites[site] for site in found.site]


def _not_same(why: str) -> str:
    return (
        f"the two runs were not scored on the same examples: {why}; a paired comparison needs the same data and split"
    )
