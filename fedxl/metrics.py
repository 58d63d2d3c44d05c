"""Figures of merit of raw scores: AUROC, partial AUC, average precision. Nothing is squashed on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def counts(scores: Any, labels: Any) -> tuple[Floats, Floats]:
    """Negatives and positives at or above each distinct score, from the highest down, beginning with (0, 0)."""
    scores, labels = np.asarray(scores, np.float64), np.asarray(labels)
    order = np.argsort(-scores, kind="stable")
    ranked, positive = scores[order], labels[order] > 0
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)  # the last of each run of ties
    hits = np.cumsum(positive)[ends]
    return np.append(0.0, ends + 1.0 - hits), np.append(0.0, hits)


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
    fpr, tpr = roc(scores, labels)
    inside = int(np.searchsorted(fpr, max_fpr, side="right"))
    x = np.append(fpr[:inside], max_fpr)
    y = np.append(tpr[:inside], np.interp(max_fpr, fpr, tpr) if inside < len(fpr) else tpr[-1])
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1])) / 2)


def partial_auc(scores: Any, labels: Any, max_fpr: float) -> float:
    """Partial AUC on McClish's scale: 0.5 for chance, 1 for a perfect ranking (the scale of the paper's tables)."""
    area = partial_auc_raw(scores, labels, max_fpr)
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


def _both(scores: Any, labels: Any) -> bool:
    positive = np.asarray(labels) > 0
    return bool(positive.any() and not positive.all() and np.isfinite(np.asarray(scores, np.float64)).all())
