"""Pictures for people who would rather look than read. matplotlib is an extra: fedxl[report]."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedxl import metrics
from fedxl.errors import UserError
from fedxl.evaluation.scores import Floats

# One colour and line style an algorithm, in the order in which they are drawn; told apart without colour, too.
# The colours are those of the report's style sheet.
STYLES = [("#0072b2", "-"), ("#b84a00", "--"), ("#007a5a", "-."), ("#a3417a", ":"), ("#7d5c00", (0, (5, 1)))]


def require_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install 'fedxl[report]'") from None
    if "MPLBACKEND" not in os.environ:  # a notebook has one of its own
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


class Line(NamedTuple):
    """A method in the picture: its test scores, run by run, and its validation metric by round, run by run."""

    scores: Sequence[tuple[Floats, Floats]]
    history: Sequence[Sequence[tuple[int, float]]]
    value: str  # its metric with an interval, for the legend


def roc_and_convergence(path: Path, title: str, lines: Mapping[str, Line], max_fpr: float, metric_name: str) -> None:
    """Left: ROC curves on test data, mean over runs, partial-AUC region shaded. Right: a metric round by round."""
    plt = require_matplotlib()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    _rocs(left, lines, max_fpr, metric_name)
    ends = [_convergence(right, line, *style) for line, style in zip(lines.values(), STYLES, strict=False)]
    right.set(xlabel="round", ylabel=metric_name, title="Validation data: mean and standard deviation over seeds")
    right.grid(alpha=0.25)
    right.spines[["top", "right"]].set_visible(False)
    lowest = min(float(np.mean([run[0][1] for run in line.history])) for line in lines.values())
    right.set_ylim(bottom=max(right.get_ylim()[0], lowest - 0.03))  # a band may leave the picture, no line does
    low, high = right.get_ylim()
    heights = spread([height for _, height in ends], (high - low) / 18)
    for name, (last, end), height, (colour, _) in zip(lines, ends, heights, STYLES, strict=False):
        right.annotate(
            name, (last, end), xytext=(1.03, height), textcoords=right.get_yaxis_transform(), color=colour,
            va="center", fontweight="bold", fontsize=9,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7, "shrinkA": 1, "shrinkB": 0},
        )  # fmt: skip
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _rocs(axes: Any, lines: Mapping[str, Line], max_fpr: float, metric_name: str) -> None:
    """The legend lies below the diagonal, where no curve is that is better than chance."""
    grid = np.linspace(0, 1, 501)
    axes.axvspan(0, max_fpr, color=STYLES[0][0], alpha=0.08, lw=0)
    axes.plot([0, 1], [0, 1], color="#767e87", ls=":", lw=1)
    for (name, line), (colour, style) in zip(lines.items(), STYLES, strict=False):
        mean = np.mean([np.interp(grid, *metrics.roc(scores, labels)) for scores, labels in line.scores], 0)
        axes.plot(grid, mean, color=colour, ls=style, lw=1.8, label=f"{name}  {line.value}")
    axes.set(
        xlabel="false positive rate", ylabel="true positive rate", xlim=(0, 1), ylim=(0, 1.005),
        title="Test data: mean ROC curves",
    )  # fmt: skip
    axes.text(max_fpr - 0.01, 0.02, f"FPR ≤ {max_fpr:g}", color=STYLES[0][0], ha="right", fontsize=9)
    axes.legend(loc="lower right", frameon=False, title=f"{metric_name}, 95 % interval", fontsize=9, title_fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _convergence(axes: Any, line: Line, colour: str, style: Any) -> tuple[float, float]:
    """Draw a line with its band; where it ends."""
    rounds = [round for round, _ in line.history[0]]
    values = np.array([[value for _, value in history] for history in line.history])
    mean, deviation = values.mean(0), values.std(0)
    axes.plot(rounds, mean, color=colour, ls=style, lw=1.8)
    axes.fill_between(rounds, mean - deviation, mean + deviation, color=colour, alpha=0.1, lw=0)
    return float(rounds[-1]), float(mean[-1])


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Heights with a gap between neighbours, in the order of the wanted ones and as near to them as can be.

    Least squares: neighbours that would be too close form a block around the mean of what they want.

    >>> spread([10, 12, 50], 10)
    [6.0, 16.0, 50.0]
    """
    from scipy.optimize import isotonic_regression  # takes a third of a second to load

    order = np.argsort(np.asarray(places, np.float64), kind="stable")
    steps = gap * np.arange(len(order))
    found = np.empty(len(order))
    found[order] = isotonic_regression(np.asarray(places, np.float64)[order] - steps).x + steps
    return [float(height) for height in found]
