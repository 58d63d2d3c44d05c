"""Pictures of studies: bars beside the paper's, and lines with their spread over one axis or several panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np

from fedxl.reporting.plots import STYLES, require_matplotlib

LETTERS = 46  # that fit on a line of a panel's title
MARKERS = "osD^vPX<"  # one more than styles: no two of the first 56 lines look alike
MORE_STYLES = [*STYLES, ("#7b4fa3", (0, (3, 1, 1, 1))), ("#2f2f2f", (0, (1, 1)))]
TICKS = [step * 10.0**power for power in range(-8, 5) for step in (1, 2, 5)]


class Point(NamedTuple):
    x: float
    mean: float
    spread: float = 0.0


class Panel(NamedTuple):
    """Lines over one axis."""

    title: str
    along: str
    up: str
    lines: Mapping[str, Sequence[Point]]
    ticks: Sequence[str] = ()  # names of the places 0, 1, 2, ... on the axis
    reference: Mapping[str, float] = {}  # horizontal lines; one whose name begins with a line's has its colour
    slopes: Mapping[str, tuple[int, float]] = {}  # dashed: through the point of this number, of a power of x
    log: bool = False


class Bar(NamedTuple):
    mean: float
    spread: float
    paper: float | None
    interval: tuple[float, float] | None  # over bootstrapped test sets


def lines(path: Path, title: str, panels: Sequence[Panel], ours: str = "", across: int = 2) -> None:
    """One panel each, `across` in a row. They share the vertical axis if they measure the same; ours is heavy."""
    plt = require_matplotlib()
    columns = min(len(panels), across)
    rows = -(-len(panels) // columns)
    same = len({panel.up for panel in panels}) == 1 and not panels[0].log
    size = (1.2 + 4.4 * columns, 1.0 + 3.8 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, sharey=same, squeeze=False, layout="constrained")
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    names.sort(key=lambda name: name != ours)  # ours has the first style, as in other pictures
    styles = dict(zip(names, zip(cycle(MORE_STYLES), cycle(MARKERS), strict=False), strict=False))
    for axes, panel in zip(grid.flat, panels, strict=False):
        _panel(axes, panel, styles, ours)
    for axes in grid[:, 1:].flat if same else ():
        axes.set_ylabel("")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    handles = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(3, len(handles)), frameon=False
    )
    figure.suptitle("\n".join(wrap(title, LETTERS * columns)), fontsize=11, fontweight="bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axes: Any, panel: Panel, styles: Mapping[str, Any], ours: str) -> None:
    for name, level in panel.reference.items():
        own = next((styles[line][0][0] for line in panel.lines if name.startswith(line)), "#999999")
        axes.axhline(level, color=own, lw=1.2, ls=(0, (1, 1)), label=name)
    for number, (name, points) in enumerate(panel.lines.items()):
        (colour, style), marker = styles[name]
        x, means, spreads = (np.array(values, float) for values in zip(*points, strict=True))
        # Beside each other where places have names, so that lines through seeds do not cover each other.
        shift = 0.05 * (number - (len(panel.lines) - 1) / 2) if panel.ticks else 0.0
        heavy = name == ours
        look = {"marker": marker, "ms": 6.0 if heavy else 4.5} if len(x) < 15 else {}
        axes.errorbar(
            x + shift, means, spreads if spreads.any() else None, color=colour, ls=style, lw=2.6 if heavy else 1.5,
            elinewidth=1.0, capsize=2, zorder=3 if heavy else 2, label=name, **look,
        )  # fmt: skip
        if name in panel.slopes:
            first, power = panel.slopes[name]
            axes.plot(x, means[first] * (x / x[first]) ** power, color=colour, ls="--", lw=1, alpha=0.8)
    places = sorted({point.x for line in panel.lines.values() for point in line})
    if panel.log:
        _log_axes(axes, panel)
    elif len(places) < 10 and not panel.ticks:
        axes.set_xticks(places)
    if panel.ticks:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        axes.set_xlim(-0.4, len(panel.ticks) - 0.6)
    axes.set(xlabel=panel.along, ylabel=panel.up)
    axes.set_title(_wrapped(panel.title), fontsize=10)
    axes.grid(alpha=0.25)


def _log_axes(axes: Any, panel: Panel) -> None:
    """Both axes logarithmic, with ticks that are plain numbers."""
    points = [point for line in panel.lines.values() for point in line]
    axes.set(xscale="log", yscale="log")
    places = sorted({point.x for point in points})
    axes.set_xticks(places, [f"{place:,g}" for place in places])
    axes.minorticks_off()
    low, high = min(point.mean for point in points), max(point.mean for point in points)
    ticks = [tick for tick in TICKS if low / 2 < tick < 2 * high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def bars(path: Path, title: str, methods: Sequence[str], panels: Mapping[str, Sequence[Bar]]) -> None:
    """One panel per metric. Bars: ours; thick lines: seeds; thin lines: test sets; diamonds: the paper."""
    plt = require_matplotlib()
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    size = (1.2 + 3.1 * columns, 3.9 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes, (name, found) in zip(grid.flat, panels.items(), strict=False):
        _bars(axes, found)
        axes.set_xticks(range(len(found)), methods, rotation=30, ha="right")
        axes.set_title(_wrapped(name), fontsize=9)
        axes.grid(axis="y", alpha=0.25)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(f"{title}, test data")
    theirs = any(bar.paper is not None for found in panels.values() for bar in found)
    legend = "bars: ours; thick lines: seeds; thin lines: test sets" + "; diamonds: the paper's" * theirs
    figure.supxlabel(legend, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axes: Any, found: Sequence[Bar]) -> None:
    means = np.array([bar.mean for bar in found])
    axes.bar(range(len(found)), means, 0.62, color=["#9db4c0"] * (len(found) - 1) + ["#1b6ca8"])
    for place, bar in enumerate(found):
        if bar.interval:
            axes.plot([place, place], bar.interval, color="#333333", lw=0.9)
        axes.plot([place, place], [bar.mean - bar.spread, bar.mean + bar.spread], color="#333333", lw=3)
        if bar.paper is not None:
            axes.plot(place, bar.paper, "D", color="#d1495b", ms=6)
        if np.isnan(bar.mean):
            axes.text(place, 0.5, "diverged", rotation=90, ha="center", va="bottom")
    seen = [value for bar in found for value in (bar.paper, *(bar.interval or ())) if value is not None]
    seen += [bar.mean + sign * bar.spread for bar in found for sign in (-1, 1)]
    low, high = float(np.nanmin(seen)), float(np.nanmax(seen))
    axes.set_ylim(max(0.0, low - 0.25 * (high - low) - 0.01), min(1.0, high + 0.08 * (high - low) + 0.005))


def _wrapped(name: str) -> str:
    """A title, wrapped to the width of a panel; its own line breaks stay."""
    return "\n".join(line for part in name.splitlines() for line in wrap(part, LETTERS))
