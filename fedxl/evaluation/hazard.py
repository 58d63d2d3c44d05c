"""Breslow's baseline hazard, of sums over a grid of times that sites add (`HazardSums`).

Sites load this module: it needs no scipy, which takes 80 MB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedxl.censored import as_arrays
from fedxl.errors import UserError, require
from fedxl.evaluation.scores import Floats

LARGEST = 700.0  # exponent of a double


@dataclass(frozen=True, eq=False)
class HazardSums:
    """All that a baseline hazard needs of a site: two sums per time of a grid, which is the same for all sites."""

    grid: Floats  # [m], ascending
    events: Floats  # [m] events from this time on, up to the next
    at_risk: Floats  # [m] the sum of exp(score - centre) over examples at risk at this time
    centre: float = 0.0  # keeps exp within bounds; the same for all sites

    def __post_init__(self) -> None:
        _check(self.grid)
        same = self.grid.shape == self.events.shape == self.at_risk.shape
        require(same, f"a grid of {len(self.grid)} times needs as many events and sums at risk")
        finite = bool(np.isfinite([self.events, self.at_risk]).all()) and math.isfinite(self.centre)
        require(finite, "sums at risk are not finite; choose a centre near the highest score")

    def to_json(self) -> dict[str, Any]:
        columns = {"grid": self.grid, "events": self.events, "at_risk": self.at_risk}
        return {**{name: column.tolist() for name, column in columns.items()}, "centre": self.centre}

    @classmethod
    def from_json(cls, content: Any) -> HazardSums:
        """The inverse of `to_json`. Raises UserError for anything else."""
        told = "sums of a hazard must have grid, events, at_risk and centre"
        require(isinstance(content, dict) and content.keys() == {"grid", "events", "at_risk", "centre"}, told)
        try:
            grid, events, at_risk = (np.array(content[name], np.float64) for name in ("grid", "events", "at_risk"))
            centre = float(content["centre"])
        except (TypeError, ValueError, OverflowError):
            raise UserError("sums of a hazard must be numbers") from None
        require(grid.ndim == events.ndim == at_risk.ndim == 1, "sums of a hazard must be lists of numbers")
        found = cls(grid, events, at_risk, centre)
        falls = bool((found.events >= 0).all() and (np.diff(np.append(found.at_risk, 0.0)) <= 0).all())
        require(falls, "events must not be negative, and sums at risk must fall")
        return found


def _check(grid: Floats) -> Floats:
    require(len(grid) > 0 and bool((np.diff(grid) > 0).all()), "the times of a grid must ascend")
    return grid


def hazard_sums(scores: Any, events: Any, times: Any, grid: Any, centre: float = 0.0) -> HazardSums:
    """A site's part. A time counts as the latest of the grid that it reaches; none may lie before the first.

    With all distinct times of events as the grid the hazard is Breslow's, lifelines' `CoxPHFitter`.
    """
    values, happened, at = as_arrays(scores, events, times)
    require(bool(np.isfinite(values).all()), "scores that are not finite have no hazard")
    edges = _check(np.asarray(grid, np.float64))
    number = np.searchsorted(edges, at, side="right") - 1
    early = (number < 0) & (happened > 0)
    require(not early.any(), "an event lies before the first time of the grid; begin the grid earlier")
    with np.errstate(over="ignore"):
        each = np.exp(values - centre)  # `HazardSums` refuses what is too large
    at_risk = np.bincount(number + 1, each, len(edges) + 1)[::-1].cumsum()[::-1][1:]
    counts = np.bincount(number + 1, happened, len(edges) + 1)[1:].astype(np.float64)
    return HazardSums(edges, counts, at_risk, centre)


def pooled(parts: Iterable[HazardSums]) -> HazardSums:
    """The sums of several sites, added."""
    first, *others = parts
    for part in others:
        same = np.array_equal(part.grid, first.grid) and part.centre == first.centre
        require(same, "sums of sites can be added only if their grid and centre are the same")
        first = HazardSums(first.grid, first.events + part.events, first.at_risk + part.at_risk, first.centre)
    return first


@dataclass(frozen=True, eq=False)
class Baseline:
    """The cumulative hazard of a score equal to `centre`: Breslow's steps, or straight lines between coarse times."""

    grid: Floats  # [m], ascending
    hazard: Floats  # [m] cumulative, from this time on; with straight lines: at this time
    centre: float = 0.0
    linear: bool = False

    @classmethod
    def of(cls, sums: HazardSums, *, linear: bool = False) -> Baseline:
        """Events over the sum at risk, cumulated.

        linear: for a coarse grid. The events of an interval are spread over it, and the sum at risk is the mean of
        those at its two ends. What comes after the last time of the grid is not known then.
        """
        lost = (sums.events > 0) & (sums.at_risk <= 0)
        require(not lost.any(), "events have no sum at risk; choose a centre nearer to the scores")
        at_risk = (sums.at_risk + np.append(sums.at_risk[1:], 0.0)) / 2 if linear else sums.at_risk
        steps = np.divide(sums.events, at_risk, out=np.zeros_like(sums.events), where=sums.events > 0)
        hazard = np.cumsum(steps)
        return cls(sums.grid, np.append(0.0, hazard[:-1]) if linear else hazard, sums.centre, linear)

    def at(self, horizons: Any) -> Floats:
        """Cumulative hazard at horizons; with straight lines none may lie beyond the last time of the grid."""
        at = np.asarray(horizons, np.float64)
        if not self.linear:
            return np.asarray(np.append(0.0, self.hazard)[np.searchsorted(self.grid, at, side="right")])
        inside = bool((at <= self.grid[-1]).all())
        require(inside, f"a horizon lies beyond {self.grid[-1]:g}, the last time of the grid")
        return np.asarray(np.interp(at, self.grid, self.hazard))

    def survival(self, scores: Any, horizons: Sequence[float]) -> Floats:
        """Probabilities to survive each horizon, [n, horizons]: exp(-hazard exp(score - centre))."""
        apart = np.asarray(scores, np.float64)[:, None] - self.centre
        with np.errstate(divide="ignore"):
            exponent = np.log(self.at(horizons)) + apart
        return np.asarray(np.exp(-np.exp(np.minimum(exponent, LARGEST))))
