"""Calibration and the decision curve of the run in focus: what its scores are worth as probabilities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from fedxl.evaluation.calibration import brier, reliability
from fedxl.evaluation.judgement import Judgement
from fedxl.evaluation.operating import NetBenefit
from fedxl.evaluation.scored import Scored
from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.groups import Group
from fedxl.reporting.page import Figure, Section, shown
from fedxl.reporting.sections.comparison import why_no_scores

Floats = npt.NDArray[np.float64]
TITLE = "Calibration and decision"
ENOUGH = 1.6  # threshold probabilities are drawn up to this multiple of where the model is of no more use


def section(focus: Group, key: Key, judged: Judgement | None) -> Section:
    if judged is None:
        return Section("calibration", TITLE, missing=[f"{focus.letter} has none: {why_no_scores(focus.shown)}"])
    pooled = judged.pooled
    if judged.calibration is None or pooled.reliability is None or pooled.net_benefit is None:
        return Section("calibration", TITLE, missing=list(judged.notes))
    scored = focus.shown.scored[judged.split]
    text = [
        "Training for a ranking makes scores that rank; they are no probabilities. Platt scaling, a logistic curve "
        f"fitted on {judged.chosen_on} data, makes probabilities of them without changing the ranking."
    ]
    figures = [*_calibration(scored, key, judged), _decision(focus, key, pooled.net_benefit, scored)]
    same = ["calibration was fitted on the same data that it is shown on"] if judged.chosen_on == judged.split else []
    return Section("calibration", TITLE, text, figures=figures, missing=same)


def _calibration(scored: Scored, key: Key, judged: Judgement) -> list[Figure]:
    assert judged.calibration is not None
    assert judged.pooled.reliability is not None
    before, after = expit(scored.scores), judged.calibration(scored.scores)
    found = reliability(before, scored.labels, level=judged.level)
    bins = {
        Key("sigmoid of the score", _others(key)[0], "before"): found,
        Key(
            f"{judged.calibration.to_json()['kind'].capitalize()} scaling", key.style, "after"
        ): judged.pooled.reliability,
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
