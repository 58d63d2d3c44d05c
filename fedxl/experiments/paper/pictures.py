"""Plots of the paper's tables and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
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


class Panel(NamedTuple):
    """Methods against the skew of sites."""

    title: str
    along: str
    ticks: Sequence[str]
    series: Mapping[str, Sequence[tuple[float, float]]]  # mean and spread at each tick, of each method
    reference: Mapping[str, float]  # lines across the panel


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


def against_skew(path: Path, message: str, up: str, panels: Sequence[Panel], ours: str) -> None:
    """One line a method, ours the heaviest; the legend stands below the panels, where it hides nothing.

    Two panels a line. All panels share the vertical axis, so that they can be compared.
    """
    plt = require_matplotlib()
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(1.2 + 4.4 * columns, 0.9 + 3.8 * lines),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    known = list(dict.fromkeys(name for panel in panels for name in panel.series))
    known.sort(key=lambda name: name != ours)  # ours has the first style, as in other pictures
    styles = dict(zip(known, cycle(STYLES), strict=False))
    markers = dict(zip(known, cycle("osD^vP"), strict=False))
    for axes, panel in zip(grid.flat, panels, strict=False):
        for name, level in panel.reference.items():
            axes.axhline(level, color="#999999", lw=1.2, ls=(0, (1, 1)), label=f"{name}, all data in one place")
        for number, name in enumerate(panel.series):
            colour, style = styles[name]
            means, spreads = (np.array(values) for values in zip(*panel.series[name], strict=True))
            # Side by side, so that lines through seeds do not cover each other.
            places = np.arange(len(means)) + 0.05 * (number - (len(panel.series) - 1) / 2)
            heavy = name == ours
            axes.errorbar(
                places, means, spreads, color=colour, ls=style, lw=2.6 if heavy else 1.5, marker=markers[name],
                ms=6.5 if heavy else 4.5, elinewidth=1.0, zorder=3 if heavy else 2, label=name,
            )  # fmt: skip
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        axes.set_xlim(-0.4, len(panel.ticks) - 0.6)
        axes.set_xlabel(panel.along)
        axes.set_title(_wrapped(panel.title), fontsize=9)
        axes.grid(axis="y", alpha=0.25)
    for axes in grid[:, 0]:
        axes.set_ylabel(up)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    handles = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(3, len(handles)), frameon=False
    )
    figure.suptitle("\n".join(wrap(message, 46 * columns)), fontsize=11, fontweight="bold")
    figure.savefig(path, dpi=120)
    plt.close(figure)
