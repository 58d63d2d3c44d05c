"""One row a site: how many examples it has, and how well the model does there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedxl.evaluation.judgement import Judged, Judgement
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.scale import Axis
from fedxl.reporting.groups import Group
from fedxl.reporting.page import Cell, Column, Row, Section, Table, figure_of, listed, metric_name, shown
from fedxl.reporting.runs import Run
from fedxl.reporting.sections.convergence import dot, dot_column, shared_axis, value

MOST = 300  # rows; a page of thousands of sites helps nobody
TITLE = "Sites"
SEVERAL = " Metrics are means over labels. Training rows count as positive or negative if any of their labels is."
Members = Mapping[str, tuple[int, int]]


def section(focus: Group, key: Key, judged: Judgement | None, names: Sequence[str]) -> Section:
    """From scores where there are any; else from what sites told themselves, else the training data alone."""
    run = focus.shown
    trained: Members = {member.name: (member.positives, member.negatives) for member in run.members}
    if judged is not None and judged.sites:
        table, left = _judged(focus, key, judged, trained, names)
    elif told := _told(run):
        table, left = _of_told(focus, run, told, trained, names)
    elif trained:
        table, left = _trained(trained, run.several)
        why = (
            "their held-back examples do not say which site they are from"
            if judged
            else "there are no scores by site"
        )
        left = [*left, f"no metrics by site: {why}"]
    else:
        return Section(
            "sites", TITLE, missing=["the run did not record who took part: older versions of fedxl did not"]
        )
    return Section("sites", TITLE, tables=[table], missing=left)


def _judged(
    focus: Group, key: Key, judged: Judgement, trained: Members, names: Sequence[str]
) -> tuple[Table, list[str]]:
    names = [name for name in names if name in judged.pooled.metrics]
    first = names[0]
    axis = shared_axis([judged.pooled.metrics[first], *(site.metrics[first] for site in judged.sites.values())])
    sites = list(judged.sites.items())
    rows = [
        Row(
            [
                Cell("all sites"),
                *_cells(judged.pooled, _sum(trained), names, _plot(judged.pooled, first, axis, judged, key)),
            ],
            focus=True,
        ),
        *(
            Row(
                [
                    Cell(shown(name, 60)),
                    *_cells(site, trained.get(name), names, _plot(site, first, axis, judged, key)),
                ]
            )
            for name, site in sites[:MOST]
        ),
    ]
    columns = [
        Column("site", numeric=False), Column("training: positives of n"), Column(f"{judged.split}: positives of n"),
        dot_column(first, axis),
        *(Column(metric_name(name)) for name in names),
    ]  # fmt: skip
    caption = (
        f"{focus.letter} ({shown(focus.label, 60)}) at each site, {judged.split} data, with 95 % intervals; the "
        "vertical line is the pooled value. Intervals of sites with few positives are wide."
    )
    empty = [shown(name, 40) for name in trained if name not in judged.sites]
    unknown = [shown(name, 40) for name, site in sites if not math.isfinite(site.metrics[first].value)]
    notes = [f"no {judged.split} data from {listed(empty)}"] if empty else []
    if unknown:
        notes.append(f"one class only in the {judged.split} data of {listed(unknown)}: no metric there")
    return Table(caption, columns, rows), notes + _cut(len(sites))


def _plot(site: Judged, name: str, axis: Axis, judged: Judgement, key: Key) -> Cell:
    return dot(site.metrics[name], name, axis, judged.pooled.metrics[name].value, key)


def _cells(site: Judged, trained: tuple[int, int] | None, names: Sequence[str], plot: Cell) -> list[Cell]:
    known = [site.metrics[name] for name in names]
    return [
        _counts(trained),
        _counts((site.positives, site.negatives)),
        plot,
        *map(value, known),
    ]


def _counts(found: tuple[int, int] | None, several: bool = False) -> Cell:
    """Positives of all; of several labels a row may be both positive and negative, and there is no sum."""
    if found is None:
        return Cell("–")
    return Cell(f"{found[0]:,} and {found[1]:,}" if several else f"{found[0]:,} of {sum(found):,}")


def _counted(several: bool) -> str:
    return "positives and negatives" if several else "positives of n"


def _sum(trained: Members) -> tuple[int, int] | None:
    positives, negatives = (sum(each[side] for each in trained.values()) for side in (0, 1))
    return (positives, negatives) if trained else None


def _told(run: Run) -> Mapping[str, Any]:
    """What sites said of themselves, of the test data or else of the validation data of the chosen round."""
    for row, split in ((run.done or {}, "test"), (run.shown, "validation")):
        if found := row.get(f"{split}_by_site"):
            return {str(name): told for name, told in found.items()}
    return {}


def _of_told(
    focus: Group, run: Run, told: Mapping[str, Any], trained: Members, names: Sequence[str]
) -> tuple[Table, list[str]]:
    rows, notes = [], []
    for name, found in list(told.items())[:MOST]:
        if isinstance(found, str):
            notes.append(f"{shown(name, 60)}: {shown(found)}")
            continue
        counts = [found.get(each) for each in ("positives", "negatives")]
        held = _counts((int(counts[0]), int(counts[1])), run.several) if None not in counts else Cell("–")
        values = [Cell(figure_of(found.get(each))) for each in names]
        rows.append(Row([Cell(shown(name, 60)), _counts(trained.get(name), run.several), held, *values]))
    counted = _counted(run.several)
    columns = [
        Column("site", numeric=False), Column(f"training: {counted}"), Column(f"judged on: {counted}"),
        *(Column(metric_name(name)) for name in names),
    ]  # fmt: skip
    about = f"{focus.letter} ({shown(focus.label, 60)})"
    caption = f"What sites disclosed of {about}: metrics without scores have no intervals."
    caption += SEVERAL if run.several else ""
    return Table(caption, columns, rows), notes + _cut(len(told))


def _trained(trained: Members, several: bool) -> tuple[Table, list[str]]:
    rows = [Row([Cell(shown(name, 60)), _counts(found, several)]) for name, found in list(trained.items())[:MOST]]
    columns = [Column("site", numeric=False), Column(f"training: {_counted(several)}")]
    return Table("Who took part." + (SEVERAL if several else ""), columns, rows), _cut(len(trained))


def _cut(count: int) -> list[str]:
    return [f"{count - MOST} more sites are not listed"] if count > MOST else []
