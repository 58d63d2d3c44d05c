"""Settings, environment, and how to run it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fedxl.reporting.charts.chart import Key
from fedxl.reporting.groups import Group, differing
from fedxl.reporting.page import Block, Cell, Column, Row, Section, Table, shown
from fedxl.reporting.runs import Run

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
