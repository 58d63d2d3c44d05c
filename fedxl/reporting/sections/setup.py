"""Settings, environment, and how to run it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from fedxl.algorithms import ALGORITHMS
from fedxl.options import defaults
from fedxl.reporting.page import Block, Row, Section, Table, columns, shown
from fedxl.reporting.runs import Group, differing
from fedxl.training.settings import Settings

LONGEST = 20_000  # characters of a config that are shown
MOST = 400  # settings that are listed


def settings(groups: Sequence[Group]) -> Section:
    """What differs between the runs first, then what they share."""
    unlike, shared = differing(groups)
    usual = _defaults(groups[0].shown.algorithm)
    kept = {name: [value] for name, value in shared.items() if name not in usual or usual[name] != value}
    rest = {name: [value] for name, value in shared.items() if name not in kept and not name.startswith("task.")}
    caption = "Settings that all runs share" if len(groups) > 1 else "All settings"
    parts = [(f"{caption}{', besides defaults' if rest else ''}.", ["value"], kept)]
    parts += [("Settings at their defaults.", ["value"], rest)] if rest else []
    if unlike and len(groups) > 1:
        apart = "Settings that differ between the runs shown."
        parts.insert(0, (apart, [group.letter for group in groups], unlike))
    tables = []
    for caption, heads, table in parts:
        listed = [name for name in list(table)[:MOST] if not name.startswith("task.")]  # no digests
        if rows := [Row.of(shown(name), *map(_value, table[name])) for name in listed]:
            folded = f"{len(rows)} settings at their defaults" if table is rest else ""
            tables.append(Table(caption, columns("setting", *heads, numeric=False), rows, folded))
    missing = [] if tables else ["no settings were recorded"]
    return Section("settings", "Settings", tables=tables, missing=missing)


def _defaults(algorithm: str) -> dict[str, Any]:
    """The defaults of a run and of an algorithm of fedxl's, as settings are recorded."""
    found = {f"run.{name}": value for name, value in defaults(Settings).items()}
    if algorithm in ALGORITHMS:
        found |= {f"algorithm.{name}": value for name, value in defaults(ALGORITHMS[algorithm]).items()}
    return {name: json.loads(json.dumps(value, default=str)) for name, value in found.items()}


def reproduce(groups: Sequence[Group]) -> Section:
    """The environment, and a command or a config for each run shown."""
    blocks = [block for group in groups for block in _blocks(group)]
    without = "has no config.toml: it was started from Python; its settings above are what run.json holds"
    missing = [f"{group.letter} {without}" for group in groups if not group.shown.config]
    tables = [_environment(groups)] if any(group.shown.environment for group in groups) else []
    if not tables:
        missing.append("no environment was recorded")
    text = "Results are the same to the bit with the same versions, device and number of threads."
    return Section("reproduce", "How to reproduce it", [text], tables=tables, blocks=blocks, missing=missing)


def _environment(groups: Sequence[Group]) -> Table:
    names = list(dict.fromkeys(name for group in groups for name in group.shown.environment))
    alike = all(group.shown.environment == groups[0].shown.environment for group in groups)
    chosen = groups[:1] if alike else groups
    heads = ["all runs"] if alike else [group.letter for group in chosen]
    texts = [[name, *(group.shown.environment.get(name, "") for group in chosen)] for name in names]
    texts.append(["begun", *(group.shown.begun for group in chosen)])
    rows = [Row.of(*map(shown, line)) for line in texts]
    return Table("Where the runs were made.", columns("environment", *heads, numeric=False), rows)


def _blocks(group: Group) -> list[Block]:
    run = group.shown
    if not run.config:
        content = json.dumps(dict(run.settings), indent=1, default=str)
        content = content if len(content) <= LONGEST else content[:LONGEST] + "\n..."
        return [Block(f"{group.letter}: settings of {shown(run.name)}", content)]
    file = f"{run.name}.toml"
    seeds = [other.seed for other in group.runs if other is not run]
    command = f"fedxl train {shlex.quote(file)}"
    if seeds:
        command += f"\nfor seed in {' '.join(str(seed) for seed in seeds)}; do"
        command += f" fedxl train {shlex.quote(file)} --set run.seed=$seed; done"
    cut = "" if len(run.config) <= LONGEST else "\n# ... the rest is in its config.toml"
    return [Block(f"{group.letter}: {shown(file)}", run.config[:LONGEST].rstrip() + cut), Block("Command", command)]


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return shown(value if isinstance(value, str) else json.dumps(value, default=str))
