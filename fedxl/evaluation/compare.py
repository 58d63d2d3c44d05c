"""Two models on the same examples: how much better the first one is, and whether that is more than chance."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit
from scipy.stats import norm

from fedxl import metrics
from fedxl.errors import UserError, printable, require
from fedxl.evaluation.delong import covariance, placements
from fedxl.evaluation.intervals import DRAWS, LEVEL, Interval, checked, delong, one_metric, undefined
from fedxl.evaluation.resampling import jackknife, measured, resample
from fedxl.evaluation.scored import Scored

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MOST_GROUPS = 1000  # of a class that are left out in turn; more would take long
TINY = 1e-12  # a standard error that is rounding


class Difference(NamedTuple):
    """The metric of the first model less that of the second, and where the difference lies."""

    value: float
    low: float
    high: float
    p: float  # two-sided, of no difference
    how: str
    level: float = LEVEL


class Pair(NamedTuple):
    """The scores of two models for the same examples."""

    first: Floats  # [n]
    second: Floats  # [n]
    labels: Ints  # [n]


def delong_difference(first: Any, second: Any, labels: Any, level: float = LEVEL) -> Difference:
    """AUROC of the first scores less that of the second: DeLong's p, NaN if neither AUROC varies.

    The interval joins both AUROCs' intervals (`difference_ends`): near 1 it leans as they do.
    """
    (one, classes), (two, _) = checked(first, labels, level), checked(second, labels, level)
    why = undefined(one, classes) or undefined(two, classes)
    value = metrics.auroc(one, classes) - metrics.auroc(two, classes)
    if why:
        return Difference(value, math.nan, math.nan, math.nan, why, level)
    if _same_ranking(one, two):
        return _no_difference("DeLong", level)
    both = placements(one, classes), placements(two, classes)
    spread = covariance(*both)
    error = math.sqrt(max(0.0, float(spread[0, 0] + spread[1, 1] - 2 * spread[0, 1])))
    if error == 0 and spread[0, 0] > 0:  # they differ within a class only
        alike = "not defined: both models rank positives against negatives alike"
        return Difference(value, math.nan, math.nan, math.nan, alike, level)
    low, high = difference_ends(_area(one, classes, level), _area(two, classes, level), spread)
    p = float(2 * norm.sf(abs(value / error))) if error else math.nan
    return Difference(value, low, high, p, "DeLong, both intervals joined", level)


def _area(scores: Floats, labels: Ints, level: float) -> Interval:
    """AUROC; one value if all scores are the same, because AUROC is 1/2 then, whatever the examples."""
    found = delong(scores, labels, level)
    return found if math.isfinite(found.low) else found._replace(low=found.value, high=found.value)


def difference_ends(first: Interval, second: Interval, spread: Floats) -> tuple[float, float]:
    """The interval of first - second, from both intervals and DeLong's covariance of the two, [2, 2].

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
    (one, classes), (two, _) = checked(first, labels, level), checked(second, labels, level)
    named = one_metric(metric)
    value, why = named.value(one, classes) - named.value(two, classes), undefined(one, classes)
    why = why or undefined(two, classes) or ("" if math.isfinite(value) else "not defined: the metric is not finite")
    if why:
        return Difference(value, math.nan, math.nan, math.nan, why, level)
    ours = named.metric in metrics.METRICS.values()
    if ours and _same_ranking(one, two):
        return _no_difference("jackknife", level)
    of_first, of_second = (measured(named, each, classes) for each in (one, two))

    def gap(*drawn: Floats) -> Floats:
        return of_first(*drawn) - of_second(*drawn)

    sizes = int(classes.sum()), int((1 - classes).sum())
    if ours:
        error, free = jackknife(gap, sizes, MOST_GROUPS, seed)
        defined = error > TINY
        how = "jackknife, Student's t" if defined else "not defined: no example makes a difference"
    else:
        found = resample(gap, classes, level, draws, seed)
        # Those of the smaller class: the fewest degrees of freedom that the sum of two variances may have.
        error, free, defined = found.error, min(sizes) - 1, math.isfinite(found.error)
        how = f"bootstrap, {draws} draws, Student's t" if found.error > 0 else found.how
    if not defined:
        return Difference(value, math.nan, math.nan, math.nan, how, level)
    reach = float(stdtrit(free, (1 + level) / 2)) * error
    most = 1.0 if ours else math.inf  # no two values of ours lie farther apart
    p = float(2 * stdtr(free, -abs(value) / error))
    return Difference(value, max(-most, value - reach), min(most, value + reach), p, how, level)


def paired(first: Scored, second: Scored) -> Pair:
    """The scores of two runs for the same examples, the second in the order of the first.

    Raises UserError if rows or sites, where both runs know them, or else labels and their order differ.
    """
    require(len(first) == len(second), _not_same(f"one has {len(first)} examples, the other {len(second)}"))
    if first.rows and second.rows:
        second = _in_order(first, second)
    same = np.array_equal(first.labels, second.labels)
    require(same, _not_same("labels differ, so that examples or their order do"))
    if first.sites is not None and second.sites is not None:
        require(_sites(first) == _sites(second), _not_same("sites differ"))
    return Pair(first.scores, second.scores, first.labels)


def differences(
    first: Scored, second: Scored, *, fpr: float = 0.3, level: float = LEVEL, seed: int = 0
) -> dict[str, Difference]:
    """AUROC, partial AUC and average precision of the first run less those of the second, on the same examples."""
    pair = paired(first, second)
    found = {"auroc": delong_difference(*pair, level=level)}
    for name in (f"pauc@{fpr:g}", "ap"):
        found[name] = metric_difference(name, *pair, level=level, seed=seed)
    return found


def _no_difference(how: str, level: float) -> Difference:
    return Difference(0.0, 0.0, 0.0, 1.0, f"{how} (the same ranking)", level)


def _same_ranking(first: Floats, second: Floats) -> bool:
    """Whether both order all examples alike, ties included."""
    one, two = (np.unique(scores, return_inverse=True)[1] for scores in (first, second))
    return bool(np.array_equal(one, two))


def _in_order(first: Scored, second: Scored) -> Scored:
    """The second's examples in the order of the first's rows."""
    sites = first.sites is not None and second.sites is not None
    wanted, there = _keys(first, sites), {key: index for index, key in enumerate(_keys(second, sites))}
    require(len(there) == len(second) and len(set(wanted)) == len(wanted), _not_same("a row appears twice"))
    missing = next((key for key in wanted if key not in there), None)
    if missing is not None:
        raise UserError(_not_same(f"row '{printable(missing[1], 60)}' is in one of them only"))
    return second.take(np.array([there[key] for key in wanted], np.int64))


def _keys(scored: Scored, sites: bool) -> list[tuple[str, str]]:
    """What identifies an example: two sites may use the same name for a row."""
    return list(zip(_sites(scored) if sites else [""] * len(scored), scored.rows, strict=True))


def _sites(scored: Scored) -> list[str]:
    assert scored.sites is not None
    return [scored.names[site] for site in scored.sites]


def _not_same(why: str) -> str:
    return (
        f"the two runs were not scored on the same examples: {why}; a paired comparison needs the same data and split"
    )
