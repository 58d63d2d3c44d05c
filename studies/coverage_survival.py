"""Coverage of the intervals of time to event: scores, censoring and metrics whose true values follow by quadrature.

A patient's score is h, N(0, 1). The event comes with the hazard exp(strength h), censoring with a constant hazard,
so that the wanted share is censored. The strength is the one that gives the wanted concordance. A second model's
score is h with noise. Horizons lie where half of the patients would still be uncensored, tau where a fifth would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

from fedxl.evaluation import survival, survival_curves
from fedxl.reporting.text import as_markdown
from fedxl.sampling import Floats
from studies.harness import Planned, Row, group

POINTS = 401  # of the quadrature over scores
FAR = 7.0  # standard deviations, beyond which no score lies
LIKENESS = 0.9  # correlation of two models' scores
TIMES = 10  # of the integrated Brier score
GROUPS = 4  # of a calibration


class Found(NamedTuple):
    low: float
    high: float
    truth: float


class Cohort(NamedTuple):
    """How scores, events and censoring belong together."""

    concordance: float  # without censoring
    censored: float  # the share

    @property
    def horizon(self) -> float:
        return math.log(2) / self.censoring

    @property
    def tau(self) -> float:
        return math.log(5) / self.censoring

    @property
    def strength(self) -> float:
        return strength(self.concordance)

    @property
    def censoring(self) -> float:
        """The hazard of being censored."""
        return censoring(self.concordance, self.censored)


def scores() -> tuple[Floats, Floats]:
    """Scores and their probabilities."""
    points = np.linspace(-FAR, FAR, POINTS)
    weights = np.exp(-(points**2) / 2)
    return points, weights / weights.sum()


def true_concordance(strength: float, censoring: float, tau: float = math.inf, likeness: float = 1.0) -> float:
    """The share of pairs ranked right among those whose first event comes before tau, and before either is censored.

    likeness: the correlation of the ranking scores and h.
    """
    h, weights = scores()
    hazard = np.exp(strength * h)
    whole = hazard[:, None] + hazard + 2 * censoring
    met = weights[:, None] * weights * hazard[:, None] / whole * -np.expm1(-whole * tau)  # the first has the event
    apart = h[:, None] - h
    noise = math.sqrt(2 * (1 - likeness**2))
    right = ndtr(likeness * apart / noise) if noise else (1 + np.sign(apart)) / 2
    return float((met * right).sum() / met.sum())


@cache
def strength(concordance: float) -> float:
    return float(brentq(lambda found: true_concordance(found, 0.0) - concordance, 0.0, 10.0))


@cache
def censoring(concordance: float, share: float) -> float:
    (h, weights), by = scores(), strength(concordance)
    return float(brentq(lambda found: weights @ (found / (found + np.exp(by * h))) - share, 1e-6, 1e6))


def surviving(cohort: Cohort, h: Floats, horizon: float | Floats) -> Floats:
    return np.asarray(np.exp(-np.exp(cohort.strength * h) * horizon))


class Patients(NamedTuple):
    scores: Floats
    events: Floats
    times: Floats


def draw(cohort: Cohort, count: int, rng: np.random.Generator) -> Patients:
    h = rng.normal(size=count)
    event = rng.exponential(size=count) / np.exp(cohort.strength * h)
    last = rng.exponential(size=count) / cohort.censoring
    return Patients(h, (event <= last).astype(np.float64), np.minimum(event, last))


def _harrell(cohort: Cohort, found: Patients, rng: np.random.Generator) -> Found:
    one = survival.interval("cindex", *found)
    return Found(one.low, one.high, _true_harrell(cohort))


@cache
def _true_harrell(cohort: Cohort, likeness: float = 1.0) -> float:
    return true_concordance(cohort.strength, cohort.censoring, likeness=likeness)


@cache
def _true_uno(cohort: Cohort, tau: float, likeness: float = 1.0) -> float:
    return true_concordance(cohort.strength, 0.0, tau, likeness)


def _uno(cohort: Cohort, found: Patients, rng: np.random.Generator) -> Found:
    one = survival.interval("uno@1e9", *found)  # without a time it has no interval where many are censored
    return Found(one.low, one.high, _true_uno(cohort, math.inf))


def _uno_to(cohort: Cohort, found: Patients, rng: np.random.Generator) -> Found:
    one = survival.interval(f"uno@{cohort.tau!r}", *found)
    return Found(one.low, one.high, _true_uno(cohort, cohort.tau))


@cache
def _true_auc(cohort: Cohort) -> float:
    h, weights = scores()
    left = weights * surviving(cohort, h, cohort.horizon)
    gone = weights - left
    below = np.cumsum(left) - left / 2
    return float(gone @ below / (gone.sum() * left.sum()))


def _auc(cohort: Cohort, found: Patients, rng: np.random.Generator) -> Found:
    one = survival.interval(f"auc_at@{cohort.horizon!r}", *found)
    return Found(one.low, one.high, _true_auc(cohort))


def _true_brier(cohort: Cohort, horizon: float) -> float:
    h, weights = scores()
    left = surviving(cohort, h, horizon)
    return float(weights @ (left * (1 - left)))


def _brier(cohort: Cohort, found: Patients, rng: np.random.Generator) -> Found:
    predicted = surviving(cohort, found.scores, cohort.horizon)
    one = survival.brier_interval(predicted, found.events, found.times, cohort.horizon)
    return Found(one.low, one.high, _true_brier(cohort, cohort.horizon))


def _integrated(cohort: Cohort, found: Patients, rng: np.random.Generator) -> Found:
    grid = cohort.horizon * np.arange(1, TIMES + 1) / TIMES
    predicted = surviving(cohort, found.scores[:, None], grid)
    one = survival.integrated_brier_interval(predicted, found.events, found.times, grid.tolist())
    each = [_true_brier(cohort, float(at)) for at in grid]
    return Found(one.low, one.high, float(np.trapezoid(each, grid) / (grid[-1] - grid[0])))


def _curve(cohort: Cohort, found: Patients, rng: np.random.Generator) -> Found:
    _, low, high = survival_curves.kaplan_meier(found.events, found.times).at(cohort.horizon)
    h, weights = scores()
    return Found(float(low), float(high), float(weights @ surviving(cohort, h, cohort.horizon)))


def _calibration(cohort: Cohort, found: Patients, rng: np.random.Generator) -> Found:
    """Of one group, each with the same chance."""
    predicted = surviving(cohort, found.scores, cohort.horizon)
    rows = survival_curves.calibration(predicted, found.events, found.times, cohort.horizon, GROUPS)
    if not len(rows.counts):
        return Found(math.nan, math.nan, 0.0)
    one = int(rng.integers(len(rows.counts)))
    return Found(float(rows.low[one]), float(rows.high[one]), float(rows.predicted[one]))


def _second(found: Patients, rng: np.random.Generator) -> Floats:
    return LIKENESS * found.scores + math.sqrt(1 - LIKENESS**2) * rng.normal(size=len(found.scores))


def _harrell_difference(cohort: Cohort, found: Patients, rng: np.random.Generator) -> Found:
    gap = survival.difference("cindex", found.scores, _second(found, rng), found.events, found.times)
    return Found(gap.low, gap.high, _true_harrell(cohort) - _true_harrell(cohort, LIKENESS))


def _uno_difference(cohort: Cohort, found: Patients, rng: np.random.Generator) -> Found:
    tau = cohort.tau
    gap = survival.difference(f"uno@{tau!r}", found.scores, _second(found, rng), found.events, found.times)
    return Found(gap.low, gap.high, _true_uno(cohort, tau) - _true_uno(cohort, tau, LIKENESS))


KINDS: dict[str, Callable[[Cohort, Patients, np.random.Generator], Found]] = {
    "harrell": _harrell,
    "uno": _uno_to,
    "uno of all events": _uno,
    "auc at a horizon": _auc,
    "brier": _brier,
    "integrated brier": _integrated,
    "kaplan-meier": _curve,
    "calibration": _calibration,
    "harrell difference": _harrell_difference,
    "uno difference": _uno_difference,
}
SHOWN = {
    "harrell": "Harrell's C",
    "uno": "Uno's C of events before tau",
    "uno of all events": "Uno's C of all events",
    "auc at a horizon": "AUC at a horizon",
    "brier": "Brier score at a horizon, of true probabilities",
    "integrated brier": "integrated Brier score up to a horizon, of true probabilities",
    "kaplan-meier": "Kaplan-Meier at a horizon, Greenwood, log-log",
    "calibration": f"Kaplan-Meier at a horizon of one of {GROUPS} groups by risk, against true probabilities",
    "harrell difference": "difference of Harrell's C, both intervals joined",
    "uno difference": "difference of Uno's C of events before tau, both intervals joined",
}
PATIENTS = (100, 400, 1600)
CENSORED = (0.3, 0.8)
CONCORDANCE = (0.6, 0.7, 0.8, 0.9)


def cases(sets: int, seed: int) -> list[Planned]:
    """Every cell of the tables."""
    common = {"sets": sets, "seed": seed}
    return [
        Planned({"kind": kind, "patients": count, "censored": share, "concordance": area, **common})
        for kind in KINDS
        for share in CENSORED
        for count in PATIENTS
        for area in CONCORDANCE
    ]


def intervals(planned: Planned) -> Iterator[Found]:
    """Those of the sets of a cell; sets are the same for all kinds."""
    case = planned.case
    cohort, count = Cohort(case["concordance"], case["censored"]), int(case["patients"])
    seeds = [int(case["seed"]), count, round(1000 * cohort.concordance), round(1000 * cohort.censored)]
    rng = np.random.default_rng(seeds)
    for _ in range(int(case["sets"])):
        yield KINDS[case["kind"]](cohort, draw(cohort, count, rng), rng)


def tables(rows: Sequence[Row], cell: Callable[[Row], str]) -> list[str]:
    """One table per kind."""
    parts = []
    for kind, own in group(rows, "kind").items():
        lines = group(own, "patients", "censored")
        body = [[f"{count}, {100 * share:g} %", *map(cell, found)] for (count, share), found in lines.items()]
        areas = [f"{area:g}" for area in group(own, "concordance")]
        table = as_markdown(body, ["patients, censored", f"C {areas[0]}", *areas[1:]])
        parts += [f"**{SHOWN[kind]}**", table.strip()]
    return parts
