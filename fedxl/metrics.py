"""Figures of merit of raw scores: AUROC, partial AUC, average precision. Nothing is squashed on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Ranking(NamedTuple):
    """Examples from the highest score down."""

    order: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]  # the last of each run of ties
    positive: Floats  # 1 or 0, in this order

    def counts(self, weights: Floats | None = None) -> tuple[Floats, Floats]:
        """Negatives and positives at or above each distinct score, from (0, 0) on; weights count an example more."""
        each = np.ones(len(self.order)) if weights is None else weights[self.order]
        hits = np.cumsum(self.positive * each)[self.ends]
        return np.append(0.0, np.cumsum(each)[self.ends] - hits), np.append(0.0, hits)


def ranking(scores: Any, labels: Any) -> Ranking:
    scores = np.asarray(scores, np.float64)
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
    return Ranking(order, ends, (np.asarray(labels)[order] > 0).astype(np.float64))


def counts(scores: Any, labels: Any) -> tuple[Floats, Floats]:
    """Negatives and positives at or above each distinct score, from the highest down, beginning with (0, 0)."""
    return ranking(scores, labels).counts()


def roc(scores: Any, labels: Any) -> tuple[Floats, Floats]:
    """(false positive rate, true positive rate); needs both classes."""
    false, true = counts(scores, labels)
    return false / false[-1], true / true[-1]


def auroc(scores: Any, labels: Any) -> float:
    """Area under the ROC curve; ties count one half. NaN with one class only."""
    return partial_auc_raw(scores, labels, 1.0)


def partial_auc_raw(scores: Any, labels: Any, max_fpr: float) -> float:
    """Area under the ROC curve up to a false positive rate, at most `max_fpr`."""
    if not _both(scores, labels):
        return float("nan")
    return _area(*roc(scores, labels), max_fpr)


def _area(fpr: Floats, tpr: Floats, max_fpr: float) -> float:
    inside = int(np.searchsorted(fpr, max_fpr, side="right"))
    x = np.append(fpr[:inside], max_fpr)
    y = np.append(tpr[:inside], np.interp(max_fpr, fpr, tpr) if inside < len(fpr) else tpr[-1])
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1])) / 2)


def partial_auc(scores: Any, labels: Any, max_fpr: float) -> float:
    """Partial AUC on McClish's scale: 0.5 for chance, 1 for a perfect ranking (the scale of the paper's tables)."""
    return _mcclish(partial_auc_raw(scores, labels, max_fpr), max_fpr)


def _mcclish(area: float, max_fpr: float) -> float:
    chance = max_fpr**2 / 2
    return 0.5 * (1 + (area - chance) / (max_fpr - chance))


def average_precision(scores: Any, labels: Any) -> float:
    """Sum over thresholds of precision times the recall gained. NaN with one class only."""
    if not _both(scores, labels):
        return float("nan")
    false, true = counts(scores, labels)
    precision = true[1:] / (true[1:] + false[1:])
    return float(np.sum(np.diff(true) * precision) / true[-1])


def summary(scores: Any, labels: Any, max_fprs: Sequence[float]) -> dict[str, float]:
    """All figures by name, and how many examples of each class they rest on."""
    positives = int(np.sum(np.asarray(labels) > 0))
    figures = {"auroc": auroc(scores, labels), "ap": average_precision(scores, labels)}
    for limit in max_fprs:
        figures[f"pauc@{limit:g}"] = partial_auc(scores, labels, limit)
        figures[f"pauc_raw@{limit:g}"] = partial_auc_raw(scores, labels, limit)
    return figures | {"positives": positives, "negatives": len(np.asarray(labels)) - positives}


def resampled(runs: Sequence[Any], labels: Any, max_fpr: float = 1.0, times: int = 1000, seed: int = 0) -> Floats:
    """Partial AUC (AUC at 1) on other test sets that might have been drawn: a bootstrap within each class.

    The mean over runs that scored the same examples. Draws depend on the labels and the seed alone: two methods meet
    the same test sets, so that their figures may be subtracted one by one.
    """
    rng, positive = np.random.default_rng(seed), np.asarray(labels) > 0
    classes = [np.flatnonzero(positive == side) for side in (True, False)]
    ranked = [ranking(scores, labels) for scores in runs]
    drawn = np.empty(times)
    for number in range(times):
        chosen = np.concatenate([rng.choice(members, len(members)) for members in classes])
        weights = np.bincount(chosen, minlength=len(positive)).astype(np.float64)
        curves = (run.counts(weights) for run in ranked)
        areas = [_area(false / false[-1], true / true[-1], max_fpr) for false, true in curves]
        drawn[number] = np.mean([area if max_fpr == 1 else _mcclish(area, max_fpr) for area in areas])
    return drawn


def interval(values: Any, level: float = 0.95) -> tuple[float, float]:
    """The middle `level` of these values."""
    low, high = np.quantile(np.asarray(values, np.float64), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _both(scores: Any, labels: Any) -> bool:
    positive = np.asarray(labels) > 0
    return bool(positive.any() and not positive.all() and np.isfinite(np.asarray(scores, np.float64)).all())
