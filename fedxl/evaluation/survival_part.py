"""What scores of time to event say beyond an order: at horizons, and by risk group.

Horizons, probabilities, risk groups and tau are chosen on validation data, and measured on others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedxl import censored
from fedxl.evaluation import survival_curves
from fedxl.evaluation.calibration import Reliability
from fedxl.evaluation.decision import Survival, two_digits
from fedxl.evaluation.intervals import Interval
from fedxl.evaluation.scores import Floats, Scores
from fedxl.evaluation.survival import UNCENSORED, brier_interval, integrated_brier_interval
from fedxl.evaluation.survival_curves import KaplanMeier

GROUPS = 3  # of risk
STEPS = 50  # of an integral over time


@dataclass(frozen=True, eq=False)
class SurvivalPart:
    """What probabilities to survive and risk groups come to on some examples."""

    survival: Survival  # of validation scores
    brier: dict[float, Interval]  # by horizon
    integrated_brier: Interval | None  # between the first horizon and the last; None if there is only one
    calibration: dict[float, Reliability]  # by horizon
    edges: Floats  # of risk: thirds of the validation scores
    curves: tuple[KaplanMeier | None, ...]  # by risk group, the lowest first; None: nobody is in it

    @classmethod
    def of(cls, survival: Survival, held: Scores, found: Scores, level: float) -> SurvivalPart:
        """held: validation scores; found: those to measure, which must be finite."""
        (scores, events), times = found.flat, found.time
        horizons, whole, each = survival.horizons, None, survival.probabilities(scores).T
        if len(horizons) > 1:
            grid = np.linspace(horizons[0], horizons[-1], STEPS)
            over_time = survival.baseline.survival(scores, grid.tolist())
            whole = integrated_brier_interval(over_time, events, times, grid.tolist(), level)
        predicted = dict(zip(horizons, each, strict=True))
        briers = {at: brier_interval(one, events, times, at, level) for at, one in predicted.items()}
        calibrations = {
            at: survival_curves.calibration(one, events, times, at, level=level) for at, one in predicted.items()
        }
        edges = survival_curves.risk_edges(held.scores, GROUPS)
        curves = survival_curves.by_risk(scores, events, times, edges, level)
        return cls(survival, briers, whole, calibrations, edges, tuple(curves))

    def to_json(self) -> dict[str, Any]:
        """Without curves, and without the hazard, which a model's description holds once."""
        return {
            "horizons": list(self.survival.horizons),
            "brier": {f"{at:g}": found._asdict() for at, found in self.brier.items()},
            "integrated_brier": self.integrated_brier and self.integrated_brier._asdict(),
            "calibration_error": {f"{at:g}": error_of(found) for at, found in self.calibration.items()},
            "edges": [float(f"{edge:.3g}") for edge in self.edges],  # quantiles may be an example's score
        }


def error_of(found: Reliability) -> float | None:
    """The mean distance of predicted and observed survival; None if nobody was seen up to the horizon."""
    return found.error if len(found.counts) else None


def metrics_at(survival: Survival, held: Scores) -> list[str]:
    """Names of metrics that need a time: Uno's C of events before `tau`, and AUC at each horizon."""
    limit = tau(held)
    return [*([f"uno@{limit:g}"] if limit > 0 else []), *(f"auc_at@{at:g}" for at in survival.horizons)]


def tau(held: Scores) -> float:
    """The last time of validation data at which a fifth of all would still be uncensored, rounded down to two digits.

    Uno's C weighs an event by 1 / G^2, G being that share. Later events of heavily censored data have vast weights,
    and what lies beyond the last of them is not in the data (docs/results/coverage.md).
    """
    assert held.time is not None
    curve = censored.censoring_curve(held.flat[1], held.time)
    kept = curve.times[curve.survival >= UNCENSORED]
    return two_digits(float(kept[-1])) if len(kept) and kept[-1] > 0 else 0.0
