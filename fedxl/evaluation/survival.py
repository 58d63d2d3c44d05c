"""Metrics of time to event with their intervals: Harrell's and Uno's C, AUC and Brier score at horizons.

Each metric is a function of the examples' weights. Its derivative by the weight of an example is how much that
example moves it (the infinitesimal jackknife; L. Jaeckel, 1972), of weights 1 / G through the censoring distribution
G as well. The sum of squares of these is the metric's variance, and the interval is `intervals.jackknifed`: Wilson's
form, with Student's t and as many degrees of freedom as the kurtosis leaves. Few events that decide mean few. If all
pairs agree there is no variance, and the interval is that of a perfect AUROC (`delong.auroc_ends`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedxl import censored, metrics
from fedxl.errors import require
from fedxl.evaluation import delong
from fedxl.evaluation.compare import Difference, difference_ends, p_of, same_ranking
from fedxl.evaluation.delong import auroc_ends
from fedxl.evaluation.intervals import LEVEL, NO_ERRORS, TINY, Interval, jackknifed, one_metric
from fedxl.evaluation.scores import Floats, Ints, Scores

HOW = "infinitesimal jackknife, Wilson's form"
NOT_FINITE = "not defined: scores are not finite"
NEAR = 1e-12
UNCENSORED = 0.2  # the share that must still be under observation at the last event of Uno's C, but for events
NO_TAU = "not defined: fewer than a fifth are uncensored at the last event; give a time, as in uno@1000"
ONE_EACH = "give one probability to survive the horizon per example"
NO_PAIRS = "not defined: no two examples can be compared"


class Estimate(NamedTuple):
    """A metric, and its derivative by the weight of each example."""

    value: float
    influence: Floats  # [n], whose sum is 0
    sizes: tuple[
        int, ...
    ] = ()  # of a share of pairs: examples with the event, and others that they were compared with


def as_arrays(scores: Any, events: Any, times: Any, level: float = LEVEL) -> tuple[Floats, Ints, Floats]:
    """`censored.as_arrays`, and a level that is one."""
    require(0 < level < 1, f"level must lie between 0 and 1, as in 0.95, not {level}")
    return censored.as_arrays(scores, events, times)


# Estimates


def harrell(scores: Floats, events: Ints, times: Floats) -> Estimate:
    """Harrell's C."""
    return _of_pairs(scores, events, times, censored.event_weights(events))[0]


def uno(scores: Floats, events: Ints, times: Floats, tau: float = math.inf) -> Estimate:
    """Uno's C, of events before tau."""
    found, slopes = _of_pairs(scores, events, times, censored.uno_weights(events, times, tau))
    through = censoring_influence(events, times, times, -2 * slopes)
    return found._replace(influence=found.influence + through)


def auc_at(scores: Floats, events: Ints, times: Floats, horizon: float) -> Estimate:
    """Cumulative/dynamic AUC at a horizon."""
    placed = censored.placements(scores, events, times, horizon)
    value, influence = placed.auc, np.zeros(len(times))
    sizes = len(placed.cases), len(placed.controls)
    if math.isnan(value):
        return Estimate(value, influence, sizes)
    moved = placed.weights * (placed.below - value) / placed.weights.sum()
    influence[placed.cases] = moved
    influence[placed.controls] = (placed.above - value) / len(placed.controls)
    return Estimate(value, influence + censoring_influence(events, times, times[placed.cases], -moved), sizes)


def brier(survival: Floats, events: Ints, times: Floats, horizon: float) -> Estimate:
    """Brier score at a horizon of predicted probabilities to survive it."""
    curve = censored.censoring_curve(events, times)
    case, control = (events > 0) & (times <= horizon), times > horizon
    weights = np.where(case, censored.inverse_weights(curve, times), 0.0)
    weights[control] = censored.inverse_weights(curve, horizon)
    each = weights * (survival - control) ** 2 / len(times)
    value = float(each.sum())
    through = censoring_influence(events, times, np.where(control, horizon, times), -each)
    return Estimate(value, each - value / len(times) + through)


def integrated_brier(survival: Floats, events: Ints, times: Floats, horizons: Floats) -> Estimate:
    """The mean Brier score between the first horizon and the last, by trapezoids; survival: [n, horizons]."""
    gaps = np.diff(horizons) / (horizons[-1] - horizons[0])
    shares = (np.append(gaps, 0.0) + np.append(0.0, gaps)) / 2
    each = [brier(column, events, times, float(at)) for column, at in zip(survival.T, horizons, strict=True)]
    return Estimate(
        float(sum(share * one.value for share, one in zip(shares, each, strict=True))),
        np.asarray(sum(share * one.influence for share, one in zip(shares, each, strict=True))),
    )


def censoring_influence(events: Ints, times: Floats, at: Floats, slopes: Floats) -> Floats:
    """How each example moves a metric through G, from the metric's slopes by log G after the times `at`.

    log G(t) is the sum of log(1 - c / Y) over times u <= t, for c examples of Y at risk that are censored at u. The
    weight of an example at risk moves a term by c / (Y (Y - c)); if it is censored at u, by -1 / (Y - c) besides.
    """
    curve = censored.censoring_curve(events, times)
    order = np.argsort(at, kind="stable")
    sums = np.append(0.0, np.cumsum(slopes[order][::-1]))[::-1]  # of all at or after each
    beyond = sums[np.searchsorted(at[order], curve.times)]
    left = curve.at_risk - curve.events
    single = np.divide(beyond, left, out=np.zeros_like(left), where=left > 0)
    gained = np.cumsum(single * np.divide(curve.events, curve.at_risk, out=np.zeros_like(left), where=left > 0))
    number = np.searchsorted(curve.times, times)
    # Who has an event is no longer at risk of being censored at its time.
    moved = np.where(events > 0, np.append(0.0, gained)[number], gained[number] - single[number])
    return np.asarray(moved, np.float64)


def _of_pairs(scores: Floats, events: Ints, times: Floats, weights: Floats) -> tuple[Estimate, Floats]:
    """Concordance with its influence at fixed weights, and its slopes by the logarithms of the weights."""
    found = censored.pairs(scores, events, times, weights)
    value, met = found.concordance, float(found.met_first.sum())
    sizes = int((found.met_first > 0).sum()), int((found.met_last > 0).sum())
    if math.isnan(value):
        return Estimate(value, np.zeros(len(times)), sizes), np.zeros(len(times))
    first = (found.won_first - value * found.met_first) / met
    last = (found.won_last - value * found.met_last) / met
    return Estimate(value, first + last, sizes), first


# Intervals

Estimator = Callable[..., Estimate]  # of scores, events, times and, if the metric takes one, a limit
ESTIMATORS: Mapping[Callable[..., float] | None, Estimator] = {
    censored.harrell: harrell,
    censored.uno: uno,
    censored.auc_at: auc_at,
}


def interval(metric: metrics.Item, scores: Any, events: Any, times: Any, level: float = LEVEL) -> Interval:
    """A metric of time to event with its interval: "cindex", "uno", "uno@1000", "auc_at@365".

    >>> found = interval("cindex", [5, 4, 1, 3, 2, 0], [1, 1, 1, 0, 1, 0], [1, 3, 2, 4, 5, 6])
    >>> f"{found.value:.3f} {found.low:.3f} {found.high:.3f}"
    '0.769 0.258 0.970'
    """
    values, happened, at = as_arrays(scores, events, times, level)
    named, estimator = _estimator(metric)
    if not np.isfinite(values).all():
        return Interval(math.nan, math.nan, math.nan, level, NOT_FINITE)
    found = estimator(values, happened, at, *_limits(named))
    if why := _needs_tau(named, happened, at):
        return Interval(found.value, math.nan, math.nan, level, why)
    return _interval(found, level)


def brier_interval(survival: Any, events: Any, times: Any, horizon: float, level: float = LEVEL) -> Interval:
    """The Brier score at a horizon of predicted probabilities to survive it, [n]: scikit-survival's `brier_score`.

    The squared distance of the prediction from what came, 0 after an event and 1 beyond the horizon. Who was last
    seen before the horizon does not count, and others count 1 / G for it (E. Graf et al., Statistics in Medicine 18,
    1999); 0 where nobody is left uncensored, as in scikit-survival.
    """
    values, happened, at = probabilities(survival, events, times, level)
    require(values.shape == at.shape, ONE_EACH)
    return _interval(brier(values, happened, at, horizon), level, _no_horizon(at, [horizon]))


def integrated_brier_interval(
    survival: Any, events: Any, times: Any, horizons: Sequence[float], level: float = LEVEL
) -> Interval:
    """The mean Brier score over time, by trapezoids: scikit-survival's `integrated_brier_score`.

    survival: probabilities to survive each horizon, [n, horizons].
    """
    values, happened, at = probabilities(survival, events, times, level)
    grid = np.asarray(horizons, np.float64)
    require(len(grid) >= 2 and bool((np.diff(grid) > 0).all()), "horizons must be at least two, and ascend")
    fits = values.shape == (len(at), len(grid))
    require(fits, f"give a probability per example and horizon, {(len(at), len(grid))}, not {values.shape}")
    found = integrated_brier(values, happened, at, grid)
    return _interval(found, level, _no_horizon(at, grid))


def difference(
    metric: metrics.Item, first: Any, second: Any, events: Any, times: Any, level: float = LEVEL
) -> Difference:
    """A metric of the first scores less that of the second, on the same examples.

    The interval joins those of both (`compare.difference_ends`). p is one less the level from which on it holds 0.
    """
    (one, happened, at), (two, _, _) = (as_arrays(scores, events, times, level) for scores in (first, second))
    named, estimator = _estimator(metric)
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        return Difference(math.nan, math.nan, math.nan, math.nan, NOT_FINITE, level)
    each = [estimator(scores, happened, at, *_limits(named)) for scores in (one, two)]
    value = each[0].value - each[1].value
    why = _undefined(each[0]) or _undefined(each[1]) or _needs_tau(named, happened, at)
    if why:
        return Difference(value, math.nan, math.nan, math.nan, why, level)
    if same_ranking(one, two):
        return Difference(0.0, 0.0, 0.0, 1.0, f"{HOW} (the same ranking)", level)
    spread = np.cov(np.stack([found.influence for found in each])) * len(at)

    def ends(sure: float) -> tuple[float, float]:
        first, second = (Interval(found.value, *_ends(found, sure), sure, "") for found in each)
        return difference_ends(first, second, spread)

    return Difference(value, *ends(level), p_of(value, ends), f"{HOW}, both intervals joined", level)


def influence(metric: metrics.Item, found: Scores) -> Floats:
    """How much each example moves a metric of scores of time to event."""
    assert found.time is not None
    named, estimator = _estimator(metric)
    return estimator(*found.flat, found.time, *_limits(named)).influence


def _estimator(metric: metrics.Item) -> tuple[metrics.NamedMetric, Estimator]:
    named = one_metric(metric)
    known = ", ".join(metrics.TIME_METRICS)
    require(named.metric.compute in ESTIMATORS, f"'{named.name}' is no metric of time to event; those are {known}")
    return named, ESTIMATORS[named.metric.compute]


def _needs_tau(named: metrics.NamedMetric, events: Ints, times: Floats) -> str:
    """Why Uno's C of all events has no interval; empty if it has.

    What lies beyond the last event of heavily censored data is not in the data, and late events weigh 1 / G^2.
    """
    if named.metric.compute is not censored.uno or named.limit is not None or not events.any():
        return ""
    left = float(censored.censoring_curve(events, times).at(times[events > 0].max()))
    return "" if left >= UNCENSORED else NO_TAU


def _limits(named: metrics.NamedMetric) -> list[float]:
    return [] if named.limit is None else [named.limit]


def probabilities(survival: Any, events: Any, times: Any, level: float) -> tuple[Floats, Ints, Floats]:
    values, (_, happened, at) = np.asarray(survival, np.float64), as_arrays(times, events, times, level)
    require(len(at) > 0, "there are no examples")
    require(bool(((values >= 0) & (values <= 1)).all()), "probabilities to survive must lie in [0, 1]")
    return values, happened, at


def _no_horizon(times: Floats, horizons: Any) -> str:
    """Why there is no score at these horizons; empty if there is."""
    last = float(times.max())
    return "" if max(horizons) < last else f"not defined: nobody was seen beyond {max(horizons):g}"


def _undefined(found: Estimate) -> str:
    """Why there is no interval; empty if there is."""
    if math.isnan(found.value):
        return NO_PAIRS
    if len(found.influence) < 3 or min(found.sizes, default=2) < 2:
        return "not defined: there are too few examples"
    known = not _is_constant(found) or (found.sizes and _all_agree(found.value))
    return "" if known else "not defined: no example makes a difference"


def _all_agree(value: float) -> bool:
    """Whether it is 0 or 1, but for rounding."""
    return abs(value - round(value)) < NEAR


def _is_constant(found: Estimate) -> bool:
    return float((found.influence**2).sum()) <= TINY


def _ends(found: Estimate, level: float) -> tuple[float, float]:
    value, size = found.value, len(found.influence)
    if _is_constant(found):  # all pairs agree
        return auroc_ends(delong.Placements(*(np.full(count, round(value)) for count in found.sizes)), level)
    left = value - found.influence * size / (size - 1)  # without each example
    return jackknifed(value, left, level)


def _interval(found: Estimate, level: float, why: str = "") -> Interval:
    if why:
        return Interval(math.nan, math.nan, math.nan, level, why)
    if why := _undefined(found):
        return Interval(found.value, math.nan, math.nan, level, why)
    return Interval(found.value, *_ends(found, level), level, NO_ERRORS if _is_constant(found) else HOW)
