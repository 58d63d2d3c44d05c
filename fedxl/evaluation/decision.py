"""From scores to probabilities and classes: a calibration and a threshold per label, chosen on validation scores.

Scores of time to event become probabilities of no event up to a horizon, and no classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedxl.errors import UserError, require, unknown
from fedxl.evaluation import calibration as calibrations
from fedxl.evaluation.calibration import CALIBRATIONS, Calibration
from fedxl.evaluation.hazard import Baseline, HazardSums, hazard_sums
from fedxl.evaluation.operating import OperatingPoint, at_sensitivity, at_specificity
from fedxl.evaluation.scores import UNKNOWN, Floats, Ints, Scores

SPECIFICITY = 0.9  # of the operating point, if none is asked for
# Validation examples of each class that one of several labels needs. Nobody looks at each of many labels, and with
# fewer than these a threshold hangs on single examples. Of one label a user sees how many there are.
FEWEST = 5
NO_SCORES = "the run kept no validation scores"
TIMED = "scores of time to event have no classes"
MOST_STEPS = 1000  # of a baseline hazard
MOST_HORIZONS = 100


@dataclass(frozen=True)
class DecisionOptions:
    """How a user wants scores to become probabilities and classes."""

    calibration: str = "platt"  # or isotonic
    specificity: float | None = None  # the threshold reaches this on validation data
    sensitivity: float | None = None  # or this; neither: a specificity of 0.9
    horizons: Sequence[float] = ()  # of time to event; empty: quartiles of the validation data's events

    def __post_init__(self) -> None:
        horizons: Any = self.horizons.tolist() if isinstance(self.horizons, np.ndarray) else self.horizons
        require_horizons(horizons)
        object.__setattr__(self, "horizons", tuple(horizons))
        if self.calibration not in CALIBRATIONS:
            raise unknown("calibration", str(self.calibration), CALIBRATIONS)
        both = self.specificity is not None and self.sensitivity is not None
        require(not both, "choose the threshold by specificity or by sensitivity, not by both")
        for name in ("specificity", "sensitivity"):
            value = getattr(self, name)
            number = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
            told = f"{name} must lie between 0 and 1, as in 0.9, got {value!r:.40}"
            require(number and (value is None or 0 < value <= 1), told)

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

    def point(self, found: Scores) -> OperatingPoint:
        if self.sensitivity is not None:
            return at_sensitivity(*found.flat, self.sensitivity)
        return at_specificity(*found.flat, SPECIFICITY if self.specificity is None else self.specificity)


@dataclass(frozen=True, eq=False)
class Decision:
    """What the scores of one label mean: their probabilities, and from which score on the class is positive."""

    calibration: Calibration
    threshold: float  # of the raw score; at or above it the class is 1
    rule: str  # how the threshold was chosen, in words
    measured: Mapping[str, Any] = field(default_factory=dict)  # what it reaches on the validation data, as JSON

    def probabilities(self, scores: Floats) -> Floats:
        return np.asarray(self.calibration(scores), np.float64)

    def classes(self, scores: Floats) -> Ints:
        return (scores >= self.threshold).astype(np.int64)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "calibration": self.calibration.to_json(), "measured": dict(self.measured)}

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


def require_horizons(horizons: Any) -> None:
    """Raises UserError unless these are times at which a survival can be asked for."""
    each = list(horizons) if isinstance(horizons, (list, tuple)) else [horizons]
    right = all(isinstance(at, (int, float)) and not isinstance(at, bool) and 0 < at < 1e300 for at in each)
    right = right and each == sorted(set(each))
    right = right and isinstance(horizons, (list, tuple)) and len(each) <= MOST_HORIZONS
    told = f"horizons must be at most {MOST_HORIZONS} times above 0 in ascending order, as in (365, 730)"
    require(right, f"{told}, got {horizons!r:.60}")


def as_named(time: float) -> float:
    """The time with as many digits as names of metrics and columns show, as in "auc_at@730" and "survival@730"."""
    return float(f"{time:g}")


def two_digits(time: float) -> float:
    """The time rounded down to two digits: no example's own, and easier to read."""
    near = float(f"{time:.2g}")
    return near if near <= time else float(f"{near - 10 ** (math.floor(math.log10(time)) - 1):.2g}")


@dataclass(frozen=True, eq=False)
class Survival:
    """What scores of time to event mean: how likely an example has no event up to each horizon."""

    baseline: Baseline
    horizons: tuple[float, ...]

    @classmethod
    def of(cls, found: Scores, horizons: tuple[float, ...] = ()) -> Survival:
        """By Breslow's hazard of these scores. Raises UserError if a horizon lies beyond all times."""
        scores, events = found.flat
        assert found.time is not None
        grid = np.unique(found.time[events > 0])
        if len(grid) > MOST_STEPS:
            grid = np.unique(np.quantile(grid, np.linspace(0, 1, MOST_STEPS), method="lower"))
        sums = hazard_sums(scores, events, found.time, grid, math.ceil(scores.max()))  # no example's score
        last = float(found.time.max())
        late = next((at for at in horizons if at > last), None)
        require(late is None, f"no validation example was seen up to the horizon {late}; the last was at {last:g}")
        quartiles = np.quantile(found.time[events > 0], (0.25, 0.5, 0.75), method="nearest")
        chosen = [as_named(at) for at in horizons] or [float(f"{at:.2g}") for at in quartiles]  # two digits, too
        return cls(Baseline.of(sums), tuple(at for at in dict.fromkeys(chosen) if 0 < at <= last))

    @classmethod
    def of_sums(cls, sums: HazardSums, horizons: tuple[float, ...] = ()) -> Survival:
        """By sums that sites have added, on a coarse grid of public times: straight lines between these."""
        last, upto = float(sums.grid[-1]), np.cumsum(sums.events)
        late = next((at for at in horizons if at > last), None)
        require(late is None, f"the sums of sites end at {last:g}, before the horizon {late}; choose an earlier one")
        ends = np.searchsorted(upto, np.array([0.25, 0.5, 0.75]) * upto[-1]) + 1  # of the bins with the quartiles
        chosen = map(as_named, horizons or sums.grid[np.minimum(ends, len(upto) - 1)])
        return cls(Baseline.of(sums, linear=True), tuple(at for at in dict.fromkeys(chosen) if 0 < at <= last))

    def probabilities(self, scores: Floats) -> Floats:
        """[n, horizons]"""
        return self.baseline.survival(scores, self.horizons)

    def to_json(self) -> dict[str, Any]:
        """The hazard up to the horizons: its steps are the times of validation examples, which stay here."""
        hazard = self.baseline.at(self.horizons).tolist()
        return {"horizons": list(self.horizons), "hazard": hazard, "centre": self.baseline.centre}

    @classmethod
    def from_json(cls, content: Any) -> Survival:
        """The inverse of `to_json`. Raises UserError for anything else."""
        told = "a survival must have horizons, hazard and centre"
        require(isinstance(content, dict) and {"horizons", "hazard", "centre"} <= content.keys(), told)
        require_horizons(content["horizons"])
        try:
            grid, hazard = (np.array(content[name], np.float64) for name in ("horizons", "hazard"))
            centre = float(content["centre"])
        except (TypeError, ValueError, OverflowError):
            raise UserError("hazard and centre of a survival must be numbers") from None
        plain = (
            hazard.shape == grid.shape and len(grid) > 0 and bool(np.isfinite(hazard).all()) and math.isfinite(centre)
        )
        ascends = plain and hazard[0] >= 0 and bool((np.diff(hazard) >= 0).all())
        require(ascends, "a survival must have a hazard for each horizon, and they must ascend")
        return cls(Baseline(grid, hazard, centre), tuple(map(float, content["horizons"])))


@dataclass(frozen=True, eq=False)
class Decisions:
    """The decision of each label, or why it has none."""

    labels: Mapping[str, Decision | str]  # in the order of the scores' columns; one label is called ""
    survival: Survival | None = None  # of time to event, if validation scores are known

    @property
    def decided(self) -> dict[str, Decision]:
        return {name: found for name, found in self.labels.items() if isinstance(found, Decision)}

    @property
    def undecided(self) -> dict[str, str]:
        """Why labels have no probability and no class."""
        return {name: found for name, found in self.labels.items() if isinstance(found, str)}

    @property
    def why_none(self) -> str:
        """Why no label has a decision; empty if one has."""
        if self.decided:
            return ""
        if set(self.undecided.values()) == {NO_SCORES}:
            return NO_SCORES
        only = self.undecided.get("") if len(self.labels) == 1 else None
        return only or f"no label has enough: {self.reasons}"

    @property
    def reasons(self) -> str:
        """Which labels have no decision, and why, for one line."""
        return "; ".join(f"{name}: {why}" if name else why for name, why in self.undecided.items())

    def probabilities(self, scores: Floats) -> Floats:
        """[n, L], NaN for labels without a decision."""
        return np.asarray(self._columns(scores, math.nan, Decision.probabilities), np.float64)

    def classes(self, scores: Floats) -> Ints:
        """[n, L], -1 for labels without a decision."""
        return np.asarray(self._columns(scores, UNKNOWN, Decision.classes), np.int64)

    def _columns(self, scores: Floats, missing: float, convert: Callable[[Decision, Floats], Any]) -> Any:
        found = np.full(scores.shape, missing)
        for number, one in enumerate(self.labels.values()):
            if isinstance(one, Decision):
                found[:, number] = convert(one, scores[:, number])
        return found

    def with_threshold(self, threshold: float) -> Decisions:
        """With another threshold of the raw score, for one label."""
        told = "a threshold of the raw score is for one label; of several, give a specificity or a sensitivity"
        require(len(self.labels) == 1, told)
        changed: dict[str, Any] = {"threshold": threshold, "rule": f"threshold {threshold:g}", "measured": {}}
        return Decisions({name: replace(one, **changed) for name, one in self.decided.items()})

    def to_json(self) -> dict[str, Any]:
        each = {name: found.to_json() for name, found in self.decided.items()}
        each |= {name: {"undecided": why} for name, why in self.undecided.items()}
        return {name: each[name] for name in self.labels}

    @classmethod
    def from_json(cls, content: Any, names: Sequence[str], survival: Any = None) -> Decisions:
        """The inverse of `to_json`, of labels with these names. Raises UserError for anything else.

        survival: what the survival of time to event said.
        """
        right = isinstance(content, dict) and content.keys() == set(names)
        require(right, f"decisions must have one for each label: {', '.join(map(repr, names))}")
        each: dict[str, Decision | str] = {}
        for name in names:
            why = content[name].get("undecided") if isinstance(content[name], dict) else None
            require(why is None or isinstance(why, str), f"why the label '{name}' has no decision must be a text")
            each[name] = Decision.from_json(content[name]) if why is None else why
        return cls(each, None if survival is None else Survival.from_json(survival))


def decide(
    labels: Sequence[str],
    found: Mapping[str, Scores],
    options: DecisionOptions = DecisionOptions(),  # noqa: B008
    sums: HazardSums | None = None,
) -> Decisions:
    """Calibration and threshold of each label by its validation scores. Test data are for judging the result.

    found: by label; empty if no validation scores are known. sums: what sites told of them, of time to event.
    """
    if sums is not None and sums.events.any():
        return Decisions(dict.fromkeys(labels, TIMED), Survival.of_sums(sums, tuple(options.horizons)))
    if not found:
        return Decisions(dict.fromkeys(labels, NO_SCORES))
    timed = next((one for one in found.values() if one.time is not None), None)
    require(timed is not None or not options.horizons, "horizons are for time to event, and this run has none")
    if timed is not None:
        why = "" if timed.positives else "no validation example has an event"
        why = why or ("" if np.isfinite(timed.scores).all() else "its validation scores are not finite")
        return Decisions(
            dict.fromkeys(labels, why or TIMED), None if why else Survival.of(timed, tuple(options.horizons))
        )
    fewest = 1 if len(labels) == 1 else FEWEST
    each = {name: why_undecided(found.get(name), fewest) or _decide(found[name], options) for name in labels}
    return Decisions(each)


def why_undecided(found: Scores | None, fewest: int = FEWEST) -> str:
    """Why the validation scores of a label cannot say what a score means; empty if they can."""
    if found is None or not len(found):
        return "it is known of no validation example"
    if not np.isfinite(found.scores).all():
        return "its validation scores are not finite"
    counts = {"positive": found.positives, "negative": len(found) - found.positives}
    if fewest == 1 and not all(counts.values()):
        return f"its {len(found)} validation scores are of one class"
    for name, count in counts.items():
        if count < fewest:
            return f"{count} of its {len(found):,} validation examples are {name}, and {fewest} are the fewest"
    return ""


def _decide(found: Scores, options: DecisionOptions) -> Decision:
    point = options.point(found)
    if not math.isfinite(point.threshold):
        raise UserError(f"no threshold reaches {options.rule} on the {len(found)} validation scores")
    shares = {name: getattr(point, name)._asdict() for name in ("sensitivity", "specificity", "ppv", "npv")}
    measured = {"examples": len(found), "positives": found.positives, **shares}
    fitted = calibrations.fit(options.calibration, *found.flat)
    return Decision(fitted, float(point.threshold), options.rule, measured)
