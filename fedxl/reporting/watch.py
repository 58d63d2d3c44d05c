"""A run in progress, from the files in its folder, which are never changed: in words, and for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedxl import metrics, toml
from fedxl.errors import UserError, printable, require
from fedxl.files import read_json
from fedxl.progress import time_left
from fedxl.reporting.text import in_words, sites_in_words, state_in_words
from fedxl.training import run_folder
from fedxl.training.choice import best_row
from fedxl.training.run_folder import Row

HEIGHT = 6  # lines of the curve
BLOCKS = " ▁▂▃▄▅▆▇█"
PLAIN = " .:-=+*#@"  # where a terminal has no block elements
MOST_SITES = 20  # that are shown one by one
RECENT = 10  # evaluations that the pace is measured over


class Site(NamedTuple):
    """A site of a deployed run."""

    name: str
    metric: float  # in the latest evaluation; NaN: it sent none
    note: str  # why it sent none, or was left out of a round since the evaluation before


class View(NamedTuple):
    """A run at one moment."""

    name: str
    round: int  # the last one known to be done
    rounds: int  # 0: not known
    metric: str  # that the best round is chosen by; "-name": less is better
    patience: int
    rows: Sequence[Row]  # the evaluations
    final: Row | None  # the last row of a run that has ended
    alive: bool | None  # whether a process of this machine works on it; None: not known
    sites: Sequence[Site]
    waits: Sequence[str] = ()  # the sites that the server waits for now, and since when

    @property
    def values(self) -> list[tuple[int, float]]:
        """The metric by rounds, as it is (not the negative of one of which less is better)."""
        key = metrics.key(self.metric)
        found = ((row["round"], (row.get("validation") or {}).get(key)) for row in self.rows)
        return [(round, float(value)) for round, value in found if value is not None]

    @property
    def best(self) -> tuple[int, float] | None:
        """The round with the best value so far, and that value."""
        if self.final is not None:
            return next((each for each in self.values if each[0] == self.final.get("best_round")), None)
        found = best_row(self.rows, self.metric)
        return None if found is None else next(each for each in self.values if each[0] == found["round"])

    @property
    def waited(self) -> int:
        """Evaluations since the best."""
        return sum(round > self.best[0] for round, _ in self.values) if self.best else 0

    @property
    def pace(self) -> tuple[float, int]:
        """Seconds and rounds of the recent evaluations."""
        recent = self.rows[-RECENT - 1 :]
        known = [row for row in recent if isinstance(row.get("seconds"), (int, float))]
        if not known:
            return 0.0, 0
        first = known[0] if len(known) > 1 else {"round": 0, "seconds": 0.0}
        return known[-1]["seconds"] - first["seconds"], known[-1]["round"] - first["round"]


def folder_of(path: Path) -> Path:
    """The run's folder: the path itself, the one that a server's folder names, or the seed that is at work."""
    if (path / "server.toml").is_file():
        out = toml.read(path / "server.toml").get("server", {}).get("out", "run")
        return path / str(out)
    seeds = run_folder.seeds_in(path)  # they run one after another
    return next((seed for seed in seeds if run_folder.without_settings(seed).done is None), [path, *seeds][-1])


def look(path: Path) -> View:
    """What the files of a run say now. Raises UserError if there is none."""
    require(path.is_dir(), f"there is no folder {path}; --wait waits for a run that has not begun")
    run_folder.require_run(path, f"{path} holds no run yet; --wait waits for it")
    alive = run_folder.being_written(path)  # first: a run that ends now has its last row below
    try:
        run = run_folder.read_run(path)  # a line that is being written is not one yet
    except UserError:  # run.json or config.toml is damaged
        run = run_folder.without_settings(path)
    usual = next(iter(metrics.shown(*(row.get("validation") or {} for row in run.rows))), "risk")
    metric = str(run.about.get("select") or usual)
    return View(
        name=run.name,
        round=max(run_folder.checkpointed(path), run.last_round, int((run.done or {}).get("round", 0))),
        rounds=_whole(run.settings.get("run.rounds")),
        metric=metric,
        patience=_whole(run.settings.get("run.patience")),
        rows=run.rows,
        final=run.done,
        alive=alive,
        sites=_sites(run.rows, metric),
        waits=_waits(path) if alive else (),
    )


def connections(path: Path) -> Mapping[str, Any]:
    """What the server of a deployed run says of its sites; empty if there is none. Raises UserError if damaged."""
    try:
        found: Any = read_json(path / run_folder.STATUS)
    except FileNotFoundError:
        return {}
    sites = found.get("sites") if isinstance(found, Mapping) else None
    return found if isinstance(sites, Mapping) and all(isinstance(one, Mapping) for one in sites.values()) else {}


def _waits(path: Path) -> list[str]:
    with suppress(UserError):
        sites = connections(path).get("sites", {})
        return [f"{printable(name, 40)}: {state_in_words(site)}" for name, site in sites.items() if site.get("until")]
    return []


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _sites(rows: Sequence[Row], metric: str) -> list[Site]:
    """The sites of the latest evaluation. What they sent and why they did not is another party's text."""
    latest: Row = rows[-1] if rows else {}
    told: Mapping[str, Any] = latest.get("validation_by_site", {})
    notes = {name: reason for name, reason in told.items() if isinstance(reason, str)}
    dropped = latest.get("dropped")
    for each in dropped if isinstance(dropped, list) else []:
        if isinstance(each, Mapping):
            notes[str(each.get("site"))] = f"left out in round {each.get('round')}: {each.get('reason')}"
    tables = {name: values for name, values in told.items() if isinstance(values, Mapping)}
    found = {name: metrics.value_of(values, metric.removeprefix("-")) for name, values in tables.items()}
    names = sorted({*told, *notes})
    return [Site(printable(name, 40), found.get(name, math.nan), printable(notes.get(name, ""))) for name in names]


def state(view: View) -> str:
    """How the run is doing."""
    if view.final is not None:
        return "stopped early" if view.final.get(run_folder.STOPPED_EARLY) else "finished"
    if view.alive is False:
        return "stopped"
    return "running" if view.rows or view.round else "beginning"


def where(view: View) -> str:
    """round 20 of 40"""
    if view.final is not None or not view.rounds:
        return f"round {view.round}"
    return f"round {view.round} of {max(view.rounds, view.round)}"


def participants(view: View) -> str:
    """round 19, trained by 2 of 3 sites"""
    row = view.rows[-1] if view.rows else {}
    found = sites_in_words(row)
    return f"round {row['participants'][-1]['round']}{found}" if found else ""


def pace(view: View) -> str:
    """3.2 rounds/s, about 90 s left"""
    seconds, rounds = view.pace
    if seconds <= 0 or rounds <= 0:
        return ""
    rate = rounds / seconds
    shown = f"{rate:.1f} rounds/s" if rate >= 1 else f"{1 / rate:.1f} s per round"
    left = view.rounds - view.round
    if view.final is not None or view.alive is False or left <= 0 or view.waits:
        return shown
    return f"{shown}, {time_left(seconds, rounds, rounds + left)}"


def standing(view: View) -> str:
    """The metric now, and the best so far."""
    if not view.values or view.best is None:
        return ""
    (_, now), (round, best) = view.values[-1], view.best
    text = f"validation {printable(metrics.key(view.metric))} {now:.4f}, best {best:.4f} in round {round}"
    if heard := run_folder.sites_heard(view.rows[-1], "validation"):
        text += f" (measured at {heard})"
    if view.final is None and view.patience and view.waited:
        text += f" ({view.waited} of {view.patience} evaluations without a better one)"
    return text


def outcome(view: View) -> str:
    """What a run came to that has ended; how to go on with one that was stopped."""
    if view.final is None:
        return "no process of this machine works on it" if view.alive is False else ""
    tested = in_words(view.final.get("test") or {})
    return f"best round {view.final.get('best_round', '?')}" + (f", test: {tested}" if tested else "")


def warning(view: View) -> str:
    bad = [row["round"] for row in view.rows if row.get(run_folder.COLLAPSED)]
    return f"the scores have collapsed by round {bad[0]}" if bad else ""


def line(view: View) -> str:
    """All of it in one line, for a log."""
    parts = [where(view), state(view), standing(view), participants(view), pace(view), warning(view), outcome(view)]
    parts += view.waits
    away = [f"{site.name}: {site.note}" for site in view.sites if site.note]
    return ", ".join(filter(None, [*parts, *away]))


def panel(view: View, console: Console) -> RenderableType:
    """All there is to see of a run."""
    blocks = BLOCKS if console.encoding.lower().startswith("utf") else PLAIN
    width = max(10, min(console.width, 100) - 16)
    parts: list[RenderableType] = [_progress(view, width)]
    others = dict((view.rows[-1].get("validation") if view.rows else None) or {})
    others.pop(metrics.key(view.metric), None)
    parts += [Text(text) for text in (standing(view), participants(view), in_words(others)) if text]
    if len(view.values) > 1:
        first, last = str(view.values[0][0]), str(view.values[-1][0])
        drawn = "\n".join(curve([value for _, value in view.values], width, blocks))
        below = f"{'round':>9}  {first:<{max(1, width - len(last))}}{last}"
        parts += ["", Text(drawn, no_wrap=True, overflow="crop")]
        parts.append(Text(below, no_wrap=True, overflow="crop", style="dim"))
    if view.sites:
        parts += ["", _site_table(view)]
    parts += [Text(each, style="yellow") for each in view.waits]
    if warning(view):
        parts.append(Text(warning(view), style="red"))
    if outcome(view):
        parts += ["", Text(outcome(view), style="bold")]
    title = Text(f"{printable(view.name)}: {state(view)}", overflow="crop")
    return Panel(Group(*parts), title=title, width=min(console.width, 100))


def _progress(view: View, width: int) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    for _ in range(3):
        row.add_column(overflow="fold")
    bar = ProgressBar(max(view.rounds, view.round), view.round, width=max(10, width // 3))
    row.add_row(where(view), *([bar] if view.rounds and view.final is None else []), pace(view))
    return row


def _site_table(view: View) -> RenderableType:
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
