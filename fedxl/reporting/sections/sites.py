"""One row per site: how many examples it has, and how well the model does there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedxl.evaluation.intervals import Interval
from fedxl.evaluation.judgement import Judgement
from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.scale import Axis, ticks_in
from fedxl.reporting.groups import Group
from fedxl.reporting.page import (
    Cell,
    Column,
    Row,
    Section,
    Table,
    between,
    columns,
    figure_of,
    interval_cell,
    listed,
    metric_name,
    shown,
)
from fedxl.reporting.runs import Run

MOST = 300  # rows; a page of thousands of sites helps nobody
TITLE = "Sites"
SEVERAL = " Metrics are means over labels. Training rows count as positive or negative if any of their labels is."
Members = Mapping[str, tuple[int, int]]


def section(focus: Group, key: Key, judged: Judgement | None, names: Sequence[str]) -> Section:
    """From scores where there are any; else from what sites told themselves, else the training data alone."""
    run = focus.shown
    trained: Members = {member.name: (member.positives, member.negatives) for member in run.members}
    if judged is not None and judged.sites:
        table, left = _from_scores(focus, key, judged, trained, names)
    elif told := _told(run):
        table, left = _from_told(focus, told, trained, names)
    elif trained:
        rows = [Row([Cell(shown(name, 60)), _counts(found, run)]) for name, found in list(trained.items())[:MOST]]
        caption = "Who took part." + (SEVERAL if run.several else "")
        table = Table(caption, columns("site", f"training: {_counted(run)}"), rows)
        unknown = "their held-back examples do not say which site they are from"
        left = [*_cut(len(trained)), f"no metrics by site: {unknown if judged else 'there are no scores by site'}"]
    else:
        return Section("sites", TITLE, missing=["the run did not record who took part"])
    return Section("sites", TITLE, tables=[table], missing=left)


def _from_scores(
    focus: Group, key: Key, judged: Judgement, trained: Members, names: Sequence[str]
) -> tuple[Table, list[str]]:
    run, pooled = focus.shown, judged.pooled
    names = [name for name in names if name in pooled.metrics]
    first = names[0]
    axis = shared_axis([pooled.metrics[first], *(site.metrics[first] for site in judged.sites.values())])
    everyone = (sum(each[0] for each in trained.values()), sum(each[1] for each in trained.values()))
    parts = [("all sites", everyone if trained else None, pooled)]
    parts += [(shown(name, 60), trained.get(name), site) for name, site in list(judged.sites.items())[:MOST]]
    rows = []
    for number, (name, held, site) in enumerate(parts):
        picture = dot(site.metrics[first], first, axis, pooled.metrics[first].value, key)
        cells = [Cell(name), _counts(held, run), _counts((site.positives, site.negatives), run), picture]
        rows.append(Row([*cells, *(interval_cell(site.metrics[each]) for each in names)], focus=number == 0))
    heads = columns("site", "training: positives of n", f"{judged.split}: positives of n")
    heads += [dot_column(first, axis), *(Column(metric_name(name)) for name in names)]
    caption = (
        f"{focus.letter} ({shown(focus.label, 60)}) at each site, {judged.split} data, with 95 % intervals; the "
        "vertical line is the pooled value. Intervals of sites with few positives are wide."
    )
    empty = [shown(name, 40) for name in trained if name not in judged.sites]
    notes = [f"no {judged.split} data from {listed(empty)}"] if empty else []
    one_class = [name for name, site in judged.sites.items() if not math.isfinite(site.metrics[first].value)]
    if one_class:
        unknown = listed([shown(name, 40) for name in one_class])
        notes.append(f"one class only in the {judged.split} data of {unknown}: no metric there")
    return Table(caption, heads, rows), notes + _cut(len(judged.sites))


def _counts(found: tuple[int, int] | None, run: Run) -> Cell:
    """Positives of all; of several labels a row may be both positive and negative, and there is no sum."""
    if found is None:
        return Cell("–")
    return Cell(f"{found[0]:,} and {found[1]:,}" if run.several else f"{found[0]:,} of {sum(found):,}")


def _counted(run: Run) -> str:
    return "positives and negatives" if run.several else "positives of n"


def _told(run: Run) -> Mapping[str, Any]:
    """What sites said of themselves, of the test data or else of the validation data of the chosen round."""
    for row, split in ((run.done or {}, "test"), (run.shown, "validation")):
        if found := row.get(f"{split}_by_site"):
            return {str(name): told for name, told in found.items()}
    return {}


def _from_told(
    focus: Group, told: Mapping[str, Any], trained: Members, names: Sequence[str]
) -> tuple[Table, list[str]]:
    run, rows, notes = focus.shown, [], []
    for name, found in list(told.items())[:MOST]:
        if isinstance(found, str):
            notes.append(f"{shown(name, 60)}: {shown(found)}")
            continue
        counts = [found.get(each) for each in ("positives", "negatives")]
        held = _counts(None if None in counts else (int(counts[0]), int(counts[1])), run)
        values = [Cell(figure_of(found.get(each))) for each in names]
        rows.append(Row([Cell(shown(name, 60)), _counts(trained.get(name), run), held, *values]))
    counted = _counted(run)
    heads = columns("site", f"training: {counted}", f"judged on: {counted}", *map(metric_name, names))
    about = f"{focus.letter} ({shown(focus.label, 60)})"
    caption = f"What sites disclosed of {about}: metrics without scores have no intervals."
    return Table(caption + (SEVERAL if run.several else ""), heads, rows), notes + _cut(len(told))


def _cut(count: int) -> list[str]:
    return [f"{count - MOST} more sites are not listed"] if count > MOST else []


def shared_axis(intervals: Iterable[Interval]) -> Axis:
    """What all intervals share: from the lowest end, but not below chance, to 1."""
    lows = [value for found in intervals for value in (found.value, found.low) if math.isfinite(value)]
    low = math.floor(min([0.9, *(max(value, 0.0) for value in lows)]) * 10) / 10
    return Axis("", low, 1.0, (low, 1.0) if low > 0 else ticks_in(0.0, 1.0, 1))


def dot_column(name: str, axis: Axis) -> Column:
    return Column(f"{metric_name(name)}, {axis.texts()[0]} to {axis.texts()[-1]}", numeric=False)


def dot(found: Interval, name: str, axis: Axis, line: float, key: Key) -> Cell:
    """A metric with its interval as a picture; `line`: where the vertical line is."""
    if not math.isfinite(found.value):
        return Cell("")
    title = f"{metric_name(name)} {figure_of(found.value)} {between(found.low, found.high)}"
    return Cell(svg=pictures.dot_and_interval(found, axis, line, key, title))
