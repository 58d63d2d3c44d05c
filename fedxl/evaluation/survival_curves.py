"""What share survives: Kaplan-Meier curves by risk group, and calibration at a horizon.

Intervals of Kaplan-Meier curves are Greenwood's on the log-log scale, lifelines' `KaplanMeierFitter`:
S^exp(+-z s), s^2 = V / log(S)^2, V the sum of d / (Y (Y - d)), for d events of Y at risk. Before the first event, and
where nobody is left, V says nothing. There the ends are those of a share of 1, or 0, of as many as are at risk.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from fedxl import censored
from fedxl.errors import require
from fedxl.evaluation.calibration import Reliability
from fedxl.evaluation.intervals import LEVEL
from fedxl.evaluation.scores import Floats
from fedxl.evaluation.survival import ONE_EACH, as_arrays, probabilities

MOST_GROUPS = 100


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
