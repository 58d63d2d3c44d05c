"""From a score to a probability and a class: calibration and threshold, both chosen on validation scores.

Of several labels each has its own, if it has enough validation data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedxl.errors import UserError, require, unknown
from fedxl.evaluation import calibration as calibrations
from fedxl.evaluation.binned import Curves, together
from fedxl.evaluation.calibration import CALIBRATIONS, Calibration
from fedxl.evaluation.label_counts import LabelCurves, as_scored
from fedxl.evaluation.operating import OperatingPoint, at_sensitivity, at_specificity
from fedxl.evaluation.scored import Floats, Ints, LabelScores, Scored

SPECIFICITY = 0.9  # of the operating point, if none is asked for
# Validation examples of each class that a label needs. Of one label a user sees how many there are; nobody looks at
# each of many, and with fewer than these a threshold hangs on single examples.
FEWEST = 5
UNKNOWN = -1  # the class of a label that has no decision


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
        """The inverse of `to_json`. Raises UserError for anything else."""
        known = isinstance(content, dict) and {"calibration", "threshold", "rule"} <= content.keys()
        require(known, "a decision must have calibration, threshold and rule")
        threshold, rule, measured = content["threshold"], content["rule"], content.get("measured", {})
        number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        require(number and abs(threshold) < 1e300, "the threshold of a decision must be a finite number")
        require(isinstance(rule, str) and len(rule) < 100, "the rule of a decision must be a short text")
        require(isinstance(measured, dict), "what a decision reaches must be a table")
        return cls(calibrations.from_json(content["calibration"]), float(threshold), rule, measured)


@dataclass(frozen=True, eq=False)
class LabelDecisions:
    """The decision of each label, or why it has none. At least one label has one."""

    labels: Mapping[str, Decision | str]  # in the order of the scores' columns

    @property
    def decided(self) -> dict[str, Decision]:
        return {name: found for name, found in self.labels.items() if isinstance(found, Decision)}

    @property
    def undecided(self) -> dict[str, str]:
        """Why labels have no probability and no class."""
        return {name: found for name, found in self.labels.items() if isinstance(found, str)}

    def probabilities(self, scores: Floats) -> Floats:
        """[n, L], NaN for labels without a decision."""
        return np.asarray(self._columns(scores, math.nan, Decision.probabilities))

    def classes(self, scores: Floats) -> Ints:
        """[n, L], -1 for labels without a decision."""
        return np.asarray(self._columns(scores, UNKNOWN, Decision.classes))

    def _columns(self, scores: Floats, missing: float, convert: Callable[[Decision, Floats], Any]) -> Any:
        found = np.full(scores.shape, missing)
        for number, one in enumerate(self.labels.values()):
            if isinstance(one, Decision):
                found[:, number] = convert(one, scores[:, number])
        return found

    def to_json(self) -> dict[str, Any]:
        each = {name: found.to_json() for name, found in self.decided.items()}
        each |= {name: {"undecided": why} for name, why in self.undecided.items()}
        return {"labels": {name: each[name] for name in self.labels}}

    @classmethod
    def from_json(cls, content: Any, names: Sequence[str]) -> LabelDecisions:
        """The inverse of `to_json`, of labels with these names. Raises UserError for anything else."""
        found = content.get("labels") if isinstance(content, dict) else None
        right = isinstance(found, dict) and found.keys() == set(names)
        require(right, f"the decision of several labels must have one for each of {', '.join(names)}")
        assert isinstance(found, dict)
        each: dict[str, Decision | str] = {}
        for name in names:
            why = found[name].get("undecided") if isinstance(found[name], dict) else None
            require(why is None or isinstance(why, str), f"why the label {name} has no decision must be a text")
            each[name] = Decision.from_json(found[name]) if why is None else why
        return cls(each)


Meaning = Decision | LabelDecisions  # of one label, of several


def meaning_from_json(content: Any, names: Sequence[str]) -> Meaning:
    """A decision as an exported model has it. names: of several labels; empty: of one."""
    return LabelDecisions.from_json(content, names) if names else Decision.from_json(content)


def deciding(scored: Mapping[str, Scored], curves: Mapping[str, Curves]) -> Mapping[str, Scored]:
    """The scores to decide by: where nobody told validation scores, those that sites' counts in bins stand for."""
    counts = curves.get("validation")
    if "validation" in scored or not counts:
        return scored
    return {**scored, "validation": together(counts)}


def deciding_labels(scored: Mapping[str, LabelScores], counts: Mapping[str, LabelCurves]) -> dict[str, Scored]:
    """The same for each of several labels."""
    held = scored.get("validation")
    return as_scored(counts.get("validation", {})) if held is None else held.by_label()


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


def why_label_undecided(found: Scored | None) -> str:
    """Why the validation scores of one of several labels cannot say what a score means; empty if they can."""
    if found is None or not len(found):
        return "it is known of no validation example"
    if not np.isfinite(found.scores).all():
        return "its validation scores are not finite"
    positives = int(found.labels.sum())
    for name, count in (("positive", positives), ("negative", len(found) - positives)):
        if count < FEWEST:
            return f"{count} of its {len(found):,} validation examples are {name}, and {FEWEST} are the fewest"
    return ""


def decide_labels(names: Sequence[str], found: Mapping[str, Scored], wish: Wish) -> tuple[LabelDecisions | None, str]:
    """Calibration and threshold for each label; some may lack scores. None, and why, if no label can have them."""
    if not found:
        return None, "the run kept no validation scores"
    decisions = LabelDecisions(
        {name: why_label_undecided(found.get(name)) or decide({"validation": found[name]}, wish) for name in names}
    )
    return (decisions, "") if decisions.decided else (None, f"no label has enough: {reasons(decisions.undecided)}")


def reasons(undecided: Mapping[str, str]) -> str:
    """Which labels have no decision, and why, for one line."""
    return "; ".join(f"{name}: {why}" for name, why in undecided.items())
