"""Several labels of the run in focus: metrics of each and their means, curves, calibration, thresholds, and sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedxl.evaluation.judgement import LabelJudgement, parts_of
from fedxl.evaluation.scored import Scored
from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.pictures import Mark
from fedxl.reporting.groups import Group
from fedxl.reporting.page import (
    Cell,
    Column,
    Figure,
    Row,
    Section,
    Table,
    columns,
    figure_of,
    interval_cell,
    interval_text,
    metric_name,
    shown,
)
from fedxl.reporting.sections.ranking import OPERATING, operating_cells
from fedxl.reporting.sections.sites import dot, dot_column, shared_axis

MOST_DRAWN = 40  # labels with pictures
MOST_COLUMNS = 20  # labels in the table of sites
MOST_SITES = 300
RULES = ("specificity 0.9", "sensitivity 0.9")  # operating points that have a table; the others are in model.json
MEAN = "mean of the labels"
NO_BREAK = "\N{NO-BREAK SPACE}"


def sections(focus: Group, key: Key, found: LabelJudgement) -> list[Section]:
    """Without what no label has."""
    scored = parts_of(focus.shown.by_label, focus.shown.label_curves)[found.split]
    return [_metrics(key, found), _curves(key, found, scored), _calibration(key, found), *_sites(focus, found)]


def _metrics(key: Key, found: LabelJudgement) -> Section:
    names, first = list(found.mean), next(iter(found.mean))
    axis = shared_axis([found.mean[first], *(judged.pooled.metrics[first] for judged in found.labels.values())])
    line = found.mean[first].value
    heads = [*columns("label", "n", "positives"), dot_column(first, axis), *(Column(metric_name(n)) for n in names)]
    mean = [Cell(MEAN), Cell(""), Cell(""), dot(found.mean[first], first, axis, line, key)]
    rows = [Row([*mean, *map(interval_cell, found.mean.values())], focus=True)]
    for name, judged in found.labels.items():
        one = judged.pooled
        counts = [Cell(shown(name, 60)), Cell(f"{one.positives + one.negatives:,}"), Cell(f"{one.positives:,}")]
        picture = dot(one.metrics[first], first, axis, line, key)
        rows.append(Row([*counts, picture, *(interval_cell(one.metrics[metric]) for metric in names)]))
    caption = (
        f"{found.split.capitalize()} data, with 95 % intervals; n counts the examples of which a label is known. The "
        "interval of the mean is of a jackknife of whole examples, because their labels go together."
    )
    one_class = [
        name for name, judged in found.labels.items() if not math.isfinite(judged.pooled.metrics[first].value)
    ]
    missing = [f"{shown(name, 60)} has one class in the {found.split} data: no metric" for name in one_class]
    return Section("labels", "Labels", tables=[Table(caption, heads, rows)], missing=[*found.notes, *missing])


def _curves(key: Key, found: LabelJudgement, scored: Mapping[str, Scored]) -> Section:
    figures = []
    drawn = {name: one for name, one in found.labels.items() if pictures.both_classes(scored[name])}
    for number, (name, one) in enumerate(list(drawn.items())[:MOST_DRAWN]):
        mine = key._replace(name=shown(name, 60), letter="")
        marks = []
        point = one.pooled.points.get(RULES[0])
        if point is not None and math.isfinite(point.sensitivity.value) and math.isfinite(point.specificity.value):
            sensitivity, specificity = point.sensitivity.value, point.specificity.value
            words = f"sensitivity {sensitivity:.3f}, specificity {specificity:.3f}"
            marks.append(Mark(mine, 1 - specificity, sensitivity, words))
        curve = {mine: pictures.roc_curve([scored[name]])}
        svg = pictures.roc(curve, found.fpr, marks, small=f"roc{number}")
        # On a narrow screen, the line breaks before the interval, not within it.
        auroc, _, interval = interval_text(one.pooled.metrics["auroc"]).partition(" ")
        caption = f"AUROC {auroc} {interval.replace(' ', NO_BREAK)}".strip()
        figures.append(Figure(mine.name, svg, caption))
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
        mine = key._replace(name=shown(name, 60), letter="")
        svg = pictures.reliability({mine: one.reliability}, small=f"calibration{number}")
        told = f"Brier score {figure_of(one.brier)}, calibration error {figure_of(one.reliability.error)}"
        figures.append(Figure(shown(name, 60), svg, told))
    text = [
        "Platt scaling, fitted to the validation scores of each label by itself. Ten bins of equal counts with 95 % "
        "intervals; the closer to the dotted line, the better."
    ]
    tables = []
    for rule in RULES:
        points = {name: one.pooled.points[rule] for name, one in found.labels.items() if rule in one.pooled.points}
        caption = f"Thresholds that gave {rule} on validation data, label by label, measured on {found.split} data."
        if points:
            rows = [Row(operating_cells(name, point)) for name, point in points.items()]
            tables.append(Table(caption, columns("label", *OPERATING), rows))
    missing = [
        f"{shown(name, 60)} has no calibration and no threshold: {why}" for name, why in found.undecided.items()
    ]
    return Section(
        "calibration", "Calibration and thresholds by label", text if fitted else (), small=figures, tables=tables,
        missing=[*missing, *_cut(len(fitted))],
    )  # fmt: skip


def _sites(focus: Group, found: LabelJudgement) -> list[Section]:
    """AUROC at each site; nothing if held-back examples do not say where they are from."""
    if not found.sites:
        return []
    labels = list(found.labels)[:MOST_COLUMNS]
    heads = columns("site", f"{found.split}: n", MEAN, *(shown(name, 40) for name in labels))
    pooled = [found.mean["auroc"], *(found.labels[name].pooled.metrics["auroc"] for name in labels)]
    total = sum(site.examples for site in found.sites.values())
    rows = [Row([Cell("all sites"), Cell(f"{total:,}"), *map(interval_cell, pooled)], focus=True)]
    for name, site in list(found.sites.items())[:MOST_SITES]:
        each = [site.mean, *(site.labels.get(label) for label in labels)]
        rows.append(Row([Cell(shown(name, 60)), Cell(f"{site.examples:,}"), *map(interval_cell, each)]))
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
    return [Section("sites", "Sites", tables=[Table(caption, heads, rows)], missing=missing)]


def _cut(count: int) -> Sequence[str]:
    return (
        [f"the first {MOST_DRAWN} labels are drawn, {count - MOST_DRAWN} more are not"] if count > MOST_DRAWN else []
    )
