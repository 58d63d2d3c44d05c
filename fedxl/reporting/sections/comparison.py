"""The table of runs: metrics with intervals, and paired differences to the run in focus."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedxl.evaluation.compare import Difference, differences
from fedxl.evaluation.intervals import Interval
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.groups import Group, judged_on, same_examples
from fedxl.reporting.page import Cell, Column, Row, Section, Table, between, columns, figure_of, metric_name, shown
from fedxl.reporting.runs import Run
from fedxl.reporting.text import mean_with_spread

Compared = Mapping[str, Mapping[str, Difference]]  # by letter and metric


class Measured(NamedTuple):
    """Metrics of a run's scores; of several labels, their means."""

    split: str
    metrics: Mapping[str, Interval]


Judgements = Mapping[str, Measured]  # by letter, of groups that have scores


def compare(groups: Sequence[Group], focus: Group, fpr: float) -> Compared:
    """Of each group whose shown run was judged on the same examples as the focus: its differences, by metric."""
    split, mine = judged_on(focus.shown), focus.shown
    others = [group for group in groups if group is not focus and same_examples(group.shown, mine)]
    found = {g.letter: differences(g.shown.scored[split], mine.scored[split], fpr=fpr) for g in others}
    return {letter: each for letter, each in found.items() if each}


def section(
    groups: Sequence[Group],
    focus: Group,
    keys: Mapping[str, Key],
    judged: Judgements,
    compared: Compared,
    names: Sequence[str],
) -> Section:
    measured = {name for found in judged.values() for name in found.metrics}
    names = [name for name in names if name in measured or any(group.over_runs(name) for group in groups)]
    heads = [*columns("run", *map(metric_name, names)), Column("state", numeric=False)]
    rows = [_row(group, group is focus, keys[group.letter], judged, names) for group in groups]
    tables = [Table(_caption(groups, judged), heads, rows)]
    if compared:
        tables.append(_differences(groups, focus, keys, compared, names))
    missing = [
        f"{group.letter} is not compared in pairs: {_why_unpaired(group.shown, focus.shown)}"
        for group in groups
        if group is not focus and group.letter not in compared
    ]
    missing += [
        f"{group.letter} has no intervals: {why_no_scores(group.shown)}"
        for group in groups
        if group.letter not in judged
    ]
    return Section("runs", "Runs" if len(groups) > 1 else "The run", tables=tables, missing=missing)


def _caption(groups: Sequence[Group], judged: Judgements) -> str:
    splits = {found.split for found in judged.values()} or {group.shown.split for group in groups}
    on = " and ".join(sorted(filter(None, splits))) or "no held-back"
    seeds = " Rows of several seeds show their mean ± standard deviation, then the one run that is looked at closely."
    several = seeds if any(len(group.runs) > 1 for group in groups) else ""
    sure = " with 95 % intervals" if judged else ""
    return f"Metrics on {on} data{sure}.{several}"


def _row(group: Group, focus: bool, key: Key, judged: Judgements, names: Sequence[str]) -> Row:
    run, count = group.shown, len(group.runs)
    head = Cell(shown(group.label, 80), f"{shown(run.algorithm, 40)}, {shown(run.risk, 40)}")
    chosen = f"round {run.best_round} chosen" if run.best_round is not None else ""
    seeds = Cell(f"{count} seeds", f"shown: seed {shown(run.seed, 20)}")
    known = judged[group.letter].metrics if group.letter in judged else {}
    cells = [head, *(_metric(group, name, known.get(name)) for name in names)]
    return Row([*cells, seeds if count > 1 else Cell(run.state, chosen)], group.letter, key.css, focus)


def _metric(group: Group, name: str, found: Interval | None) -> Cell:
    values = group.over_runs(name)
    one = found.value if found else group.shown.values.get(name)
    interval = between(found.low, found.high) if found else ""
    if len(values) > 1:
        return Cell(mean_with_spread(values), f"shown: {figure_of(one)} {interval}".strip())
    return Cell(figure_of(one), interval)


def _differences(
    groups: Sequence[Group], focus: Group, keys: Mapping[str, Key], compared: Compared, names: Sequence[str]
) -> Table:
    known = [name for name in names if any(name in found for found in compared.values())]
    rows = [
        Row([Cell(shown(g.label, 80)), *(_difference(compared[g.letter].get(name)) for name in known)], g.letter, css)
        for g in groups
        if g.letter in compared and (css := keys[g.letter].css)
    ]
    caption = (
        f"Paired differences: each run less {focus.letter} ({shown(focus.label, 60)}), on the same examples of "
        f"{judged_on(focus.shown)} data, with 95 % intervals and two-sided p. Negative: {focus.letter} is better."
    )
    return Table(caption, columns("run", *map(metric_name, known)), rows)


def _difference(found: Difference | None) -> Cell:
    if found is None or not math.isfinite(found.value):
        return Cell("–")
    p = "" if not math.isfinite(found.p) else ", p < 0.001" if found.p < 0.001 else f", p = {found.p:.3f}"
    return Cell(f"{found.value:+.3f}".replace("-", "−"), f"{between(found.low, found.high)}{p}".lstrip(", "))


def _why_unpaired(run: Run, focus: Run) -> str:
    if not judged_on(run) or not judged_on(focus):
        return why_no_scores(focus if judged_on(run) else run)
    if run.counts or focus.counts:
        return "counts in bins do not say which example is which"
    return "it was not judged on the same examples"


def why_no_scores(run: Run) -> str:
    """Why a run has no scores to compute from."""
    if run.by_label or run.label_curves:
        return "it has several labels, and this is for one"
    if judged_on(run):
        return "its data do not hold both classes"
    if run.done is None:
        return "it has not finished, and scores are written at the end"
    if run.risk.startswith("contrastive"):
        return "its risk pairs vectors, which have no ROC curve"
    if any("validation_by_site" in row for row in run.rows):
        return "its sites disclose metrics, not scores"
    if not run.split:
        return "no data were held back"
    return "its folder holds no scores.npz"
