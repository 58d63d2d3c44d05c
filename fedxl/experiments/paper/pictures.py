"""Plots of the paper's tables and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

import numpy as np

from fedxl.reporting.plots import STYLES, require_matplotlib

Curve = list[tuple[float, float]]
PANEL_LETTERS = 46  # that fit on a line of a panel's title


class Bar(NamedTuple):
    mean: float
    spread: float
    paper: float | None
    interval: tuple[float, float] | None  # over bootstrapped test sets


def bars(path: Path, title: str, methods: Sequence[str], panels: Mapping[str, Sequence[Bar]]) -> None:
    """One panel per metric. Bars: ours; thick lines: seeds; thin lines: test sets; diamonds: the paper."""
    plt = require_matplotlib()
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    size = (1.2 + 3.1 * columns, 3.9 * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axes, (name, found) in zip(grid.flat, panels.items(), strict=False):
        places = np.arange(len(found))
        means = np.array([bar.mean for bar in found])
        axes.bar(places, means, 0.62, color=["#9db4c0"] * (len(found) - 1) + ["#1b6ca8"])
        for place, bar in zip(places, found, strict=True):
            if bar.interval:
                axes.plot([place, place], bar.interval, color="#333333", lw=0.9)
            axes.plot([place, place], [bar.mean - bar.spread, bar.mean + bar.spread], color="#333333", lw=3)
            if bar.paper is not None:
                axes.plot(place, bar.paper, "D", color="#d1495b", ms=6)
            if np.isnan(bar.mean):
                axes.text(place, 0.5, "diverged", rotation=90, ha="center", va="bottom")
        low, high = _reach(found)
        axes.set_ylim(max(0.0, low - 0.25 * (high - low) - 0.01), min(1.0, high + 0.08 * (high - low) + 0.005))
        axes.set_xticks(places, methods, rotation=30, ha="right")
        axes.set_title(_wrapped(name), fontsize=9)
        axes.grid(axis="y", alpha=0.25)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(f"{title}, test data")
    theirs = any(bar.paper is not None for found in panels.values() for bar in found)
    legend = "bars: ours; thick lines: seeds; thin lines: test sets" + "; diamonds: the paper's" * theirs
    figure.supxlabel(legend, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _reach(found: Sequence[Bar]) -> tuple[float, float]:
    """The lowest and the highest point that is drawn, without the feet of the bars."""
    seen = [value for bar in found for value in (bar.paper, *(bar.interval or ())) if value is not None]
    seen += [bar.mean + sign * bar.spread for bar in found for sign in (-1, 1)]
    return float(np.nanmin(seen)), float(np.nanmax(seen))


def _wrapped(name: str) -> str:
    """A title, wrapped to the width of a panel; its own line breaks stay."""
    return "\n".join(line for part in name.splitlines() for line in wrap(part, PANEL_LETTERS))


def curves(path: Path, panels: Mapping[str, Mapping[str, Sequence[Curve]]], along: str, up: str) -> None:
    """One panel per title, with one line per name: the mean over runs."""
    plt = require_matplotlib()
    figure, grid = plt.subplots(
        1, len(panels), figsize=(1 + 4.6 * len(panels), 4.2), squeeze=False, layout="constrained"
    )
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=True):
        for (name, runs), (colour, style) in zip(lines.items(), STYLES, strict=False):
            found = [run for run in runs if run]
            if not found:
                continue
            values = np.mean([[value for _, value in run] for run in found], 0)
            axes.plot([x for x, _ in found[0]], values, color=colour, ls=style, lw=1.8, label=name)
        axes.set(xlabel=along, ylabel=up)
        axes.set_title(_wrapped(title), fontsize=10)
        axes.grid(alpha=0.25)
        axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
