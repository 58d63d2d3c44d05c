"""Columns of intervals in tables: a dot and a line each, on an axis that they share."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedxl.evaluation.intervals import Interval
from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.pictures import Dot
from fedxl.reporting.charts.scale import Axis, ticks_in
from fedxl.reporting.page import Cell, Column, between, figure_of, metric_name


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
