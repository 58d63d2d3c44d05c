"""Settings, environment, and how to run it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.curves import Curve
from fedxl.reporting.groups import Group, differing
from fedxl.reporting.page import Block, Cell, Column, Figure, Row, Section, Table, in_bytes, shown
from fedxl.reporting.runs import Run
from fedxl.training.run_files import LARGEST

LONGEST = 20_000  # characters of a config that are shown
MOST = 400  # settings that are listed


def settings(groups: Sequence[Group], keys: Mapping[str, Key]) -> Section:
    """What differs between the runs first, then what they share."""
    unlike, shared = differing(groups)
    digests = {name for name in (*unlike, *shared) if name.startswith("task.")}
    tables = []
    if unlike and len(groups) > 1:
        columns = [Column("setting", numeric=False), *(Column(group.letter, numeric=False) for group in groups)]
        rows = [
            Row([Cell(shown(name)), *(Cell(_value(value)) for value in values)])
            for name, values in list(unlike.items())[:MOST]
            if name not in digests
        ]
        tables.append(Table("Settings that differ between the runs shown.", columns, rows))
    rows = [
        Row([Cell(shown(name)), Cell(_value(v))]) for name, v in list(shared.items())[:MOST] if name not in digests
    ]
    caption = "Settings that all runs share." if len(groups) > 1 else "All settings."
    if rows:
        tables.append(Table(caption, [Column("setting", numeric=False), Column("value", numeric=False)], rows))
    missing = [] if tables else ["no settings were recorded"]
    return Section("settings", "Settings", tables=tables, missing=missing)


def reproduce(groups: Sequence[Group]) -> Section:
    """The environment, and a command or a config for each run shown."""
    blocks = [block for group in groups for block in _blocks(group)]
    missing = [
        f"{group.letter} has no config.toml: it was started from Python; its settings above are what run.json holds"
        for group in groups
        if not group.shown.config
    ]
    tables = [_environment(groups)] if any(group.shown.environment for group in groups) else []
    if not tables:
        missing.append("no environment was recorded: older versions of fedxl did not")
    text = "Results are the same to the bit with the same versions, device and number of threads."
    return Section("reproduce", "How to reproduce it", [text], tables=tables, blocks=blocks, missing=missing)


def _environment(groups: Sequence[Group]) -> Table:
    names = list(dict.fromkeys(name for group in groups for name in group.shown.environment))
    alike = all(group.shown.environment == groups[0].shown.environment for group in groups)
    chosen = groups[:1] if alike else groups
    heads = ["all runs"] if alike else [group.letter for group in chosen]
    columns = [Column("environment", numeric=False), *(Column(head, numeric=False) for head in heads)]
    begun = Row([Cell("begun"), *(Cell(shown(group.shown.begun)) for group in chosen)])
    rows = [
        Row([Cell(shown(name)), *(Cell(shown(g.shown.environment.get(name, ""))) for g in chosen)]) for name in names
    ]
    return Table("Where the runs were made.", columns, [*rows, begun])


def _blocks(group: Group) -> list[Block]:
    run = group.shown
    if not run.config:
        return [Block(f"{group.letter}: settings of {shown(run.name)}", _told(run))]
    file = f"{run.name}.toml"
    seeds = [other.seed for other in group.runs if other is not run]
    command = f"fedxl train {shlex.quote(file)}"
    if seeds:
        command += f"\nfor seed in {' '.join(str(seed) for seed in seeds)}; do"
        command += f" fedxl train {shlex.quote(file)} --set run.seed=$seed; done"
    cut = "" if len(run.config) <= LONGEST else "\n# ... the rest is in its config.toml"
    return [Block(f"{group.letter}: {shown(file)}", run.config[:LONGEST].rstrip() + cut), Block("Command", command)]


def _told(run: Run) -> str:
    content = json.dumps(dict(run.settings), indent=1, default=str)
    return content if len(content) <= LONGEST else content[:LONGEST] + "\n..."


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return shown(value if isinstance(value, str) else json.dumps(value, default=str))


UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Cost(NamedTuple):
    """Bytes a client and round, and how many clients there are in a round."""

    down: int
    up: int
    clients: int

    @property
    def a_round(self) -> int:
        return (self.down + self.up) * self.clients


def communication(groups: Sequence[Group], keys: Mapping[str, Key]) -> Section:
    costs = {group.letter: cost(group.shown) for group in groups}
    missing = [
        f"{group.letter} moves its data to one place and sends no model by rounds"
        if group.shown.centralized
        else f"{group.letter} did not record its traffic: older versions of fedxl did not"
        for group in groups
        if costs[group.letter] is None
    ]
    known = [(group, found) for group in groups if (found := costs[group.letter]) is not None]
    if not known:
        return Section("communication", "Communication", missing=missing)
    top = max(found.a_round * _last(group.shown) for group, found in known)
    size, unit = next(((size, unit) for size, unit in UNITS if top >= size), (1.0, "bytes"))
    totals: dict[Key, Curve] = {
        keys[group.letter]: (_rounds(group.shown), _rounds(group.shown) * found.a_round / size)
        for group, found in known
    }
    caption = "What all clients of a round receive and send, summed up. The warm-up round is not counted."
    rows = [Row(_cells(group, found), group.letter, keys[group.letter].css) for group, found in known]
    columns = (
        "run",
        "received a client and round",
        "sent a client and round",
        "clients a round",
        "until chosen",
        "in all",
    )
    table = Table("Tensors as they are sent, without headers and encryption.", _columns(columns), rows)
    return Section(
        "communication",
        "Communication",
        figures=[Figure("Bytes by round", pictures.bytes_by_round(unit, totals), caption)],
        tables=[table],
        missing=missing,
    )


def cost(run: Run) -> Cost | None:
    """What a run recorded of its traffic; None if it did not, or if all data are in one place."""
    recorded: Any = next((row["traffic"] for row in reversed(run.rows) if "traffic" in row), None)
    if not isinstance(recorded, dict) or run.centralized:
        return None
    values = [recorded.get(name) for name in Cost._fields]
    right = all(isinstance(value, int) and 0 <= value <= LARGEST for value in values)
    return Cost(*values) if right else None  # type: ignore[arg-type]


def _cells(group: Group, found: Cost) -> list[Cell]:
    run = group.shown
    chosen = in_bytes(found.a_round * run.best_round) if run.best_round is not None else "–"
    counted = [in_bytes(found.down), in_bytes(found.up), str(found.clients), chosen]
    return [Cell(group.label), *map(Cell, counted), Cell(in_bytes(found.a_round * _last(run)))]


def _columns(names: Sequence[str]) -> list[Column]:
    return [Column(names[0], numeric=False), *(Column(name) for name in names[1:])]


def _last(run: Run) -> int:
    return int(run.rows[-1]["round"]) if run.rows else 0


def _rounds(run: Run) -> Any:
    return np.array([0.0, *(float(row["round"]) for row in run.rows)])
