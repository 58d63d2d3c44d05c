"""Convergence: the validation metric by round, and the round that was chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedxl.evaluation.intervals import Interval
from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.pictures import Dot, History
from fedxl.reporting.charts.scale import Axis, ticks_in
from fedxl.reporting.groups import Group
from fedxl.reporting.page import Cell, Column, Figure, Section, between, figure_of, metric_name
from fedxl.reporting.runs import Run


def section(groups: Sequence[Group], keys: Mapping[str, Key], metric: str) -> Section:
    histories = {keys[group.letter]: found for group in groups if (found := history(group.runs, metric)) is not None}
    missing = [
        f"{group.letter} has no evaluation with {metric_name(metric)} on validation data"
        for group in groups
        if keys[group.letter] not in histories
    ]
    if not histories:
        return Section("convergence", "Convergence", missing=missing)
    several = any(len(group.runs) > 1 for group in groups)
    spread = " Bands are one standard deviation over seeds." if several else ""
    caption = f"{metric_name(metric)} on validation data after each evaluation; markers: the chosen rounds.{spread}"
    picture = pictures.convergence(metric_name(metric), histories)
    return Section(
        "convergence",
        "Convergence",
        figures=[Figure("Validation metric by round", picture, caption)],
        missing=missing,
    )


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
    return History(np.array(rounds, np.float64), values.mean(0), values.std(0, ddof=min(1, len(tables) - 1)), chosen)


def _value(row: Mapping[str, Any], metric: str) -> float:
    value = (row.get("validation") or {}).get(metric)
    return float("nan") if value is None else float(value)


def shared_axis(intervals: Iterable[Interval]) -> Axis:
    """What all intervals share: from the lowest end, but not below chance, to 1."""
    lows = [value for found in intervals for value in (found.value, found.low) if math.isfinite(value)]
    low = min([0.9, *(max(value, 0.0) for value in lows)])
    low = math.floor(low * 10) / 10
    return Axis("", low, 1.0, (low, 1.0) if low > 0 else ticks_in(0.0, 1.0, 1))


def dot_column(name: str, axis: Axis) -> Column:
    return Column(f"{metric_name(name)}, {axis.texts()[0]} to {axis.texts()[-1]}", numeric=False)


def dot(found: Interval, name: str, axis: Axis, line: float, key: Key) -> Cell:
    """A metric with its interval as a picture; `line`: where the vertical line is."""
    if not math.isfinite(found.value):
        return Cell("")
    low, high = (found.value if math.isnan(end) else end for end in (found.low, found.high))
    title = f"{metric_name(name)} {figure_of(found.value)} {between(found.low, found.high)}"
    return Cell(svg=pictures.dot_and_interval(Dot(found.value, low, high), axis, line, key, title))


def value(found: Interval | None) -> Cell:
    """The same as text."""
    return Cell("–") if found is None else Cell(figure_of(found.value), between(found.low, found.high))
