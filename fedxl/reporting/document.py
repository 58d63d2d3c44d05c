"""A report of runs: from runs to a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedxl import metrics
from fedxl.errors import UserError, require
from fedxl.evaluation.judgement import Judgement, judge
from fedxl.evaluation.label_judgement import LabelJudgement
from fedxl.evaluation.label_means import means
from fedxl.reporting import html
from fedxl.reporting.charts.chart import DASHES, Key
from fedxl.reporting.charts.curves import both_classes
from fedxl.reporting.groups import Group, grouped, judged_on
from fedxl.reporting.page import Page, Section, shown
from fedxl.reporting.runs import Run, read_run, run_dirs
from fedxl.reporting.sections import (
    comparison,
    convergence,
    label_summary,
    labels,
    probabilities,
    ranking,
    setup,
    sites,
    summary,
)
from fedxl.reporting.sections.comparison import Measured

FPR = 0.3  # the limit of the partial AUC where the metric that chose the model has none


def write(target: Path, folders: Sequence[Path], reference: str = "") -> None:
    """Write the report of the runs in these folders into one HTML file."""
    html.require_jinja2()
    require(not target.is_dir(), f"{target} is a folder; --html must name a file")
    html.write(target, build([read_run(path) for path in run_dirs(folders)], reference))


def build(runs: Sequence[Run], reference: str = "") -> Page:
    """The page. `reference` names the run, or the group of runs, that it looks at closely and compares with."""
    require(bool(runs), "a report needs a run")
    groups, focus = grouped(runs, reference)
    drawn, left_out = _drawn(groups, focus)
    keys = {group.letter: Key(shown(group.label, 60), number, group.letter) for number, group in enumerate(drawn)} | {
        group.letter: Key(shown(group.label, 60), None, group.letter) for group in left_out
    }
    fpr = _fpr(focus.shown)
    judged = {
        group.letter: found for group in groups if (found := _judge(group.shown, fpr, group is focus)) is not None
    }
    names, compared = _names(focus.shown, fpr), comparison.compare(groups, focus, fpr)
    mine, key = judged.get(focus.letter), keys[focus.letter]
    several = labels.judged(focus.shown, fpr)
    measured = {letter: Measured(found.split, found.pooled.metrics) for letter, found in judged.items()}
    measured |= {group.letter: mean for group in groups if (mean := _means(group, focus, several, fpr))}
    if several is not None:
        told = label_summary.answer(summary.called(groups, focus), focus, several, names[0])
        facts = label_summary.facts(several, focus.shown)
        of_focus = labels.sections(focus, key, several)
    else:
        told = summary.answer(groups, focus, mine, compared, names[0], preferred=not reference)
        facts = summary.facts(mine) if mine else []
        of_focus = [ranking.section(drawn, focus, keys, mine, fpr), probabilities.section(focus, key, mine)]
    if several is None or not several.sites:
        of_focus.append(sites.section(focus, key, mine, names))
    sections = [
        comparison.section(groups, focus, keys, measured, compared, names),
        *of_focus,
        _together(convergence.section(drawn, keys, focus.shown.metric), setup.communication(drawn, keys)),
        setup.settings(groups, keys),
        setup.reproduce(drawn),
    ]
    split = several.split if several else mine.split if mine else ""
    return summary.page(groups, focus, told, facts, _limited(sections, left_out), split)


def _means(group: Group, focus: Group, several: LabelJudgement | None, fpr: float) -> Measured | None:
    """The means over labels of a run with several, with intervals."""
    if several is not None and group is focus:
        return Measured(several.split, several.mean)
    found = group.shown.by_label.get(group.shown.split)
    if found is None:
        return None
    return Measured(group.shown.split, means(_usual(fpr), found))


def _drawn(groups: Sequence[Group], focus: Group) -> tuple[list[Group], list[Group]]:
    """The groups that are drawn, as many as there are styles, the focus among them; and the others."""
    first = [group for group in groups if group is not focus][: len(DASHES) - 1]
    drawn = [group for group in groups if group is focus or group in first]
    return drawn, [group for group in groups if group not in drawn]


def _limited(sections: Sequence[Section], left_out: Sequence[Group]) -> list[Section]:
    if left_out:
        letters = ", ".join(group.letter for group in left_out)
        note = f"pictures show {len(DASHES)} runs at most; {letters} are in the table only: report fewer runs"
        return [replace(sections[0], missing=[*sections[0].missing, note]), *sections[1:]]
    return list(sections)


def _together(first: Section, second: Section) -> Section:
    """Two sections as one, under both titles: a figure each, side by side."""
    title = f"{first.title} and {second.title.lower()}"
    figures, tables = [*first.figures, *second.figures], [*first.tables, *second.tables]
    return Section(first.id, title, figures=figures, tables=tables, missing=[*first.missing, *second.missing])


def _fpr(run: Run) -> float:
    """The limit in the name of the metric that chose the model, if it is one."""
    try:
        base, limit = metrics.split(run.metric)
        return FPR if limit is None or base in metrics.QUERY_METRICS else limit
    except UserError:
        return FPR


def _names(run: Run, fpr: float) -> list[str]:
    """Metrics that tables show, the one that chose the model first."""
    usual = _usual(fpr)
    chosen = [run.metric] if run.metric in usual or run.metric in run.values else []
    own = [
        name for name in run.values if name not in metrics.COUNTS and name.partition("@")[0] not in metrics.METRICS
    ]
    return list(dict.fromkeys([*chosen, *usual, *own]))


def _usual(fpr: float) -> list[str]:
    return ["auroc", f"pauc@{fpr:g}", "ap"]


def _judge(run: Run, fpr: float, by_site: bool = True) -> Judgement | None:
    """What its scores say; None if there are none, or of one class only. Sites take most of the time."""
    split = judged_on(run)
    if not split or not both_classes(run.scored[split]):
        return None
    known = run.scored if by_site else {name: replace(found, sites=None) for name, found in run.scored.items()}
    return judge(known, fpr=fpr)
