"""A report of runs: a page, and one HTML file that loads nothing. Jinja2 is an extra: fedxl[report]."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from fedxl import __version__, metrics
from fedxl.errors import UserError, printable, require
from fedxl.evaluation.judgement import Judgement, judge, judge_labels
from fedxl.evaluation.label_means import means
from fedxl.files import write_atomically
from fedxl.reporting.charts.chart import DASHES, Key
from fedxl.reporting.charts.pictures import both_classes
from fedxl.reporting.charts.scale import Svg
from fedxl.reporting.groups import Group, grouped, judged_on
from fedxl.reporting.page import Page, shown
from fedxl.reporting.runs import Run, read_run, run_dirs
from fedxl.reporting.sections import comparison, labels, ranking, rounds, setup, sites, summary
from fedxl.reporting.sections.comparison import Measured

TEMPLATES = resources.files("fedxl.reporting") / "templates"
FPR = 0.3  # the limit of the partial AUC where the metric that chose the model has none


def write(target: Path, folders: Sequence[Path], reference: str = "") -> None:
    """Write the report of the runs in these folders into one HTML file."""
    require_jinja2()
    require(not target.is_dir(), f"{target} is a folder; --html must name a file")
    save(target, build([read_run(path) for path in run_dirs(folders)], reference))


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
    several = judge_labels(focus.shown.by_label, focus.shown.label_curves, fpr=fpr)
    measured = {letter: Measured(found.split, found.pooled.metrics) for letter, found in judged.items()}
    for group in groups:
        run = group.shown
        if several is not None and group is focus:
            measured[group.letter] = Measured(several.split, several.mean)
        elif run.split in run.by_label:
            measured[group.letter] = Measured(run.split, means(_usual(fpr), run.by_label[run.split]))
    if several is not None:
        told = summary.answer_for_labels(groups, focus, several, names[0])
        facts = summary.facts_for_labels(several, focus.shown)
        of_focus = labels.sections(focus, key, several)
    else:
        told = summary.answer(groups, focus, mine, compared, names[0], preferred=not reference)
        facts = summary.facts(mine) if mine else []
        of_focus = [ranking.section(drawn, focus, keys, mine, fpr), ranking.probabilities(focus, key, mine)]
    if several is None or not several.sites:
        of_focus.append(sites.section(focus, key, mine, names))
    first = comparison.section(groups, focus, keys, measured, compared, names)
    if left_out:
        letters = ", ".join(group.letter for group in left_out)
        note = f"pictures show {len(DASHES)} runs at most; {letters} are in the table only: report fewer runs"
        first = replace(first, missing=[*first.missing, note])
    of_rounds = rounds.section(drawn, keys, focus.shown.metric)
    sections = [first, *of_focus, of_rounds, setup.settings(groups), setup.reproduce(drawn)]
    split = several.split if several else mine.split if mine else ""
    return summary.page(groups, focus, told, facts, sections, split)


def _drawn(groups: Sequence[Group], focus: Group) -> tuple[list[Group], list[Group]]:
    """The groups that are drawn, as many as there are styles, the focus among them; and the others."""
    first = [group for group in groups if group is not focus][: len(DASHES) - 1]
    drawn = [group for group in groups if group is focus or group in first]
    return drawn, [group for group in groups if group not in drawn]


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


def require_jinja2() -> Any:
    try:
        import jinja2
    except ImportError:
        raise UserError("a report in HTML needs Jinja2: pip install 'fedxl[report]'") from None
    return jinja2


def render(page: Page) -> str:
    """The file. Whatever is not SVG of our own is escaped; of all content, only the style sheet is allowed."""
    jinja2 = require_jinja2()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_clean)
    template = environment.from_string((TEMPLATES / "report.html").read_text(encoding="utf-8"))
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # Both are of this package, and go into the page as they are.
    trusted = {"style": Svg(style), "style_hash": Svg(f"sha256-{digest}")}
    return str(template.render(page=page, version=__version__, **trusted))


def save(path: Path, page: Page) -> None:
    """Write the file, whole or not at all."""
    content = render(page).encode("utf-8", errors="replace")
    try:
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file with --html") from None


def _clean(value: object) -> object:
    """Text of others with its control characters spelled out, line by line; the rest as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "\n".join(printable(line.replace("\t", "    "), len(line) * 4) for line in value.split("\n"))
