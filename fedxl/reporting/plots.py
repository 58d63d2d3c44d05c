"""Pictures for people who would rather look than read. matplotlib is an extra: fedxl[report]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedxl import metrics
from fedxl.errors import UserError

Floats = npt.NDArray[np.float64]
# One colour and line style an algorithm, in the order in which they are drawn; told apart without colour, too.
STYLES = [("#1b6ca8", "-"), ("#d1495b", "--"), ("#edae49", "-."), ("#66a182", ":"), ("#555555", (0, (5, 1)))]


def require_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install 'fedxl[report]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def mean_roc(scores: Sequence[tuple[Floats, Floats]], grid: Floats) -> Floats:
    """The mean true positive rate over runs, at each false positive rate of the grid."""
    curves = [np.interp(grid, *metrics.roc(s, y)) for s, y in scores]
    return np.asarray(np.mean(curves, 0))


def roc_and_convergence(
    path: Path,
    scores: Mapping[str, Sequence[tuple[Floats, Floats]]],
    curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]],
    max_fpr: float,
    metric_name: str,
) -> None:
    """Left: ROC curves on test data, mean over runs, partial-AUC region shaded. Right: a metric round by round."""
    plt = require_matplotlib()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    grid = np.linspace(0, 1, 501)
    left.axvspan(0, max_fpr, color="#1b6ca8", alpha=0.08, lw=0, label=f"partial AUC: FPR ≤ {max_fpr:g}")
    for (name, runs), (colour, style) in zip(scores.items(), STYLES, strict=False):
        left.plot(grid, mean_roc(runs, grid), color=colour, ls=style, lw=1.8, label=name)
    left.set(
        xlabel="false positive rate",
        ylabel="true positive rate",
        xlim=(0, 1),
        ylim=(0.4, 1.005),
        title="ROC, test data",
    )
    left.legend(loc="lower right", frameon=False)

    for (name, histories), (colour, style) in zip(curves.items(), STYLES, strict=False):
        rounds = [r for r, _ in histories[0]]
        values = np.array([[value for _, value in history] for history in histories])
        right.plot(rounds, values.mean(0), color=colour, ls=style, lw=1.8, label=name)
        mean, spread = values.mean(0), values.std(0)
        right.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.1, lw=0)
    right.set(xlabel="round", ylabel=metric_name, title="Validation data: mean and standard deviation over seeds")
    right.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    plt.close(figure)
