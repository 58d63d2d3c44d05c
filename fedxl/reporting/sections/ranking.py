"""The run in focus: ROC and precision-recall curves, operating points, calibration and the decision curve."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from scipy.special import expit

from fedxl.evaluation.assess import Assessment
from fedxl.evaluation.calibration import brier, reliability
from fedxl.evaluation.operating import NetBenefit, OperatingPoint
from fedxl.evaluation.scores import Scores
from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.charts.pictures import Mark
from fedxl.reporting.page import Figure, Row, Section, Table, columns, interval_cell, shown
from fedxl.reporting.runs import Group, assessed_on, scores_on
from fedxl.reporting.sections.comparison import why_no_scores
from fedxl.reporting.study import Study

OPERATING = ("threshold", "sensitivity", "specificity", "positive predictive value", "negative predictive value")
ENOUGH = 1.6  # threshold probabilities are drawn up to this multiple of where the model is of no more use


def section(it: Study) -> Section:
    found, key = it.found, it.key._replace(letter="")
    scores: dict[Key, list[Scores]] = {}
    for group in it.drawn:
        if runs := [one for one in group.scores() if len(one.labels) == 1 and one.time is None]:
            scores[group.key] = runs
    without = [group for group in it.drawn if group.key not in scores]
    missing = [f"{group.letter} has no curves: {why_no_scores(group.shown)}" for group in without]
    if not scores:
        return Section("curves", "ROC and precision-recall", missing=missing)
    rocs = {each: pictures.roc_curve(runs) for each, runs in scores.items()}
    precisions = {each: pictures.precision_recall_curve(runs) for each, runs in scores.items()}
    mean = " Curves of several seeds are means." if any(len(runs) > 1 for runs in scores.values()) else ""
    points = found.pooled.one.points if found else {}
    counts = {group.key: group.shown.counts.get(assessed_on(group.shown), {}).get("") for group in it.drawn}
    envelopes = {each: known.envelope() for each, known in counts.items() if known is not None}
    binned = " The band holds every curve that fits the sites' counts in bins." if envelopes else ""
    numbered = [(str(n), *each) for n, each in enumerate(points.items(), 1) if is_known(each[1])]
    on_roc = [mark(key, *each) for each in numbered]
    on_precision = [mark(key, *each, precision=True) for each in numbered]
    marked = f" Numbers: operating points of {it.focus.letter}, in the table below." if points else ""
    drawn = next(group for group in it.drawn if group.key in scores)
    prevalence = float(scores[drawn.key][0].flat[1].mean())
    data = f"{assessed_on(drawn.shown).capitalize()} data."
    about_roc = f"{data} Shaded: the partial AUC's region. Dotted: chance.{mean}{binned}{marked}"
    about_precision = f"{data} Dotted: the share of positives, {prevalence:.3f}.{mean}{marked}"
    precision = pictures.precision_recall(precisions, prevalence, on_precision)
    figures = [
        Figure("ROC", pictures.roc(rocs, it.fpr, on_roc, envelopes), about_roc),
        Figure("Precision and recall", precision, about_precision),
    ]
    tables = []
    if found and points:
        told = f"Thresholds were chosen on {found.chosen_on} data and measured on {found.split} data."
        caption = f"Operating points of {it.focus.title}. {told}"
        tables.append(operating_table(caption, "chosen for", points, key))
    return Section("curves", "ROC and precision-recall", figures=figures, tables=tables, missing=missing)


def is_known(point: OperatingPoint) -> bool:
    return all(math.isfinite(share.value) for share in (point.sensitivity, point.specificity, point.ppv))


def mark(key: Key, number: str, name: str, point: OperatingPoint, precision: bool = False) -> Mark:
    """The operating point on the ROC curve, or on that of precision and recall."""
    found, ppv, other = (each.value for each in (point.sensitivity, point.ppv, point.specificity))
    if precision:
        return Mark(key, found, ppv, f"{name}: recall {found:.3f}, precision {ppv:.3f}", number)
    return Mark(key, 1 - other, found, f"{name}: sensitivity {found:.3f}, specificity {other:.3f}", number)


def operating_table(caption: str, head: str, points: Mapping[str, OperatingPoint], key: Key | None = None) -> Table:
    """Thresholds and what they come to, numbered if there is a key."""
    rows = []
    for number, (name, point) in enumerate(points.items(), 1):
        numbered = key and key._replace(letter=str(number))
        shares = map(interval_cell, point[1:])
        rows.append(Row.of(shown(name, 60), f"{point.threshold:.4g}", *shares, key=numbered))
    return Table(caption, columns(head, *OPERATING), rows)


def probabilities(it: Study) -> Section:
    name, title, found, focus = "calibration", "Calibration and decision", it.found, it.focus
    if found is None:
        return Section(name, title, missing=[f"{focus.letter} has none: {why_no_scores(focus.shown)}"])
    one, scores = found.pooled.one, scores_on(focus.shown, found.split)
    if scores is None or one.reliability is None or one.net_benefit is None:
        return Section(name, title, missing=list(found.notes))
    text = [
        "Ranking losses yield scores, not probabilities. Platt scaling, a logistic curve fitted on "
        f"{found.chosen_on} data, makes probabilities of them without changing the ranking."
    ]
    figures = [*_calibration(scores, it.key, found), _decision(focus, one.net_benefit, scores)]
    same = ["calibration was fitted on the data that it is shown on"] if found.chosen_on == found.split else []
    return Section(name, title, text, figures=figures, missing=same)


def _calibration(scores: Scores, key: Key, found: Assessment) -> list[Figure]:
    (raw, labels), (fitted,), one = scores.flat, found.calibrations.values(), found.pooled.one
    assert one.reliability is not None
    before, after = expit(raw), fitted(raw)
    plain = reliability(before, labels, level=found.level)
    bins = {
        Key("sigmoid of the score", _others(key)[0], "before"): plain,
        Key(f"{fitted.to_json()['kind'].capitalize()} scaling", key.style, "after"): one.reliability,
    }
    caption = (
        f"Ten bins of equal counts, with 95 % intervals; the closer to the dotted line, the better. Brier score "
        f"{brier(before, labels):.3f} before, {one.brier:.3f} after (less is better; "
        f"calibration error {plain.error:.3f} and {one.reliability.error:.3f})."
    )
    counts = f"{len(scores):,} examples of {found.split} data by calibrated probability."
    return [
        Figure("Calibration", pictures.reliability(bins), caption),
        Figure("Distribution of probabilities", pictures.histogram(after, labels), counts),
    ]


def _others(key: Key) -> list[int]:
    """Styles for what the run is compared with."""
    return [style for style in (5, 4, 3) if style != key.style][:2]


def _decision(focus: Group, benefit: NetBenefit, scores: Scores) -> Figure:
    key = focus.key
    useful = benefit.model > np.maximum(benefit.treat_all, 0.0) + 1e-12
    prevalence = float(scores.flat[1].mean())
    last = float(benefit.thresholds[np.flatnonzero(useful)[-1]]) if useful.any() else prevalence
    shown_ = benefit.thresholds <= max(min(ENOUGH * last, 1.0), 2 * prevalence)
    everybody, nobody = _others(key)
    series = {
        key._replace(name=f"act on {shown(focus.label, 40)}", letter=key.letter): benefit.model[shown_],
        Key("act on everybody", everybody, "all"): benefit.treat_all[shown_],
        Key("act on nobody", nobody, "none"): np.zeros(int(shown_.sum())),
    }
    caption = (
        "Net benefit per example: true positives less false positives, weighted by the odds of the probability "
        "threshold for action (Vickers and Elkin, 2006). Use the model where its line is the highest."
    )
    return Figure("Decision curve", pictures.decision(benefit.thresholds[shown_], series), caption)
