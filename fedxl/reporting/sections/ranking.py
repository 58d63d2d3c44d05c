"""ROC and precision-recall curves, with operating points whose thresholds were chosen on validation data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedxl.evaluation.intervals import Interval
from fedxl.evaluation.judgement import Judgement
from fedxl.evaluation.operating import OperatingPoint
from fedxl.evaluation.scored import Scored
from fedxl.reporting.charts import curves, pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.pictures import Mark
from fedxl.reporting.groups import Group, judged_on
from fedxl.reporting.page import Cell, Column, Figure, Row, Section, Table, between, figure_of, shown
from fedxl.reporting.sections.comparison import why_no_scores


def section(
    groups: Sequence[Group], focus: Group, keys: Mapping[str, Key], judged: Judgement | None, fpr: float
) -> Section:
    scored = {group.letter: _scored(group) for group in groups}
    drawn = [group for group in groups if scored[group.letter]]
    missing = [f"{g.letter} has no curves: {why_no_scores(g.shown)}" for g in groups if not scored[g.letter]]
    if not drawn:
        return Section("curves", "ROC and precision-recall", missing=missing)
    rocs = {keys[group.letter]: curves.roc(scored[group.letter]) for group in drawn}
    precisions = {keys[group.letter]: curves.precision_recall(scored[group.letter]) for group in drawn}
    mean = " Curves of several seeds are means." if any(len(scored[group.letter]) > 1 for group in drawn) else ""
    points = judged.pooled.points if judged else {}
    key = keys[focus.letter]._replace(letter="")
    counted = {
        keys[group.letter]: found for group in drawn if (found := group.shown.counts.get(judged_on(group.shown)))
    }
    envelopes = {mine: found.envelope() for mine, found in counted.items()}
    binned = " The band holds every curve that the sites' counts in bins allow." if envelopes else ""
    numbered = [(str(n), *each) for n, each in enumerate(points.items(), 1) if _known(each[1])]
    marked = f" Numbers: operating points of {focus.letter}, in the table below." if points else ""
    first = scored[drawn[0].letter][0]
    prevalence = float(first.labels.mean())
    split = judged_on(drawn[0].shown)
    figures = [
        Figure(
            "ROC",
            pictures.roc(rocs, fpr, [_on_roc(key, *each) for each in numbered], envelopes),
            f"{split.capitalize()} data. Shaded: the partial AUC's region. Dotted: chance.{mean}{binned}{marked}",
        ),
        Figure(
            "Precision and recall",
            pictures.precision_recall(precisions, prevalence, [_on_precision(key, *each) for each in numbered]),
            f"{split.capitalize()} data. Dotted: the share of positives, {prevalence:.3f}.{mean}{marked}",
        ),
    ]
    tables = [_table(focus, key, judged)] if judged and points else []
    return Section("curves", "ROC and precision-recall", figures=figures, tables=tables, missing=missing)


def _scored(group: Group) -> list[Scored]:
    """What the runs of a group scored on the split that its shown run is judged on."""
    split = judged_on(group.shown)
    found = [run.scored[split] for run in group.runs if split in run.scored]
    return [each for each in found if curves.both_classes(each)]


def _known(point: OperatingPoint) -> bool:
    return all(math.isfinite(share.value) for share in (point.sensitivity, point.specificity, point.ppv))


def _on_roc(key: Key, number: str, name: str, point: OperatingPoint) -> Mark:
    text = f"{name}: sensitivity {point.sensitivity.value:.3f}, specificity {point.specificity.value:.3f}"
    return Mark(key, 1 - point.specificity.value, point.sensitivity.value, text, number)


def _on_precision(key: Key, number: str, name: str, point: OperatingPoint) -> Mark:
    text = f"{name}: recall {point.sensitivity.value:.3f}, precision {point.ppv.value:.3f}"
    return Mark(key, point.sensitivity.value, point.ppv.value, text, number)


def _table(focus: Group, key: Key, judged: Judgement) -> Table:
    names = (
        "chosen for",
        "threshold",
        "sensitivity",
        "specificity",
        "positive predictive value",
        "negative predictive value",
    )
    rows = [
        Row(
            [Cell(shown(name, 60)), Cell(f"{point.threshold:.4g}"), *(_share(each) for each in point[1:])],
            str(n),
            key.css,
        )
        for n, (name, point) in enumerate(judged.pooled.points.items(), 1)
    ]
    measured = f"Thresholds were chosen on {judged.chosen_on} data and measured on {judged.split} data."
    caption = f"Operating points of {focus.letter} ({shown(focus.label, 60)}). {measured}"
    return Table(caption, [Column(names[0], numeric=False), *(Column(name) for name in names[1:])], rows)


def _share(found: Interval) -> Cell:
    return Cell(figure_of(found.value), between(found.low, found.high))
