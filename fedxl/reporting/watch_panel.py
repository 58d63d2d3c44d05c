"""A run while it goes on, drawn for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedxl import metrics
from fedxl.errors import printable
from fedxl.reporting import watch
from fedxl.reporting.text import in_words
from fedxl.reporting.watch import View

HEIGHT = 6  # lines of the curve
BLOCKS = " ▁▂▃▄▅▆▇█"
PLAIN = " .:-=+*#@"  # where a terminal has no block elements
MOST_SITES = 20  # that are shown one by one


def panel(view: View, console: Console) -> RenderableType:
    """All there is to see of a run."""
    blocks = BLOCKS if console.encoding.lower().startswith("utf") else PLAIN
    width = max(10, min(console.width, 100) - 16)
    parts: list[RenderableType] = [_progress(view, width)]
    parts += [Text(text) for text in (watch.standing(view), _others(view)) if text]
    if len(view.values) > 1:
        parts += [
            "",
            Text("\n".join(curve([value for _, value in view.values], width, blocks)), no_wrap=True, overflow="crop"),
        ]
        first, last = str(view.values[0][0]), str(view.values[-1][0])
        parts.append(
            Text(
                f"{'round':>9}  {first:<{max(1, width - len(last))}}{last}",
                no_wrap=True,
                overflow="crop",
                style="dim",
            )
        )
    if view.sites:
        parts += ["", _sites(view)]
    if watch.warning(view):
        parts.append(Text(watch.warning(view), style="red"))
    if watch.outcome(view):
        parts += ["", Text(watch.outcome(view), style="bold")]
    return Panel(
        Group(*parts),
        title=Text(f"{printable(view.name)}: {watch.state(view)}", overflow="crop"),
        width=min(console.width, 100),
    )


def _progress(view: View, width: int) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    for _ in range(3):
        row.add_column(overflow="fold")
    done = Text(watch.where(view))
    if not view.rounds or view.final is not None:
        row.add_row(done, Text(watch.pace(view)))
    else:
        row.add_row(
            done, ProgressBar(max(view.rounds, view.round), view.round, width=max(10, width // 3)), watch.pace(view)
        )
    return row


def _others(view: View) -> str:
    """The latest values of the other metrics."""
    latest = dict((view.rows[-1].get("validation") if view.rows else None) or {})
    latest.pop(metrics.key(view.metric), None)
    return in_words(latest)


def _sites(view: View) -> RenderableType:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("site", overflow="fold")
    table.add_column(Text(metrics.key(view.metric)), justify="right")
    table.add_column("", overflow="fold")
    # Those that something is wrong with come first.
    for site in sorted(view.sites, key=lambda each: not each.note)[:MOST_SITES]:
        value = "" if np.isnan(site.metric) else f"{site.metric:.4f}"
        table.add_row(Text(site.name), value, Text(site.note, style="yellow"))
    more = len(view.sites) - MOST_SITES
    return Group(table, Text(f"and {more} more")) if more > 0 else table


def curve(values: Sequence[float], width: int, blocks: str = BLOCKS, height: int = HEIGHT) -> list[str]:
    """Lines that draw the values from left to right, the smallest and the largest at the side.

    >>> for line in curve([0.5, 0.75, 1.0], 6, height=2):
    ...     print(line.rstrip())
       1.0000 |  ▁▁██
       0.5000 |▁▁████
    """
    data = np.asarray(values, dtype=np.float64)
    # Each column shows the mean of its values; where there are fewer values than columns, one value takes several.
    edges = np.linspace(0, len(data), width + 1)
    lows = np.minimum(edges[:-1].astype(int), len(data) - 1)
    highs = np.maximum(np.ceil(edges[1:]).astype(int), lows + 1)
    columns = np.array([data[low:high].mean() for low, high in zip(lows, highs, strict=True)])
    low, high = float(columns.min()), float(columns.max())
    steps = len(blocks) - 1
    share = (columns - low) / (high - low) if high > low else np.full(width, 0.5)
    filled = 1 + np.round(share * (height * steps - 1)).astype(int)  # at least one step, so that every round is seen
    labels = {0: f"{high:.4f}", height - 1: f"{low:.4f}"}
    lines = []
    for row in range(height):
        level = np.clip(filled - (height - 1 - row) * steps, 0, steps)
        lines.append(f"{labels.get(row, ''):>9} |" + "".join(blocks[each] for each in level))
    return lines
