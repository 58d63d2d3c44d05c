"""Several labels of the run in focus: metrics of each and their means, curves, calibration and thresholds."""

from __future__ import annotations

import math

from fedxl.evaluation.assess import Assessment
from fedxl.evaluation.histogram import by_label
from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.page import Figure, Section, columns, figure_of, interval_text, left_out, shown
from fedxl.reporting.sections.ranking import is_known, mark, operating_table
from fedxl.reporting.sections.sites import MEAN, metric_table
from fedxl.reporting.study import Study

MOST_DRAWN = 40  # labels with pictures
UNDRAWN = "labels are not drawn"
RULES = ("specificity 0.9", "sensitivity 0.9")  # operating points that have a table; the others are in model.json


def sections(it: Study) -> list[Section]:
    """Without what no label has."""
    assert it.found is not None, "several labels are known from an assessment"
    return [_metrics(it, it.found), _curves(it, it.found), _calibration(it.key, it.found)]


def _metrics(it: Study, found: Assessment) -> Section:
    parts = [([MEAN, "", ""], found.pooled.mean)]
    for name, one in found.pooled.labels.items():
        parts.append(([shown(name, 60), f"{one.positives + one.negatives:,}", f"{one.positives:,}"], one.metrics))
    caption = (
        f"{found.split.capitalize()} data, with 95 % intervals; n counts the examples whose label is known. The "
        "interval of the mean is from a jackknife of whole examples, because labels of an example correlate."
    )
    names = list(found.pooled.mean)
    table = metric_table(caption, columns("label", "n", "positives"), parts, names, it.key)
    labels = found.pooled.labels.items()
    one_class = [name for name, part in labels if not math.isfinite(part.metrics[names[0]].value)]
    missing = [f"{shown(name, 60)} has one class in the {found.split} data: no metric" for name in one_class]
    return Section("labels", "Labels", tables=[table], missing=[*found.notes, *missing])


def _curves(it: Study, found: Assessment) -> Section:
    scores = by_label(it.focus.shown.scores, it.focus.shown.histograms)[found.split]
    figures = []
    drawn = {name: one for name, one in found.pooled.labels.items() if scores[name].both_classes}
    for number, (name, one) in enumerate(list(drawn.items())[:MOST_DRAWN]):
        key = it.key._replace(name=shown(name, 60), letter="")
        point = one.points.get(RULES[0])
        marks = [mark(key, "", RULES[0], point)] if point is not None and is_known(point) else []
        svg = pictures.roc({key: pictures.roc_curve([scores[name]])}, found.fpr, marks, small=f"roc{number}")
        figures.append(Figure(key.name, svg, f"AUROC {interval_text(one.metrics['auroc'])}"))
    if not figures:
        return Section("curves", "ROC by label", missing=[f"no label has both classes in the {found.split} data"])
    text = [
        f"Each label on {found.split} data. Shaded: the partial AUC's region. Dotted: chance. A marker is the "
        f"operating point that was chosen for {RULES[0]} on validation data."
    ]
    return Section("curves", "ROC by label", text, small=figures, missing=left_out(len(drawn), MOST_DRAWN, UNDRAWN))


def _calibration(key: Key, found: Assessment) -> Section:
    """Reliability and operating points."""
    labels = found.pooled.labels
    fitted = {name: (one, one.reliability) for name, one in labels.items() if one.reliability is not None}
    figures = []
    for number, (name, (one, reliability)) in enumerate(list(fitted.items())[:MOST_DRAWN]):
        mine = key._replace(name=shown(name, 60), letter="")
        svg = pictures.reliability({mine: reliability}, small=f"calibration{number}")
        told = f"Brier score {figure_of(one.brier)}, calibration error {figure_of(reliability.error)}"
        figures.append(Figure(mine.name, svg, told))
    text = [
        "Platt scaling, fitted to the validation scores of each label by itself. Ten bins of equal counts with 95 % "
        "intervals; the closer to the dotted line, the better."
    ]
    tables = []
    for rule in RULES:
        caption = f"Thresholds that gave {rule} on validation data, label by label, measured on {found.split} data."
        if points := {name: one.points[rule] for name, one in labels.items() if rule in one.points}:
            tables.append(operating_table(caption, "label", points))
    undecided = found.undecided.items()
    missing = [f"{shown(name, 60)} has no calibration and no threshold: {why}" for name, why in undecided]
    missing += left_out(len(fitted), MOST_DRAWN, UNDRAWN)
    title = "Calibration and thresholds by label"
    return Section("calibration", title, text if fitted else (), small=figures, tables=tables, missing=missing)
