"""The curves of a report as numbers: of one run exactly, of several the mean at each place of a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fedxl import metrics
from fedxl.evaluation.scored import Scored

Floats = npt.NDArray[np.float64]
Curve = tuple[Floats, Floats]
GRID = np.linspace(0, 1, 501)


def roc(scored: Sequence[Scored]) -> Curve:
    """False and true positive rates, the mean over runs."""
    return _mean([metrics.roc(each.scores, each.labels) for each in scored], _between)


def precision_recall(scored: Sequence[Scored]) -> Curve:
    """Recall and precision, the mean over runs; a step that falls where a false positive comes first."""
    return _mean([_precision_recall(each) for each in scored], _at_least)


def _precision_recall(scored: Scored) -> Curve:
    false, true = metrics.counts(scored.scores, scored.labels)
    precision = true[1:] / (true[1:] + false[1:])
    # The precision of the first threshold holds from recall 0 on: no examples have no precision.
    return np.append(0.0, true[1:] / true[-1]), np.append(precision[:1], precision)


def _mean(curves: Sequence[Curve], at: Callable[[Curve], Floats]) -> Curve:
    if len(curves) == 1:
        return curves[0]
    return GRID, np.asarray(np.mean([at(curve) for curve in curves], 0))


def _between(curve: Curve) -> Floats:
    return np.asarray(np.interp(GRID, *curve))


def _at_least(curve: Curve) -> Floats:
    """The precision of the highest threshold that reaches each recall."""
    x, y = curve
    return np.asarray(y[np.minimum(np.searchsorted(x, GRID - 1e-12), len(x) - 1)])


def both_classes(scored: Scored) -> bool:
    """Whether there is a curve at all."""
    positives = int(scored.labels.sum())
    return 0 < positives < len(scored) and bool(np.isfinite(scored.scores).all())
