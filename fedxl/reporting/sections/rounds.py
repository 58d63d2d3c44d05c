"""Round by round: the validation metric, the round that was chosen, and the bytes that clients receive and send."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.pictures import Curve, History
from fedxl.reporting.page import Figure, Row, Section, Table, columns, in_bytes, metric_name, unit_of
from fedxl.reporting.runs import Group, is_centralized
from fedxl.reporting.study import Study
from fedxl.training.run_folder import LARGEST, Run


def section(it: Study) -> Section:
    metric = it.focus.shown.metric
    name, groups = metric_name(metric), it.drawn
    histories = {group.key: found for group in groups if (found := history(group.runs, metric)) is not None}
    without = [group.letter for group in groups if group.key not in histories]
    missing = [f"{letter} has no evaluation with {name} on validation data" for letter in without]
    figures, tables = [], []
    if histories:
        several = any(len(group.runs) > 1 for group in groups)
        spread = " Bands are one standard deviation over seeds." if several else ""
        broken = any(found.breaks for found in histories.values())
        others = " Lines break where other sites than before were measured." if broken else ""
        caption = f"{name} on validation data after each evaluation; markers: the chosen rounds.{spread}{others}"
        figures.append(Figure("Validation metric by round", pictures.convergence(name, histories), caption))
    known = []
    for group in groups:
        if (traffic := cost(group.shown)) is not None:
            known.append((group, traffic))
        elif is_centralized(group.shown.algorithm):
            missing.append(f"{group.letter} moves its data to one place and sends no model by rounds")
        else:
            missing.append(f"{group.letter} did not record its traffic")
    if known:
        figures.append(_bytes_by_round(known))
        tables.append(_costs(known))
    return Section("convergence", "Convergence and communication", figures=figures, tables=tables, missing=missing)


def history(runs: Sequence[Run], metric: str) -> History | None:
    """The mean over runs at the rounds that all of them evaluated."""
    tables = [{row["round"]: _value(row, metric) for row in run.rows} for run in runs]
    tables = [table for table in tables if any(np.isfinite(value) for value in table.values())]
    rounds = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if not rounds:
        return None
    values = np.array([[table[round] for round in rounds] for table in tables])
    found = [(float(run.best_round), _value(run.shown, metric)) for run in runs if run.best_round is not None]
    chosen = [(round, value) for round, value in found if np.isfinite(value)]
    spread = values.std(0, ddof=min(1, len(tables) - 1))
    measured = [{row["round"]: row.get("validation_from") for row in run.rows} for run in runs]
    pairs = enumerate(itertools.pairwise(rounds), 1)
    breaks = [at for at, (one, other) in pairs if any(each.get(one) != each.get(other) for each in measured)]
    return History(np.array(rounds, np.float64), values.mean(0), spread, chosen, breaks)


def _value(row: Mapping[str, Any], metric: str) -> float:
    value = (row.get("validation") or {}).get(metric)
    return float("nan") if value is None else float(value)


class Cost(NamedTuple):
    """Bytes per client and round, and how many clients there are in a round."""

    down: int
    up: int
    clients: int

    @property
    def per_round(self) -> int:
        return (self.down + self.up) * self.clients


def cost(run: Run) -> Cost | None:
    """What a run recorded of its traffic; None if it did not, or if all data are in one place."""
    recorded: Any = next((row["traffic"] for row in reversed(run.rows) if "traffic" in row), None)
    if not isinstance(recorded, dict) or is_centralized(run.algorithm):
        return None
    values = [recorded.get(name) for name in Cost._fields]
    right = all(isinstance(value, int) and 0 <= value <= LARGEST for value in values)
    return Cost(*values) if right else None  # type: ignore[arg-type]


def _bytes_by_round(known: Sequence[tuple[Group, Cost]]) -> Figure:
    top = max(found.per_round * group.shown.last_round for group, found in known)
    size, unit = unit_of(top)
    totals: dict[Key, Curve] = {}
    for group, found in known:
        rounds = np.array([0.0, *(float(row["round"]) for row in group.shown.rows)])
        totals[group.key] = rounds, rounds * found.per_round / size
    caption = "Sum over all clients of a round, received and sent. The warm-up round is not counted."
    return Figure("Bytes by round", pictures.bytes_by_round(unit, totals), caption)


def _costs(known: Sequence[tuple[Group, Cost]]) -> Table:
    rows = []
    for group, found in known:
        run = group.shown
        chosen = in_bytes(found.per_round * run.best_round) if run.best_round is not None else "–"
        total = in_bytes(found.per_round * run.last_round)
        sizes = in_bytes(found.down), in_bytes(found.up), str(found.clients)
        rows.append(Row.of(group.label, *sizes, chosen, total, key=group.key))
    per = "received per client and round", "sent per client and round", "clients per round"
    heads = columns("run", *per, "until chosen", "in all")
    return Table("Tensors as they are sent, without headers and encryption.", heads, rows)
