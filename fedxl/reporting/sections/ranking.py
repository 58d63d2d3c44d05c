"""The run in focus: ROC and precision-recall curves, operating points, calibration and the decision curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import expit

from fedxl.evaluation.calibration import brier, reliability
from fedxl.evaluation.judgement import Judgement
from fedxl.evaluation.operating import NetBenefit, OperatingPoint
from fedxl.evaluation.scored import Scored
from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.pictures import Mark
from fedxl.reporting.groups import Group, judged_on
from fedxl.reporting.page import Cell, Figure, Row, Section, Table, columns, interval_cell, shown
from fedxl.reporting.sections.comparison import why_no_scores

OPERATING = ("threshold", "sensitivity", "specificity", "positive predictive value", "negative predictive value")
ENOUGH = 1.6  # threshold probabilities are drawn up to this multiple of where the model is of no more use


def section(
    groups: Sequence[Group], focus: Group, keys: Mapping[str, Key], judged: Judgement | None, fpr: float
) -> Section:
    scored = {group.letter: _scored(group) for group in groups}
    drawn = [group for group in groups if scored[group.letter]]
    missing = [f"{g.letter} has no curves: {why_no_scores(g.shown)}" for g in groups if not scored[g.letter]]
    if not drawn:
        return Section("curves", "ROC and precision-recall", missing=missing)
    rocs = {keys[group.letter]: pictures.roc_curve(scored[group.letter]) for group in drawn}
    precisions = {keys[group.letter]: pictures.precision_recall_curve(scored[group.letter]) for group in drawn}
    mean = " Curves of several seeds are means." if any(len(scored[group.letter]) > 1 for group in drawn) else ""
    points = judged.pooled.points if judged else {}
    key = keys[focus.letter]._replace(letter="")
    counted = {group.letter: group.shown.counts.get(judged_on(group.shown)) for group in drawn}
    envelopes = {keys[letter]: found.envelope() for letter, found in counted.items() if found}
    binned = " The band holds every curve that the sites' counts in bins allow." if envelopes else ""
    numbered = [(str(n), *each) for n, each in enumerate(points.items(), 1) if _known(each[1])]
    on_roc = [_mark(key, *each, "sensitivity", "specificity") for each in numbered]
    on_precision = [_mark(key, *each, "recall", "precision") for each in numbered]
    marked = f" Numbers: operating points of {focus.letter}, in the table below." if points else ""
    prevalence = float(scored[drawn[0].letter][0].labels.mean())
    data = f"{judged_on(drawn[0].shown).capitalize()} data."
    about_roc = f"{data} Shaded: the partial AUC's region. Dotted: chance.{mean}{binned}{marked}"
    about_precision = f"{data} Dotted: the share of positives, {prevalence:.3f}.{mean}{marked}"
    precision = pictures.precision_recall(precisions, prevalence, on_precision)
    figures = [
        Figure("ROC", pictures.roc(rocs, fpr, on_roc, envelopes), about_roc),
        Figure("Precision and recall", precision, about_precision),
    ]
    tables = [_table(focus, key, judged)] if judged and points else []
    return Section("curves", "ROC and precision-recall", figures=figures, tables=tables, missing=missing)


def _scored(group: Group) -> list[Scored]:
    """What the runs of a group scored on the split that its shown run is judged on."""
    split = judged_on(group.shown)
    found = [run.scored[split] for run in group.runs if split in run.scored]
    return [each for each in found if pictures.both_classes(each)]


def _known(point: OperatingPoint) -> bool:
    return all(math.isfinite(share.value) for share in (point.sensitivity, point.specificity, point.ppv))


def _mark(key: Key, number: str, name: str, point: OperatingPoint, first: str, second: str) -> Mark:
    """The operating point on the ROC curve (sensitivity, specificity) or among precisions (recall, precision)."""
    found, other = point.sensitivity.value, (point.ppv if second == "precision" else point.specificity).value
    x, y = (found, other) if second == "precision" else (1 - other, found)
    return Mark(key, x, y, f"{name}: {first} {found:.3f}, {second} {other:.3f}", number)


def _table(focus: Group, key: Key, judged: Judgement) -> Table:
    rows = [
        Row(operating_cells(name, point), str(n), key.css)
        for n, (name, point) in enumerate(judged.pooled.points.items(), 1)
    ]
    measured = f"Thresholds were chosen on {judged.chosen_on} data and measured on {judged.split} data."
    caption = f"Operating points of {focus.letter} ({shown(focus.label, 60)}). {measured}"
    return Table(caption, columns("chosen for", *OPERATING), rows)


def operating_cells(name: str, point: OperatingPoint) -> list[Cell]:
    return [Cell(shown(name, 60)), Cell(f"{point.threshold:.4g}"), *map(interval_cell, point[1:])]


def probabilities(focus: Group, key: Key, judged: Judgement | None) -> Section:
    if judged is None:
        return Section(
            "calibration",
            "Calibration and decision",
            missing=[f"{focus.letter} has none: {why_no_scores(focus.shown)}"],
        )
    pooled = judged.pooled
    if judged.calibration is None or pooled.reliability is None or pooled.net_benefit is None:
        return Section("calibration", "Calibration and decision", missing=list(judged.notes))
    scored = focus.shown.scored[judged.split]
    text = [
        "Training for a ranking makes scores that rank; they are no probabilities. Platt scaling, a logistic curve "
        f"fitted on {judged.chosen_on} data, makes probabilities of them without changing the ranking."
    ]
    figures = [*_calibration(scored, key, judged), _decision(focus, key, pooled.net_benefit, scored)]
    same = ["calibration was fitted on the same data that it is shown on"] if judged.chosen_on == judged.split else []
    return Section("calibration", "Calibration and decision", text, figures=figures, missing=same)


def _calibration(scored: Scored, key: Key, judged: Judgement) -> list[Figure]:
    assert judged.calibration is not None
    assert judged.pooled.reliability is not None
    before, after = expit(scored.scores), judged.calibration(scored.scores)
    found = reliability(before, scored.labels, level=judged.level)
    kind = judged.calibration.to_json()["kind"].capitalize()
    bins = {
        Key("sigmoid of the score", _others(key)[0], "before"): found,
        Key(f"{kind} scaling", key.style, "after"): judged.pooled.reliability,
    }
    caption = (
        f"Ten bins of equal counts, with 95 % intervals; the closer to the dotted line, the better. Brier score "
        f"{brier(before, scored.labels):.3f} before, {judged.pooled.brier:.3f} after (less is better; "
        f"calibration error {found.error:.3f} and {judged.pooled.reliability.error:.3f})."
    )
    counts = f"{len(scored):,} examples of {judged.split} data by calibrated probability."
    return [
        Figure("Calibration", pictures.reliability(bins), caption),
        Figure("How many have which probability", pictures.histogram(after, scored.labels), counts),
    ]


def _others(key: Key) -> list[int]:
    """Styles for what the run is compared with."""
    return [style for style in (5, 4, 3) if style != key.style][:2]


def _decision(focus: Group, key: Key, benefit: NetBenefit, scored: Scored) -> Figure:
    useful = benefit.model > np.maximum(benefit.treat_all, 0.0) + 1e-12
    prevalence = float(scored.labels.mean())
    last = float(benefit.thresholds[np.flatnonzero(useful)[-1]]) if useful.any() else prevalence
    shown_ = benefit.thresholds <= max(min(ENOUGH * last, 1.0), 2 * prevalence)
    everybody, nobody = _others(key)
    series = {
        key._replace(name=f"act on {shown(focus.label, 40)}", letter=key.letter or "A"): benefit.model[shown_],
        Key("act on everybody", everybody, "all"): benefit.treat_all[shown_],
        Key("act on nobody", nobody, "none"): np.zeros(int(shown_.sum())),
    }
    caption = (
        "Net benefit an example: true positives less false positives, weighed by the odds of the probability from "
        "which on one would act (Vickers and Elkin, 2006). The model is worth using where its line is the highest."
    )
    return Figure("Decision curve", pictures.decision(benefit.thresholds[shown_], series), caption)
