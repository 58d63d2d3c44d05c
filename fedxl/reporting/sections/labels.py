"""Several labels of the run in focus: metrics of each and their means, curves, calibration, thresholds, and sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedxl.evaluation.intervals import Interval
from fedxl.evaluation.judgement import Judged
from fedxl.evaluation.label_judgement import LabelJudgement, judge_labels, judged_split, parts_of
from fedxl.evaluation.scored import Scored
from fedxl.reporting.charts import curves, small
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.groups import Group
from fedxl.reporting.page import Cell, Column, Figure, Row, Section, Table, between, figure_of, metric_name, shown
from fedxl.reporting.runs import Run
from fedxl.reporting.sections.convergence import dot, dot_column, shared_axis, value

MOST_DRAWN = 40  # labels with pictures
MOST_COLUMNS = 20  # labels in the table of sites
MOST_SITES = 300
RULES = ("specificity 0.9", "sensitivity 0.9")  # operating points that have a table; the others are in model.json
MEAN = "mean of the labels"
NO_BREAK = "\N{NO-BREAK SPACE}"


def judged(run: Run, fpr: float) -> LabelJudgement | None:
    """What the scores of a run's labels say; None if it has none."""
    parts = parts_of(run.by_label, run.label_curves)
    split = judged_split(parts)
    return judge_labels(parts, run.by_label.get(split), fpr=fpr) if split else None


def sections(focus: Group, key: Key, found: LabelJudgement) -> list[Section]:
    """Without what no label has."""
    scored = parts_of(focus.shown.by_label, focus.shown.label_curves)[found.split]
    return [_metrics(key, found), _curves(key, found, scored), _calibration(key, found), *_sites(focus, found)]


def _metrics(key: Key, found: LabelJudgement) -> Section:
    names, first = list(found.mean), next(iter(found.mean))
    axis = shared_axis([found.mean[first], *(judged.pooled.metrics[first] for judged in found.labels.values())])
    line = found.mean[first].value
    columns = [Column("label", numeric=False), Column("n"), Column("positives"), dot_column(first, axis)]
    columns += [Column(metric_name(name)) for name in names]
    mean = [Cell(MEAN), Cell(""), Cell(""), dot(found.mean[first], first, axis, line, key)]
    rows = [Row([*mean, *map(value, found.mean.values())], focus=True)]
    for name, judged in found.labels.items():
        one = judged.pooled
        counts = [Cell(shown(name, 60)), Cell(f"{one.positives + one.negatives:,}"), Cell(f"{one.positives:,}")]
        picture = dot(one.metrics[first], first, axis, line, key)
        rows.append(Row([*counts, picture, *(value(one.metrics[metric]) for metric in names)]))
    caption = (
        f"{found.split.capitalize()} data, with 95 % intervals; n counts the examples of which a label is known. The "
        "interval of the mean is of a jackknife of whole examples, because their labels go together."
    )
    one_class = [
        name for name, judged in found.labels.items() if not math.isfinite(judged.pooled.metrics[first].value)
    ]
    missing = [f"{shown(name, 60)} has one class in the {found.split} data: no metric" for name in one_class]
    return Section("labels", "Labels", tables=[Table(caption, columns, rows)], missing=[*found.notes, *missing])


def _curves(key: Key, found: LabelJudgement, scored: Mapping[str, Scored]) -> Section:
    figures = []
    drawn = {name: one for name, one in found.labels.items() if curves.both_classes(scored[name])}
    for number, (name, one) in enumerate(list(drawn.items())[:MOST_DRAWN]):
        point = one.pooled.points.get(RULES[0])
        mark = None if point is None else (1 - point.specificity.value, point.sensitivity.value)
        curve = curves.roc([scored[name]])
        svg = small.roc(f"roc{number}", shown(name, 60), curve, found.fpr, key, mark)
        figures.append(Figure(shown(name, 60), svg, f"AUROC {_words(one.pooled.metrics['auroc'])}"))
    if not figures:
        return Section("curves", "ROC by label", missing=[f"no label has both classes in the {found.split} data"])
    text = [
        f"Each label on {found.split} data. Shaded: the partial AUC's region. Dotted: chance. A marker is the "
        f"operating point that was chosen for {RULES[0]} on validation data."
    ]
    return Section("curves", "ROC by label", text, small=figures, missing=_cut(len(drawn)))


def _calibration(key: Key, found: LabelJudgement) -> Section:
    """Reliability and operating points."""
    fitted = {name: one.pooled for name, one in found.labels.items() if one.pooled.reliability is not None}
    figures = []
    for number, (name, one) in enumerate(list(fitted.items())[:MOST_DRAWN]):
        assert one.reliability is not None
        svg = small.reliability(f"calibration{number}", shown(name, 60), one.reliability, key)
        told = f"Brier score {figure_of(one.brier)}, calibration error {figure_of(one.reliability.error)}"
        figures.append(Figure(shown(name, 60), svg, told))
    text = [
        "Platt scaling, fitted to the validation scores of each label by itself. Ten bins of equal counts with 95 % "
        "intervals; the closer to the dotted line, the better."
    ]
    tables = [table for rule in RULES if (table := _points(found, rule)) is not None]
    missing = [
        f"{shown(name, 60)} has no calibration and no threshold: {why}" for name, why in found.undecided.items()
    ]
    if not fitted:
        return Section("calibration", "Calibration and thresholds by label", tables=tables, missing=missing)
    return Section(
        "calibration", "Calibration and thresholds by label", text, small=figures, tables=tables,
        missing=[*missing, *_cut(len(fitted))],
    )  # fmt: skip


def _points(found: LabelJudgement, rule: str) -> Table | None:
    known = {name: one.pooled.points[rule] for name, one in found.labels.items() if rule in one.pooled.points}
    if not known:
        return None
    names = ("threshold", "sensitivity", "specificity", "positive predictive value", "negative predictive value")
    rows = [
        Row([Cell(shown(name, 60)), Cell(f"{point.threshold:.4g}"), *(value(share) for share in point[1:])])
        for name, point in known.items()
    ]
    caption = f"Thresholds that gave {rule} on validation data, label by label, measured on {found.split} data."
    return Table(caption, [Column("label", numeric=False), *map(Column, names)], rows)


def _sites(focus: Group, found: LabelJudgement) -> list[Section]:
    """AUROC at each site; nothing if held-back examples do not say where they are from."""
    if not found.sites:
        return []
    labels = list(found.labels)[:MOST_COLUMNS]
    columns = [Column("site", numeric=False), Column(f"{found.split}: n"), Column(MEAN)]
    columns += [Column(shown(name, 40)) for name in labels]
    pooled = {name: found.labels[name].pooled for name in labels}
    total = sum(site.examples for site in found.sites.values())
    head = [Cell("all sites"), Cell(f"{total:,}"), value(found.mean["auroc"])]
    rows = [Row([*head, *(value(_auroc(pooled[name])) for name in labels)], focus=True)]
    for name, site in list(found.sites.items())[:MOST_SITES]:
        cells = [Cell(shown(name, 60)), Cell(f"{site.examples:,}"), value(site.mean)]
        rows.append(Row([*cells, *(value(site.labels.get(label)) for label in labels)]))
    caption = (
        f"AUROC of {focus.letter} ({shown(focus.label, 60)}) at each site, {found.split} data, with 95 % intervals: "
        "the mean over the labels that have both classes there, and each label."
    )
    empty = [shown(member.name, 40) for member in focus.shown.members if member.name not in found.sites]
    missing = [f"no {found.split} data from {', '.join(empty[:8])}"] if empty else []
    if len(found.labels) > MOST_COLUMNS:
        missing.append(f"{len(found.labels) - MOST_COLUMNS} more labels are not in this table")
    if len(found.sites) > MOST_SITES:
        missing.append(f"{len(found.sites) - MOST_SITES} more sites are not listed")
    return [Section("sites", "Sites", tables=[Table(caption, columns, rows)], missing=missing)]


def _auroc(found: Judged) -> Interval:
    return found.metrics["auroc"]


def _words(found: Interval) -> str:
    """On a narrow screen, an interval breaks before it, not within it."""
    return f"{figure_of(found.value)} {between(found.low, found.high).replace(' ', NO_BREAK)}".strip()


def _cut(count: int) -> Sequence[str]:
    return (
        [f"the first {MOST_DRAWN} labels are drawn, {count - MOST_DRAWN} more are not"] if count > MOST_DRAWN else []
    )
