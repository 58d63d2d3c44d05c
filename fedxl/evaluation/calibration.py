"""Calibration: from scores, which only rank, to probabilities; and how far to trust them.

A calibration is fitted on validation data and applied to others. It never changes the order of two scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import expit

from fedxl.errors import require, unknown
from fedxl.evaluation.intervals import LEVEL, as_arrays, proportion
from fedxl.evaluation.scores import Floats, Ints

MOST_STEPS = 1_000_000  # of an isotonic calibration that is read from a file


@dataclass(frozen=True)
class Platt:
    """A logistic curve: P(positive) = 1 / (1 + exp(-(slope * score + intercept))), with slope >= 0.

    J. Platt, "Probabilistic outputs for support vector machines", 1999, with his smoothed targets, (m + 1) / (m + 2)
    and 1 / (n + 2) for m positives and n negatives, so that a perfect ranking does not give a step.
    """

    slope: float
    intercept: float
    note: str = ""  # what a user should know of the fit; empty if all is well

    @classmethod
    def fit(cls, scores: Any, labels: Any) -> Platt:
        """Needs both classes."""
        values, positive = _fitting(scores, labels)
        centre, scale = float(values.mean()), float(values.std()) or 1.0
        scaled, count = (values - centre) / scale, int(positive.sum())
        targets = np.where(positive, (count + 1) / (count + 2), 1 / (len(values) - count + 2))
        slope, intercept = _logistic(scaled, targets)
        # Equal scores have no slope: what the search finds then is rounding, times a vast 1 / scale.
        if slope <= 0 or values.min() == values.max():  # the best curve that does not fall is flat
            rate = float(targets.mean())
            note = "scores do not rise with the share of positives: every probability is the share of positives"
            return cls(0.0, math.log(rate / (1 - rate)), note)
        return cls(slope / scale, intercept - slope * centre / scale)

    def __call__(self, scores: Any) -> Floats:
        return np.asarray(expit(self.slope * np.asarray(scores, np.float64) + self.intercept))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "platt", "slope": self.slope, "intercept": self.intercept, "note": self.note}


@dataclass(frozen=True)
class Isotonic:
    """A rising curve of straight pieces between steps: free of any form, and in need of more data (about 1,000)."""

    scores: tuple[float, ...]  # rising
    probabilities: tuple[float, ...]  # one per score, never falling; beyond the ends those of the ends
    note: str = ""

    @classmethod
    def fit(cls, scores: Any, labels: Any) -> Isotonic:
        """Needs both classes."""
        from sklearn.isotonic import IsotonicRegression  # takes a second, which others need not wait for

        values, positive = _fitting(scores, labels)
        found = IsotonicRegression(y_min=0.0, y_max=1.0).fit(values, positive.astype(np.float64))
        x, y = (np.asarray(each, np.float64).tolist() for each in (found.X_thresholds_, found.y_thresholds_))
        flat = "scores do not rise with the share of positives: every probability is that share"
        return cls(tuple(x), tuple(y), "" if y[-1] > y[0] else flat)

    def __call__(self, scores: Any) -> Floats:
        values = np.asarray(scores, np.float64)
        found = np.interp(values, self.scores, self.probabilities)
        return np.asarray(np.where(np.isnan(values), math.nan, found))

    def to_json(self) -> dict[str, Any]:
        lists = {"scores": list(self.scores), "probabilities": list(self.probabilities)}
        return {"kind": "isotonic", **lists, "note": self.note}


Calibration = Platt | Isotonic
CALIBRATIONS: Mapping[str, type[Platt] | type[Isotonic]] = {"platt": Platt, "isotonic": Isotonic}


def fit(kind: str, scores: Any, labels: Any) -> Calibration:
    """A calibration by its name: "platt" or "isotonic"."""
    if kind not in CALIBRATIONS:
        raise unknown("calibration", kind, CALIBRATIONS)
    return CALIBRATIONS[kind].fit(scores, labels)


def from_json(content: Mapping[str, Any]) -> Calibration:
    """What `to_json` gave, checked: it may come from a file of another party."""
    kind, note = (content.get("kind"), str(content.get("note", ""))) if isinstance(content, Mapping) else (None, "")
    require(kind in ("platt", "isotonic"), "not a calibration: its kind must be 'platt' or 'isotonic'")
    if kind == "platt":
        slope, intercept = _numbers([content.get("slope"), content.get("intercept")])
        require(slope >= 0, "not a calibration: its slope is negative, which would reverse the ranking")
        return Platt(slope, intercept, note)
    scores, probabilities = _numbers(content.get("scores")), _numbers(content.get("probabilities"))
    require(len(scores) == len(probabilities) > 0, "not a calibration: scores and probabilities differ in number")
    require(bool((np.diff(scores) > 0).all()), "not a calibration: its scores do not rise")
    rising = bool((np.diff(probabilities) >= 0).all()) and probabilities[0] >= 0 and probabilities[-1] <= 1
    require(rising, "not a calibration: its probabilities do not rise from 0 to 1")
    return Isotonic(scores, probabilities, note)


def _numbers(values: Any) -> tuple[float, ...]:
    fits = isinstance(values, list) and len(values) <= MOST_STEPS
    numbers = fits and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    # Whole numbers beyond floats are not finite.
    finite = numbers and all(abs(value) < 1e300 for value in values)
    require(finite, "not a calibration: it needs finite numbers")
    return tuple(float(value) for value in values)


def _fitting(scores: Any, labels: Any) -> tuple[Floats, npt.NDArray[np.bool_]]:
    values, classes = as_arrays(scores, labels)
    require(bool(np.isfinite(values).all()), "scores that are not finite cannot be calibrated")
    require(0 < classes.sum() < len(classes), "a calibration needs both classes")
    return values, classes > 0


def _logistic(scores: Floats, targets: Floats) -> tuple[float, float]:
    """The slope and intercept of least cross-entropy, which is convex."""
    features = np.stack([scores, np.ones_like(scores)])

    def loss(weights: Floats) -> tuple[float, Floats]:
        margins = weights @ features
        value = np.logaddexp(0.0, margins) - targets * margins
        return float(value.mean()), features @ (expit(margins) - targets) / len(targets)

    def curvature(weights: Floats) -> Floats:
        probabilities = expit(weights @ features)
        return np.asarray((features * (probabilities * (1 - probabilities))) @ features.T / len(targets))

    found = minimize(loss, np.zeros(2), jac=True, hess=curvature, method="trust-exact", options={"gtol": 1e-12})
    return float(found.x[0]), float(found.x[1])


class Reliability(NamedTuple):
    """Predicted against observed: one entry a bin that has examples."""

    predicted: Floats  # [k], the mean probability
    observed: Floats  # [k], the share of positives
    low: Floats  # [k], Wilson's interval of the share
    high: Floats  # [k]
    counts: Ints  # [k]

    @property
    def error(self) -> float:
        """The expected calibration error: the mean distance of predicted and observed over examples."""
        return float(np.average(np.abs(self.predicted - self.observed), weights=self.counts))


def reliability(probabilities: Any, labels: Any, bins: int = 10, *, level: float = LEVEL) -> Reliability:
    """Examples in bins of equal counts."""
    values, classes = _probabilities(probabilities, labels)
    require(2 <= bins <= 1000, f"bins must be 2 to 1000, not {bins}")
    edges = np.quantile(values, np.linspace(0, 1, bins + 1))
    which = np.searchsorted(edges[1:-1], values)  # ties stay together
    counts, hits = (np.bincount(which, weights, bins) for weights in (None, classes))
    sums, there = np.bincount(which, values, bins), counts > 0
    shares = [proportion(int(hit), int(of), level) for hit, of in zip(hits[there], counts[there], strict=True)]
    low, high = np.array([share.low for share in shares]), np.array([share.high for share in shares])
    return Reliability(
        sums[there] / counts[there], hits[there] / counts[there], low, high, counts[there].astype(np.int64)
    )


def brier(probabilities: Any, labels: Any) -> float:
    """The mean squared distance of probabilities and labels."""
    values, classes = _probabilities(probabilities, labels)
    return float(np.mean((values - classes) ** 2))


def _probabilities(probabilities: Any, labels: Any) -> tuple[Floats, Ints]:
    values, classes = as_arrays(probabilities, labels)
    require(len(values) > 0, "there are no examples")
    require(bool(((values >= 0) & (values <= 1)).all()), "probabilities must lie in [0, 1]; calibrate scores first")
    return values, classes
