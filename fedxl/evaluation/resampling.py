"""Metrics of many weighted sets at once: the bootstrap within each class, and the jackknife.

A draw is how often each example counts: weights of the positives, [draws, m], and of the negatives, [draws, n].
fedxl's own metrics are sums over positives of what stands above them, which cumulative sums of weights give: whole
batches of draws cost a few array operations. The bootstrap's interval is BCa (B. Efron, "Better bootstrap confidence
intervals", JASA 82, 1987) by `scipy.stats.bootstrap`, for two samples: positives and negatives.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from fedxl import metrics
from fedxl.errors import require
from fedxl.evaluation.delong import satterthwaite
from fedxl.evaluation.scores import Floats, Ints

Statistic = Callable[..., Floats]  # weights [draws, m] and [draws, n], or of whole examples -> values [draws]
BATCH = 2**17  # draws times examples in memory at once: a megabyte an array, which caches hold
MOST_FOR_BCA = 5_000  # examples; BCa leaves each one out, in n^2 operations, and corrects less and less
GENERATOR = "rng" if "rng" in inspect.signature(stats.bootstrap).parameters else "random_state"  # until SciPy 1.15
MOST_WORK = 4e7  # draws times examples of one bootstrap, about a second; beyond it there are fewer draws
FEWEST = 400  # draws


def affordable(draws: int, examples: int) -> int:
    """So many draws, or fewer where a bootstrap of so many examples would take long."""
    return int(min(draws, max(FEWEST, MOST_WORK // max(1, examples))))


class Resampled(NamedTuple):
    low: float
    high: float
    error: float  # the standard deviation over draws
    how: str


def resample(statistic: Statistic, labels: Ints, level: float, draws: int, seed: int) -> Resampled:
    """The interval of a statistic over other examples that might have been drawn, as many of each class."""
    require(draws >= 100, f"draws must be at least 100, not {draws}")
    sizes = int((labels > 0).sum()), int((labels <= 0).sum())
    many = len(labels) > MOST_FOR_BCA

    def of_indices(positives: Ints, negatives: Ints, axis: int = -1) -> Any:
        each = [weights(chosen, size) for chosen, size in zip((positives, negatives), sizes, strict=True)]
        return statistic(*each).reshape(positives.shape[:-1])[()]

    settings = {"data": tuple(map(np.arange, sizes)), "statistic": of_indices, "vectorized": True}
    settings |= {"batch": max(1, BATCH // len(labels)), GENERATOR: np.random.default_rng(seed)}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of degenerate data, which we find ourselves
        found = stats.bootstrap(**settings, n_resamples=draws, confidence_level=level, method="percentile")
        if not many:
            settings |= {"n_resamples": 0, "bootstrap_result": found}  # the same draws
            found = stats.bootstrap(**settings, confidence_level=level, method="BCa")
    (low, high), values = found.confidence_interval, found.bootstrap_distribution
    if not np.isfinite(values).all() or np.ptp(values) <= 1e-12 * abs(values[0]):
        why = "all draws agree" if np.isfinite(values).all() else "the metric is not finite in every draw"
        return Resampled(math.nan, math.nan, math.nan, f"not defined: {why}")
    how = f"percentile bootstrap, {draws} draws" if many else f"BCa bootstrap, {draws} draws"
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = metrics.interval(values, level)
        how = f"percentile bootstrap, {draws} draws (BCa is not defined)"
    return Resampled(float(low), float(high), float(found.standard_error), how)


def resampled(runs: Sequence[Any], labels: Any, max_fpr: float = 1.0, times: int = 1000, seed: int = 0) -> Floats:
    """Partial AUC (AUC at 1) on other test sets that might have been drawn: a bootstrap within each class.

    The mean over runs that scored the same examples. Draws depend on the labels and the seed alone: two methods meet
    the same test sets, so that their metrics may be subtracted one by one.
    """
    rng, positive = np.random.default_rng(seed), (np.asarray(labels) > 0).astype(np.int64)
    (partial_auc,) = metrics.resolve([f"pauc@{max_fpr!r}"])
    statistics = [measured(partial_auc, np.asarray(scores, np.float64), positive) for scores in runs]
    drawn = np.empty(times)
    for number in range(times):
        chosen = (rng.choice(size, (1, size)) for size in (positive.sum(), (1 - positive).sum()))
        each = [weights(one, one.size) for one in chosen]
        drawn[number] = np.mean([statistic(*each) for statistic in statistics])
    return drawn


def jackknife(
    statistic: Statistic, sizes: tuple[int, ...], most: int | None = None, seed: int = 0
) -> tuple[float, float]:
    """The jackknife's standard error, each example left out of its class, and its degrees of freedom.

    Of a class of more than `most` examples, so many random groups are left out (J. Shao, D. Tu, 1995, section 2.3).
    """
    rng, rows, parts, freedoms = np.random.default_rng(seed), max(1, BATCH // sum(sizes)), [], []
    for side, size in enumerate(sizes):
        count = min(size, most or size)
        group = rng.permutation(np.arange(size) % count) if count < size else np.arange(size)
        found = []
        for left in np.array_split(np.arange(count), math.ceil(count / rows)):
            each = [np.ones((len(left), other)) for other in sizes]
            each[side][group[None] == left[:, None]] = 0
            found.append(statistic(*each))
        parts.append((count - 1) * float(np.var(np.concatenate(found))))
        freedoms.append(count - 1)
    return math.sqrt(sum(parts)), satterthwaite(parts, freedoms) if sum(parts) > 0 else math.nan


def weights(chosen: Ints, size: int) -> Floats:
    """How often each of `size` examples is among those that each row chose."""
    rows = chosen.reshape(-1, chosen.shape[-1])
    cells = rows + np.arange(len(rows))[:, None] * size
    return np.bincount(cells.ravel(), minlength=len(rows) * size).reshape(-1, size).astype(np.float64)


def is_corrected(metric: metrics.NamedMetric) -> bool:
    """Whether the mean's interval of a metric rests on an estimate that is less biased."""
    return metric.metric.compute in CORRECTED


def measured(metric: metrics.NamedMetric, scores: Floats, labels: Ints, *, corrected: bool = False) -> Statistic:
    """A metric as a function of weights; positives and negatives are in the order of the examples."""
    curves = CURVES | CORRECTED if corrected else CURVES
    curve = curves.get(metric.metric.compute) if metric.metric.compute is not None else None
    if curve is None:

        def one_draw(true: Floats, false: Floats) -> float:
            counts = np.empty(len(labels), np.int64)
            counts[labels > 0], counts[labels <= 0] = true, false
            chosen = np.repeat(np.arange(len(scores)), counts)
            return metric.value(scores[chosen], labels[chosen])

        return lambda true, false: np.array([one_draw(*row) for row in zip(true, false, strict=True)])
    high, low = scores[labels > 0], scores[labels <= 0]
    places, extra = _places(high, low), [] if metric.limit is None else [metric.limit]

    def statistic(true: Floats, false: Floats) -> Floats:
        # BCa counts draws below the observed value, and halves ties: rounding must not decide which is which.
        return np.round(curve(_standing(places, true, false), *extra), 12)

    return statistic


class _Places(NamedTuple):
    """Where positives and negatives stand, from the highest score down; the same for all draws."""

    positives: Ints  # [m], their order
    negatives: Ints  # [n]
    above: Ints  # [m], negatives with a higher score than each positive, in its order
    reached: Ints  # [m], negatives with a score that is higher or the same
    last: Ints  # [m], positives with a score that is higher or the same


class _Standing(NamedTuple):
    """What stands above each positive, in all draws; from the highest score down."""

    weight: Floats  # [draws, m], how often it counts
    above: Floats  # [draws, m], negatives above
    reached: Floats  # [draws, m], negatives above or beside
    true: Floats  # [draws, m], positives above or beside
    negatives: Floats  # [draws, 1]


def _places(high: Floats, low: Floats) -> _Places:
    first, second = np.argsort(-high, kind="stable"), np.argsort(-low, kind="stable")
    ranked, others = -high[first], -low[second]
    above, reached = np.searchsorted(others, ranked), np.searchsorted(others, ranked, "right")
    return _Places(first, second, above, reached, np.searchsorted(ranked, ranked, "right"))


def _standing(places: _Places, true: Floats, false: Floats) -> _Standing:
    weight = true[:, places.positives]
    negatives, positives = _sums(false[:, places.negatives]), _sums(weight)
    above = negatives[:, places.above]
    tied = bool((places.reached > places.above).any())
    reached = negatives[:, places.reached] if tied else above
    return _Standing(weight, above, reached, positives[:, places.last], negatives[:, -1:])


def _sums(each: Floats) -> Floats:
    """Cumulative sums, from 0 on."""
    found = np.zeros((len(each), each.shape[1] + 1))
    np.cumsum(each, axis=1, out=found[:, 1:])
    return found


# Metrics of many draws; metrics.py has their definitions.


def _area(found: _Standing, max_fpr: float = 1.0) -> Floats:
    """Each positive counts the negatives up to the limit that are below it; half of those beside it."""
    right = np.maximum(max_fpr * found.negatives - found.above, 0.0)
    if found.reached is not found.above:
        beside = found.reached - found.above
        inside = np.minimum(right, beside)
        shares = np.divide(inside, 2 * beside, out=np.zeros_like(inside), where=beside > 0)
        right = right - inside + inside * shares
    return np.asarray(np.einsum("dm,dm->d", found.weight, right) / (found.true[:, -1] * found.negatives[:, 0]))


def _average_precision(found: _Standing, itself: float = 1.0) -> Floats:
    """The mean precision at positives; `itself` is how much a positive counts among those at its own score."""
    true = found.true if itself == 1 else found.true - (1 - itself) * found.weight
    both = true + found.reached
    precision = np.divide(true, both, out=np.zeros_like(both), where=both > 0)
    return np.asarray(np.einsum("dm,dm->d", found.weight, precision) / found.true[:, -1])


CURVES: dict[Callable[..., float], Callable[..., Floats]] = {
    metrics.auroc: _area,
    metrics.partial_auc: lambda found, max_fpr: metrics.mcclish(_area(found, max_fpr), max_fpr),
    metrics.partial_auc_raw: _area,
    metrics.average_precision: _average_precision,
}
# At the score of a positive with recall r, 1 + (m - 1) r of m positives are counted on average, which is (1 - r) too
# many: one half, over all recalls. So half of each positive is left out at its own score.
CORRECTED: dict[Callable[..., float] | None, Callable[..., Floats]] = {
    metrics.average_precision: partial(_average_precision, itself=0.5),
}
