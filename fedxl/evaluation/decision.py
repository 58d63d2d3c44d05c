"""From a score to a probability and a class: calibration and threshold, both chosen on validation scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedxl.errors import UserError, require, unknown
from fedxl.evaluation import calibration as calibrations
from fedxl.evaluation.binned import Curves, together
from fedxl.evaluation.calibration import CALIBRATIONS, Calibration
from fedxl.evaluation.operating import OperatingPoint, at_sensitivity, at_specificity
from fedxl.evaluation.scored import Floats, Ints, Scored

SPECIFICITY = 0.9  # of the operating point, if none is asked for


@dataclass(frozen=True)
class Wish:
    """How a user wants scores to become probabilities and classes."""

    calibration: str = "platt"  # or isotonic
    specificity: float | None = None  # the threshold reaches this on validation data
    sensitivity: float | None = None  # or this; neither: a specificity of 0.9

    def __post_init__(self) -> None:
        if self.calibration not in CALIBRATIONS:
            raise unknown("calibration", self.calibration, CALIBRATIONS)
        both = self.specificity is not None and self.sensitivity is not None
        require(not both, "choose the threshold by specificity or by sensitivity, not by both")
        for name in ("specificity", "sensitivity"):
            value = getattr(self, name)
            require(value is None or 0 < value <= 1, f"{name} must lie between 0 and 1, as in 0.9, got {value}")

    @property
    def asks(self) -> bool:
        """Whether a threshold was asked for."""
        return self.specificity is not None or self.sensitivity is not None

    @property
    def rule(self) -> str:
        """What the threshold reaches, in words."""
        if self.sensitivity is not None:
            return f"sensitivity {self.sensitivity:g}"
        return f"specificity {SPECIFICITY if self.specificity is None else self.specificity:g}"

    def point(self, found: Scored) -> OperatingPoint:
        if self.sensitivity is not None:
            return at_sensitivity(found.scores, found.labels, self.sensitivity)
        specificity = SPECIFICITY if self.specificity is None else self.specificity
        return at_specificity(found.scores, found.labels, specificity)


@dataclass(frozen=True, eq=False)
class Decision:
    """What a model's scores mean: their probabilities, and from which score on the class is positive."""

    calibration: Calibration
    threshold: float  # of the raw score; at or above it the class is 1
    rule: str  # how the threshold was chosen, in words
    measured: Mapping[str, Any] = field(default_factory=dict)  # what it reaches on the validation data, as JSON

    def probabilities(self, scores: Floats) -> Floats:
        return np.asarray(self.calibration(scores), np.float64)

    def classes(self, scores: Floats) -> Ints:
        return (scores >= self.threshold).astype(np.int64)

    def to_json(self) -> dict[str, Any]:
        return {
            "calibration": self.calibration.to_json(),
            "threshold": self.threshold,
            "rule": self.rule,
            "measured": dict(self.measured),
        }

    @classmethod
    def from_json(cls, content: Any) -> Decision:
        """What `to_json` gave; one line if it is something else."""
        known = isinstance(content, dict) and {"calibration", "threshold", "rule"} <= content.keys()
        require(known, "a decision must have calibration, threshold and rule")
        threshold, rule, measured = content["threshold"], content["rule"], content.get("measured", {})
        number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        require(number and abs(threshold) < 1e300, "the threshold of a decision must be a finite number")
        require(isinstance(rule, str) and len(rule) < 100, "the rule of a decision must be a short text")
        require(isinstance(measured, dict), "what a decision reaches must be a table")
        return cls(calibrations.from_json(content["calibration"]), float(threshold), rule, measured)


def deciding(scored: Mapping[str, Scored], curves: Mapping[str, Curves]) -> Mapping[str, Scored]:
    """The scores to decide by: where nobody told validation scores, those that sites' counts in bins stand for."""
    counts = curves.get("validation")
    if "validation" in scored or not counts:
        return scored
    return {**scored, "validation": together(counts)}


def why_undecided(splits: Mapping[str, Scored]) -> str:
    """Why scores of these splits cannot say what a score means; empty if they can."""
    found = splits.get("validation")
    if found is None:
        return "the run kept no validation scores"
    positives = int(found.labels.sum())
    if not 0 < positives < len(found):
        return f"its {len(found)} validation scores are of one class"
    return ""


def decide(splits: Mapping[str, Scored], wish: Wish | None = None) -> Decision:
    """Calibrate, and choose the threshold, on the validation scores alone: test data are for judging the result."""
    why, wish = why_undecided(splits), wish or Wish()
    require(not why, f"cannot choose a calibration and a threshold: {why}")
    found = splits["validation"]
    point = wish.point(found)
    if not math.isfinite(point.threshold):
        raise UserError(f"no threshold reaches {wish.rule} on the {len(found)} validation scores")
    measured = {
        "examples": len(found),
        "positives": int(found.labels.sum()),
        **{name: getattr(point, name)._asdict() for name in ("sensitivity", "specificity", "ppv", "npv")},
    }
    fitted = calibrations.fit(wish.calibration, found.scores, found.labels)
    return Decision(fitted, float(point.threshold), wish.rule, measured)
