"""Communication: what clients receive and send, by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.curves import Curve
from fedxl.reporting.groups import Group
from fedxl.reporting.page import Cell, Column, Figure, Row, Section, Table, in_bytes
from fedxl.reporting.runs import Run
from fedxl.training.run_files import LARGEST

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Cost(NamedTuple):
    """Bytes a client and round, and how many clients there are in a round."""

    down: int
    up: int
    clients: int

    @property
    def a_round(self) -> int:
        return (self.down + self.up) * self.clients


def section(groups: Sequence[Group], keys: Mapping[str, Key]) -> Section:
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
