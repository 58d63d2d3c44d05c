"""What share survives: Kaplan-Meier curves by risk group, calibration at a horizon, and the baseline hazard.

Intervals of Kaplan-Meier curves are Greenwood's on the log-log scale, lifelines' `KaplanMeierFitter`:
S^exp(+-z s), s^2 = V / log(S)^2, V the sum of d / (Y (Y - d)), for d events of Y at risk. Before the first event, and
where nobody is left, V says nothing. There the ends are those of a share of 1, or 0, of as many as are at risk.

The baseline hazard is Breslow's, of sums over a grid of times that sites add (`HazardSums`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from fedxl import censored
from fedxl.errors import UserError, require
from fedxl.evaluation.calibration import Reliability
from fedxl.evaluation.intervals import LEVEL
from fedxl.evaluation.scores import Floats
from fedxl.evaluation.survival import ONE_EACH, as_arrays, probabilities

MOST_GROUPS = 100
LARGEST = 700.0  # exponent of a double


class KaplanMeier(NamedTuple):
    """The share that has had no event yet, after each distinct time."""

    times: Floats  # [m], ascending
    survival: Floats  # [m]
    low: Floats  # [m]
    high: Floats  # [m]
    at_risk: Floats  # [m], how many examples are under observation just before
    events: Floats  # [m]
    level: float = LEVEL

    def at(self, horizons: Any) -> tuple[Floats, Floats, Floats]:
        """The share and both ends after these times; NaN beyond the last time, unless nobody is left."""
        number = np.searchsorted(self.times, horizons, side="right")
        first = 1.0, _none(self.at_risk[:1], self.level)[0], 1.0
        beyond = (np.asarray(horizons) > self.times[-1]) & (self.survival[-1] > 0)
        share, low, high = (
            np.where(beyond, math.nan, np.append(start, each)[number])
            for start, each in zip(first, (self.survival, self.low, self.high), strict=True)
        )
        return share, low, high

    def numbers_at_risk(self, ticks: Any) -> Floats:
        """How many are still under observation at these times: they stand below a plot."""
        return np.asarray(np.append(self.at_risk, 0.0)[np.searchsorted(self.times, ticks)])


def kaplan_meier(events: Any, times: Any, level: float = LEVEL) -> KaplanMeier:
    """The curve of all examples; needs at least one.

    >>> found = kaplan_meier([1, 0, 1, 1], [2, 3, 4, 5])
    >>> found.survival.tolist(), found.at_risk.tolist()
    ([0.75, 0.75, 0.375, 0.0], [4.0, 3.0, 2.0, 1.0])
    """
    _, happened, at = as_arrays(times, events, times, level)
    require(len(at) > 0, "there are no examples")
    curve = censored.survival_curve(happened, at)
    share, z = curve.survival, float(ndtri((1 + level) / 2))
    with np.errstate(divide="ignore", invalid="ignore"):  # at 1 and 0, where both ends are replaced
        variance = np.cumsum(curve.events / (curve.at_risk * (curve.at_risk - curve.events)))
        reach = np.exp(z * np.sqrt(variance) / np.abs(np.log(share)))
        low, high = share**reach, share ** (1 / reach)
    none, all_gone = share == 1, share == 0
    exact = _none(curve.at_risk, level)
    low, high = np.where(none, exact, np.where(all_gone, 0.0, low)), np.where(none, 1.0, high)
    if all_gone.any():
        last = int(np.argmax(all_gone))
        high[last:] = min(1 - exact[last], high[last - 1] if last else 1.0)
    return KaplanMeier(curve.times, share, low, high, curve.at_risk, curve.events, level)


def _none(count: Floats, level: float) -> Floats:
    """The lower end of a share of which all of `count` were found (Clopper and Pearson)."""
    return np.asarray(((1 - level) / 2) ** (1 / np.maximum(count, 1)))


def risk_edges(scores: Any, groups: int = 3) -> Floats:
    """Scores that divide examples into groups of equal size. Choose them on validation data."""
    require(2 <= groups <= MOST_GROUPS, f"groups must be 2 to {MOST_GROUPS}, not {groups}")
    values = np.asarray(scores, np.float64)
    require(len(values) > 0 and bool(np.isfinite(values).all()), "groups need scores that are finite")
    return np.quantile(values, np.linspace(0, 1, groups + 1)[1:-1])


def by_risk(scores: Any, events: Any, times: Any, edges: Any, level: float = LEVEL) -> list[KaplanMeier | None]:
    """A curve per group of scores between these edges, from the lowest risk up; None for a group without examples."""
    values, happened, at = as_arrays(scores, events, times, level)
    which = np.searchsorted(np.asarray(edges, np.float64), values)  # ties stay together
    chosen = [which == group for group in range(len(edges) + 1)]
    return [kaplan_meier(happened[one], at[one], level) if one.any() else None for one in chosen]


def calibration(
    survival: Any, events: Any, times: Any, horizon: float, groups: int = 5, *, level: float = LEVEL
) -> Reliability:
    """Predicted probabilities to survive a horizon, [n], against Kaplan-Meier's, in groups of equal size.

    `predicted` is the mean prediction, `observed` the curve at the horizon, and both ends are the curve's. A group
    that nobody saw up to the horizon has none.
    """
    values, happened, at = probabilities(survival, events, times, level)
    require(values.shape == at.shape, ONE_EACH)
    which = np.searchsorted(risk_edges(values, groups), values)
    rows = []
    for group in np.unique(which):
        chosen = which == group
        found = kaplan_meier(happened[chosen], at[chosen], level).at(horizon)
        rows.append([values[chosen].mean(), *map(float, found), chosen.sum()])
    predicted, observed, low, high, counts = (
        np.array([row for row in rows if not math.isnan(row[1])]).reshape(-1, 5).T
    )
    return Reliability(predicted, observed, low, high, counts.astype(np.int64))


# Breslow's baseline hazard


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
