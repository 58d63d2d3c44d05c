"""The table of runs: metrics with intervals, and paired differences to the run in focus."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedxl.evaluation.compare import Difference
from fedxl.reporting.charts.chart import DASHES
from fedxl.reporting.page import (
    Cell,
    Column,
    Row,
    Section,
    Table,
    between,
    columns,
    difference_text,
    figure_of,
    metric_name,
    shown,
)
from fedxl.reporting.runs import Group, assessed_on
from fedxl.reporting.study import Study
from fedxl.reporting.text import mean_with_spread
from fedxl.training.run_folder import Run

NO_EVENT = "its data hold no event, or its scores are not finite"


def section(it: Study) -> Section:
    names = [name for name in it.names if any(name in group.measured or group.over_runs(name) for group in it.groups)]
    heads = [*columns("run", *map(metric_name, names)), Column("state", numeric=False)]
    tables = [Table(_caption(it), heads, [_row(it, group, names) for group in it.groups])]
    if any(group.compared for group in it.groups):
        tables.append(_differences(it, names))
    missing = [
        f"{group.letter} is not compared in pairs: {_why_unpaired(group.shown, it.focus.shown)}"
        for group in it.groups
        if group is not it.focus and not group.compared
    ]
    unmeasured = [group for group in it.groups if not group.measured]
    missing += [f"{group.letter} has no intervals: {why_no_scores(group.shown)}" for group in unmeasured]
    if left_out := ", ".join(group.letter for group in it.groups if group not in it.drawn):
        told = f"pictures show {len(DASHES)} runs at most; {left_out} are in the table only"
        missing.append(f"{told}: report fewer runs")
    return Section("runs", "Runs" if len(it.groups) > 1 else "The run", tables=tables, missing=missing)


def _caption(it: Study) -> str:
    measured = {assessed_on(group.shown) for group in it.groups if group.measured}
    splits = measured or {group.shown.split for group in it.groups}
    on = " and ".join(sorted(filter(None, splits))) or "no held-back"
    seeds = " Rows of several seeds are means ± standard deviations; their intervals have the seeds' variance, too."
    several = seeds if any(len(group.runs) > 1 for group in it.groups) else ""
    sure = " with 95 % intervals" if measured else ""
    heard = sorted({run.sites_heard for group in it.groups for run in group.runs} - {""})
    rest = f" They rest on {' or '.join(heard)}." if heard else ""
    return f"Metrics on {on} data{sure}.{several}{rest}"


def _row(it: Study, group: Group, names: Sequence[str]) -> Row:
    run, count = group.shown, len(group.runs)
    head = Cell(shown(group.label, 80), f"{shown(run.algorithm, 40)}, {shown(run.risk, 40)}")
    chosen = f"round {run.best_round} chosen" if run.best_round is not None else ""
    seeds = Cell(f"{count} seeds", f"pictures: seed {shown(run.seed, 20)}")
    state = seeds if count > 1 else Cell(run.state, chosen)
    return Row.of(head, *(_metric(group, name) for name in names), state, key=group.key, focus=group is it.focus)


def _metric(group: Group, name: str) -> Cell:
    found, values = group.measured.get(name), group.over_runs(name)
    if len(values) > 1:
        return Cell(mean_with_spread(values), between(found))
    return Cell(figure_of(found.value if found else group.shown.values.get(name)), between(found))


def _differences(it: Study, names: Sequence[str]) -> Table:
    known = [name for name in names if any(name in group.compared for group in it.groups)]
    rows = [
        Row.of(shown(group.label, 80), *(_difference(group.compared.get(name)) for name in known), key=group.key)
        for group in it.groups
        if group.compared
    ]
    letter = it.focus.letter
    caption = (
        f"Paired differences: each run less {it.focus.title}, on the same examples of "
        f"{assessed_on(it.focus.shown)} data, with 95 % intervals and two-sided p. Negative: {letter} is better."
        f"{' Of several seeds: means over pairs of runs.' if len(it.focus.runs) > 1 else ''}"
    )
    return Table(caption, columns("run", *map(metric_name, known)), rows)


def _difference(found: Difference | None) -> Cell:
    if found is None or not math.isfinite(found.value):
        return Cell("–")
    p = "" if not math.isfinite(found.p) else "p < 0.001" if found.p < 0.001 else f"p = {found.p:.3f}"
    return Cell(difference_text(found.value), f"{between(found)}\n{p}".strip())


def _why_unpaired(run: Run, focus: Run) -> str:
    if not assessed_on(run) or not assessed_on(focus):
        return why_no_scores(focus if assessed_on(run) else run)
    if run.histograms or focus.histograms:
        return "counts in bins do not say which example is which"
    return "it was not measured on the same examples"


def why_no_scores(run: Run) -> str:
    """Why a run has no scores to compute from."""
    if run.labels:
        return "it has several labels, and this is for one"
    if assessed_on(run):
        return NO_EVENT if run.timed else "its data do not hold both classes"
    if run.done is None:
        return "it has not finished, and scores are written at the end"
    if run.risk.startswith("contrastive"):
        return "its risk pairs vectors, which have no ROC curve"
    if any("validation_by_site" in row for row in run.rows):
        return "its sites disclose metrics, not scores"
    if not run.split:
        return "no data were held back"
    return "its folder holds no scores.npz"
