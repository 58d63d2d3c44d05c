"""The run in focus, of time to event: curves by risk group, metrics at horizons, and calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedxl.evaluation.assess import Assessment
from fedxl.evaluation.survival_curves import KaplanMeier
from fedxl.evaluation.survival_part import SurvivalPart, error_of
from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.page import Cell, Figure, Row, Section, Table, columns, figure_of, interval_cell, shown
from fedxl.reporting.runs import scores_on
from fedxl.reporting.sections.comparison import why_no_scores
from fedxl.reporting.study import Study

RISKS = {"low": ("lowest third of risk", 2), "mid": ("middle third", 0), "high": ("highest third", 1)}  # and styles
SHOWN = 0.95  # curves are drawn until so many examples have left


def middle(horizons: Sequence[float]) -> float:
    """The horizon that is looked at where there is room for one."""
    return horizons[len(horizons) // 2]


def section(it: Study) -> Section:
    name, title, found, focus = "survival", "Survival", it.found, it.focus
    scores = None if found is None else scores_on(focus.shown, found.split)
    if found is None or scores is None or scores.time is None:
        return Section(name, title, missing=[f"{focus.letter} has no curves: {why_no_scores(focus.shown)}"])
    part = found.survival
    if part is None:
        return Section(name, title, missing=list(found.notes))
    curves = {key: curve for key, curve in zip(_keys(part), part.curves, strict=True) if curve is not None}
    end = max([*part.survival.horizons, float(np.quantile(scores.time, SHOWN))])
    text = [
        f"Scores rank by risk. Probabilities of no event up to a horizon follow from Breslow's hazard of the "
        f"{found.chosen_on} data, which chose the risk groups, too. Everything is measured on {found.split} data."
    ]
    if len(focus.runs) > 1:
        text.append(f"Curves and tables are of seed {shown(focus.shown.seed, 20)}.")
    figures, missing = [_curves(curves, end, found)], []
    if part.survival.horizons:
        horizon = middle(part.survival.horizons)
        if len(part.calibration[horizon].counts):
            figures.append(_calibration(part, horizon, it.key, found))
        else:
            missing.append(f"no calibration at {horizon:g}: no {found.split} example was seen so long")
    missing += ["the hazard is that of the data that it is shown on"] if found.chosen_on == found.split else []
    missing += [
        f"no {found.split} example is in the {RISKS[key.letter][0]}" for key in _keys(part) if key not in curves
    ]
    tables = [_at_risk(curves, end, found), _at_horizons(list(curves.values()), found, part, it.focus.title)]
    return Section(name, title, text, figures=figures, tables=tables, missing=missing)


def _keys(part: SurvivalPart) -> list[Key]:
    """How many examples and events are in each group."""
    counts = [
        "" if curve is None else f"{curve.at_risk[0]:,.0f} examples, {curve.events.sum():,.0f} with an event"
        for curve in part.curves
    ]
    return [Key(count, style, letter) for (letter, (_, style)), count in zip(RISKS.items(), counts, strict=True)]


def _curves(curves: Mapping[Key, KaplanMeier], end: float, found: Assessment) -> Figure:
    caption = (
        f"Kaplan-Meier curves of {found.split} data by predicted risk, in thirds of the {found.chosen_on} data, with "
        "bands of 95 %. The further apart, the better. Drawn until 95 % of the examples have left, at evenly spaced "
        "times: no step is at the time of an example."
    )
    return Figure("Survival by predicted risk", pictures.kaplan_meier(curves, end), caption)


def _calibration(part: SurvivalPart, horizon: float, key: Key, found: Assessment) -> Figure:
    what = "share without an event"
    some = part.calibration[horizon]
    low = math.floor(10 * min(0.9, some.low.min(), some.predicted.min())) / 10
    bins = {Key(f"up to {horizon:g}", key.style): some}
    caption = (
        f"Five groups of equal size by the predicted probability of no event up to {horizon:g}, against "
        "the share that had none (Kaplan-Meier), with 95 % intervals; the closer to the dotted line, the better."
    )
    return Figure(f"Calibration at {horizon:g}", pictures.reliability(bins, what=what, low=low), caption)


def _at_risk(curves: Mapping[Key, KaplanMeier], end: float, found: Assessment) -> Table:
    """The numbers that stand below a plot of survival."""
    ticks = pictures.survival_axis(end).ticks
    rows = [
        Row([Cell(RISKS[key.letter][0]), *(Cell(f"{n:,.0f}") for n in curve.numbers_at_risk(ticks))], key)
        for key, curve in curves.items()
    ]
    caption = f"Examples of {found.split} data at risk: still under observation, without an event, by time."
    return Table(caption, columns("risk", *(f"at {tick:g}" for tick in ticks)), rows)


def _at_horizons(curves: Sequence[KaplanMeier], found: Assessment, part: SurvivalPart, title: str) -> Table:
    """AUC, Brier score and calibration error at each horizon; last the Brier score over time."""
    rows = []
    for at, brier in part.brier.items():
        events = sum(float(curve.events[curve.times <= at].sum()) for curve in curves)
        left = sum(float(curve.numbers_at_risk(at)) for curve in curves)
        counts = [Cell(f"{events:,.0f}"), Cell(f"{left:,.0f}")]
        error = Cell(figure_of(error_of(part.calibration[at])))
        auc = interval_cell(found.pooled.one.metrics[f"auc_at@{at:g}"])
        rows.append(Row([Cell(f"{at:g}"), *counts, auc, interval_cell(brier), error]))
    if part.integrated_brier is not None:
        first, last = part.survival.horizons[0], part.survival.horizons[-1]
        cells = [Cell("–"), Cell("–"), Cell("–"), interval_cell(part.integrated_brier), Cell("–")]
        rows.append(Row([Cell(f"{first:g} to {last:g}", "mean over time"), *cells]))
    caption = (
        f"{title} at horizons, {found.split} data, with 95 % intervals. AUC: how often an example with an "
        "event by then scores higher than one without. Brier score of the probability of no event: less is better. "
        "Horizons are those of the metrics asked for, else quartiles of the events' times in validation data."
    )
    heads = "events by then", "still at risk", "AUC", "Brier score", "calibration error"
    return Table(caption, columns("horizon", *heads), rows)
