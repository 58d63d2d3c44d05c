"""Bootstrap within each class, many draws at a time.

A draw is how often each example counts: [draws, n] weights. fedxl's own metrics are functions of the negatives and
positives at or above each score, which are cumulative sums of weights: whole batches of draws cost a few array
operations. The interval is BCa (B. Efron, "Better bootstrap confidence intervals", JASA 82, 1987) by
`scipy.stats.bootstrap`, for two samples: positives and negatives.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedxl import metrics
from fedxl.errors import require

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Statistic = Callable[[Floats], Floats]  # weights [draws, n] -> values [draws]
BATCH = 2**17  # draws times examples in memory at once: a megabyte an array, which caches hold
MOST_FOR_BCA = 5_000  # examples; BCa leaves each one out, in n^2 operations, and corrects less and less
GENERATOR = "rng" if "rng" in inspect.signature(stats.bootstrap).parameters else "random_state"  # until SciPy 1.15


class Resampled(NamedTuple):
    low: float
    high: float
    error: float  # the standard deviation over draws
    how: str


def resample(statistic: Statistic, labels: Ints, level: float, draws: int, seed: int) -> Resampled:
    """The interval of a statistic over other examples that might have been drawn, as many of each class."""
    require(draws >= 100, f"draws must be at least 100, not {draws}")
    total, classes = len(labels), (np.flatnonzero(labels > 0), np.flatnonzero(labels <= 0))
    many = total > MOST_FOR_BCA

    def of_indices(positives: Ints, negatives: Ints, axis: int = -1) -> Any:
        chosen = np.concatenate([positives, negatives], axis=-1)
        return statistic(weights(chosen.reshape(-1, chosen.shape[-1]), total)).reshape(chosen.shape[:-1])[()]

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of degenerate data, which we find ourselves
        found = stats.bootstrap(
            classes, of_indices, n_resamples=draws, batch=max(1, BATCH // total), vectorized=True,
            confidence_level=level, method="percentile" if many else "BCa",
            **{GENERATOR: np.random.default_rng(seed)},
        )  # fmt: skip
    (low, high), values = found.confidence_interval, found.bootstrap_distribution
    if not np.isfinite(values).all() or np.ptp(values) <= 1e-12 * abs(values[0]):
        why = "all draws agree" if np.isfinite(values).all() else "the metric is not finite in every draw"
        return Resampled(math.nan, math.nan, math.nan, f"not defined: {why}")
    how = f"percentile bootstrap, {draws} draws" if many else f"BCa bootstrap, {draws} draws"
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = metrics.interval(values, level)
        how = f"percentile bootstrap, {draws} draws (BCa is not defined)"
    return Resampled(float(low), float(high), float(found.standard_error), how)


def weights(chosen: Ints, total: int) -> Floats:
    """How often each of `total` examples is among those that each row chose."""
    rows = np.arange(len(chosen))[:, None] * total
    return np.bincount((chosen + rows).ravel(), minlength=len(chosen) * total).reshape(-1, total).astype(np.float64)


def measured(metric: metrics.NamedMetric, scores: Floats, labels: Ints) -> Statistic:
    """A metric as a function of weights."""
    curve = CURVES.get(metric.metric.compute) if metric.metric.compute is not None else None
    if curve is None:
        return lambda drawn: np.array([_each(metric, scores, labels, row) for row in drawn])
    ranked, extra = metrics.ranking(scores, labels), [] if metric.limit is None else [metric.limit]
    positive, tied = ranked.positive > 0, len(ranked.ends) < len(ranked.order)

    def statistic(drawn: Floats) -> Floats:
        each = drawn[:, ranked.order]
        true, both = np.cumsum(np.where(positive, each, 0.0), axis=1), np.cumsum(each, axis=1)
        if tied:
            true, both = true[:, ranked.ends], both[:, ranked.ends]
        return curve(both - true, true, *extra)

    return statistic


def _each(metric: metrics.NamedMetric, scores: Floats, labels: Ints, counts: Floats) -> float:
    chosen = np.repeat(np.arange(len(scores)), counts.astype(np.int64))
    return metric.value(scores[chosen], labels[chosen])


# Metrics by the negatives and positives at or above each distinct score, [draws, k] each; as in metrics.py.


def _area(false: Floats, true: Floats, max_fpr: float = 1.0) -> Floats:
    """Trapezoids up to `max_fpr`; the one that crosses it counts up to there."""
    limit, one = max_fpr * false[:, -1:], np.zeros((len(false), 1))
    left, below = np.hstack([one, false[:, :-1]]), np.hstack([one, true[:, :-1]])
    width, rise = false - left, true - below
    inside = np.clip(limit - left, 0.0, width)
    slope = np.divide(rise, width, out=np.zeros_like(rise), where=width > 0)
    area = np.einsum("dk,dk->d", inside, below + slope * inside / 2)
    return np.asarray(area / (false[:, -1] * true[:, -1]))


def _partial_auc(false: Floats, true: Floats, max_fpr: float) -> Floats:
    chance = max_fpr**2 / 2
    return np.asarray(0.5 * (1 + (_area(false, true, max_fpr) - chance) / (max_fpr - chance)))


def _average_precision(false: Floats, true: Floats) -> Floats:
    above = true + false
    precision = np.divide(true, above, out=np.zeros_like(true), where=above > 0)
    gained = np.diff(true, axis=1, prepend=0.0)
    return np.asarray(np.einsum("dk,dk->d", gained, precision) / true[:, -1])


CURVES: Mapping[Callable[..., float], Callable[..., Floats]] = {
    metrics.auroc: _area,
    metrics.partial_auc: _partial_auc,
    metrics.partial_auc_raw: _area,
    metrics.average_precision: _average_precision,
}
