"""Right-censored data: an example has its event at a time (event 1), or was last seen then without one (event 0).

Scores rank: the higher, the earlier the event. Two examples can be compared if one has its event while the other is
still at risk. Of equal times an event comes before an example that was last seen then; two events at one time cannot
be compared. These are scikit-survival's and lifelines' rules, too. Scores that are equal count one half;
scikit-survival takes scores within 1e-8 as equal.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl.errors import require

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def as_arrays(scores: Any, events: Any, times: Any) -> tuple[Floats, Ints, Floats]:
    """One finite or NaN score, one event of 0 or 1 and one time from 0 on each."""
    values, happened, at = np.asarray(scores, np.float64), np.asarray(events), np.asarray(times, np.float64)
    shapes = f"of shapes {values.shape}, {happened.shape} and {at.shape}"
    same = values.ndim == 1 and happened.shape == at.shape == values.shape
    require(same, f"scores, events and times must be three lists of one length, not {shapes}")
    require(bool(np.isin(happened, (0, 1)).all()), "events must be 0 or 1")
    require(bool((np.isfinite(at) & (at >= 0)).all()), "times must be finite and from 0 on")
    return values, happened.astype(np.int64), at


class Curve(NamedTuple):
    """A product-limit curve (Kaplan and Meier): the share that is left after each distinct time."""

    times: Floats  # [m] distinct, ascending
    at_risk: Floats  # [m] how many examples are under observation just before
    events: Floats  # [m] how many leave

    @property
    def survival(self) -> Floats:
        """[m] after each time."""
        return np.asarray(np.cumprod(1 - _ratio(self.events, self.at_risk)), np.float64)

    def at(self, times: Any) -> Floats:
        """After these times: 1 before the first, and the last value beyond the last."""
        return np.asarray(np.append(1.0, self.survival)[np.searchsorted(self.times, times, side="right")])


def survival_curve(events: Any, times: Any) -> Curve:
    """The share that has had no event yet."""
    at, happened, left = _counts(events, times)
    return Curve(at, _from_here_on(happened + left), happened)


def censoring_curve(events: Any, times: Any) -> Curve:
    """G, the share that is not censored yet. Examples with an event are no longer at risk at its time."""
    at, happened, left = _counts(events, times)
    return Curve(at, _from_here_on(happened + left) - happened, left)


def inverse_weights(censoring: Curve, times: Any) -> Floats:
    """1 / G after these times; 0 where nobody is left, so that such examples do not count."""
    left = censoring.at(times)
    return _ratio(np.ones_like(left), left)


class Pairs(NamedTuple):
    """Sums over the pairs of each example. A pair counts with the weight of its event."""

    won_first: Floats  # [n] pairs that are ranked right, ties one half, in which the example has the event
    won_last: Floats  # [n] in which the other has it
    met_first: Floats  # [n] all pairs in which the example has the event
    met_last: Floats  # [n]

    @property
    def concordance(self) -> float:
        """The share of pairs that are ranked right; NaN if no two examples can be compared."""
        met = float(self.met_first.sum())
        return min(1.0, float(self.won_first.sum()) / met) if met > 0 else math.nan


def pairs(scores: Any, events: Any, times: Any, weights: Any) -> Pairs:
    """All comparable pairs, in n log n. weights: of each example's event; 0 if it has none.

    The places of two examples in time differ first in one bit. So each pair is met once: at this bit, within the
    group of those whose places agree in all higher bits. Groups keep the order of scores, and cumulative sums count.
    """
    scores, weights = np.asarray(scores, np.float64), np.asarray(weights, np.float64)
    place = _places(events, times)
    rank = np.unique(scores, return_inverse=True)[1]
    order = np.argsort(rank, kind="stable")
    first, last = np.zeros((2, len(scores)))
    for bit in reversed(range(int(place.max(initial=0)).bit_length())):
        group, late = place[order] >> (bit + 1), (place[order] >> bit) & 1
        starts, ends = _runs(group)
        tied, after = _runs(group * len(scores) + rank[order])
        weight, later = _sums(weights[order] * (1 - late)), _sums(late)
        above = weight[ends] - (weight[after] + weight[tied]) / 2
        below = (later[after] + later[tied]) / 2 - later[starts]
        last[order] += late * above
        first[order] += (1 - late) * below
        order = order[np.argsort(place[order] >> bit, kind="stable")]
    return Pairs(weights * first, last, weights * _later(place), _weight_before(place, weights))


def harrell(scores: Any, events: Any, times: Any) -> float:
    """Harrell's C: the share of comparable pairs in which the earlier event scores higher. NaN if there are none.

    scikit-survival's `concordance_index_censored`, and lifelines' `concordance_index` of the negated scores.

    >>> harrell([3.0, 2.0, 2.0, 1.0], [1, 0, 1, 1], [1.0, 2.0, 3.0, 4.0])
    1.0
    """
    return pairs(scores, events, times, event_weights(events)).concordance


def uno(scores: Any, events: Any, times: Any, tau: float = math.inf) -> float:
    """Uno's C: pairs count 1 / G^2 at their event, so that the share does not depend on how long one looked.

    Only events before `tau` count. G is the censoring distribution of these examples: scikit-survival's
    `concordance_index_ipcw` of the same data twice. An event at which nobody is left uncensored, which
    scikit-survival refuses, does not count. (H. Uno et al., Statistics in Medicine 30, 2011.)
    """
    return pairs(scores, events, times, uno_weights(events, times, tau)).concordance


def concordance_of_counts(events: Floats, left: Floats) -> tuple[float, float, float]:
    """Harrell's C of counts by time and score: as if both were equal within bins, the least it can be, and the most.

    events, left: [times, scores], ascending: how many have the event, and how many were last seen without it. Within
    a bin of time two events may have come in either order, and who was last seen may have left before an event. So
    for the least, all pairs there that are ranked wrong count, and none that is ranked right; for the most the
    reverse. Some order within the bins reaches each.
    """
    every = events + left
    later = _from_here_on(every) - every  # [times, scores] who has a later time
    least, equal, most = _pairs_above(events, later)
    at_once = _pairs_above(events, left)
    happened = events.sum(1)
    either = float((happened * (happened - 1)).sum()) / 2  # pairs of events within a bin of time
    met, met_at_once = (float((happened * each.sum(1)).sum()) for each in (later, left))
    comparable = met + met_at_once  # if times are equal within bins
    value = (equal + at_once[1]) / comparable if comparable > 0 else math.nan
    low_of, high_of = met + either + met_at_once - at_once[0], met + either + at_once[2]
    if min(low_of, high_of) <= 0:
        return value, 0.0, 1.0
    return value, least / low_of, (most + either + at_once[2]) / high_of


def _pairs_above(first: Floats, second: Floats) -> tuple[float, float, float]:
    """How many pairs within rows have a higher `first`: equal ones count 0, one half, and 1."""
    below = np.cumsum(second, 1) - second
    above, tied = float((first * below).sum()), float((first * second).sum())
    return above, above + tied / 2, above + tied


def event_weights(events: Any) -> Floats:
    """1 for each event: those of Harrell's C."""
    return (np.asarray(events) > 0).astype(np.float64)


def uno_weights(events: Any, times: Any, tau: float) -> Floats:
    """1 / G^2 for each event before tau."""
    at = np.asarray(times, np.float64)
    counted = (np.asarray(events) > 0) & (at < tau)
    return np.where(counted, inverse_weights(censoring_curve(events, times), at) ** 2, 0.0)


class Placements(NamedTuple):
    """Cases, which had their event by a horizon, beside controls, which reached it without one."""

    cases: Ints  # which examples
    controls: Ints
    weights: Floats  # [cases] 1 / G at their events
    below: Floats  # [cases] the share of controls that score lower; ties count one half
    above: Floats  # [controls] the share of cases, as they are weighted, that score higher

    @property
    def auc(self) -> float:
        """NaN if there are no cases or no controls."""
        whole = float(self.weights.sum())
        known = whole > 0 and len(self.controls) > 0
        return min(1.0, float(self.weights @ self.below) / whole) if known else math.nan


def placements(scores: Any, events: Any, times: Any, horizon: float) -> Placements:
    """Of each example, among those of the other class. Who was last seen before the horizon belongs to neither."""
    scores, at = np.asarray(scores, np.float64), np.asarray(times, np.float64)
    cases = np.flatnonzero((np.asarray(events) > 0) & (at <= horizon))
    controls = np.flatnonzero(at > horizon)
    weights = inverse_weights(censoring_curve(events, times), at[cases])
    order = np.argsort(scores[cases], kind="stable")
    high, low = scores[cases][order], np.sort(scores[controls])
    whole = np.append(0.0, np.cumsum(weights[order]))
    below = sum(np.searchsorted(low, scores[cases], side) for side in ("left", "right")) / 2
    upto = sum(whole[np.searchsorted(high, scores[controls], side)] for side in ("left", "right")) / 2
    above = _ratio(whole[-1] - upto, np.full(len(controls), whole[-1]))
    return Placements(cases, controls, weights, below / max(1, len(low)), above)


def auc_at(scores: Any, events: Any, times: Any, horizon: float) -> float:
    """How often who has the event by a horizon scores higher than who reaches it without: cumulative/dynamic AUC.

    Cases count 1 / G. scikit-survival's `cumulative_dynamic_auc` of the same data twice.
    (H. Hung, C. Chiang, Canadian Journal of Statistics 38, 2010.)
    """
    return placements(scores, events, times, horizon).auc


def _counts(events: Any, times: Any) -> tuple[Floats, Floats, Floats]:
    """The distinct times, how many have their event then, and how many are last seen then."""
    at, number = np.unique(np.asarray(times, np.float64), return_inverse=True)
    each = (np.asarray(events) > 0).astype(np.float64)
    happened, left = (np.bincount(number, one, len(at)).astype(np.float64) for one in (each, 1 - each))
    return at, happened, left


def _from_here_on(counts: Floats) -> Floats:
    return np.cumsum(counts[::-1], axis=0)[::-1]


def _ratio(above: Floats, below: Floats) -> Floats:
    """0 where nothing is below."""
    return np.divide(above, below, out=np.zeros(np.shape(below)), where=below > 0)


def _places(events: Any, times: Any) -> Ints:
    """Numbers that ascend with time; of equal times events come first, all with one number."""
    number = np.unique(np.asarray(times, np.float64), return_inverse=True)[1]
    return np.asarray(np.unique(2 * number + (np.asarray(events) <= 0), return_inverse=True)[1], np.int64)


def _later(place: Ints) -> Floats:
    """How many have a later place than each."""
    counts = np.bincount(place).astype(np.float64)
    return (_from_here_on(counts) - counts)[place]


def _weight_before(place: Ints, weights: Floats) -> Floats:
    """The weights of all with an earlier place than each."""
    sums = np.bincount(place, weights)
    return np.asarray((np.cumsum(sums) - sums)[place], np.float64)


def _runs(values: Ints) -> tuple[Ints, Ints]:
    """Where the run of equal values begins to which each belongs, and where it ends."""
    new = np.append(True, np.diff(values) != 0)
    starts, number = np.flatnonzero(new), np.cumsum(new) - 1
    return starts[number], np.append(starts[1:], len(values))[number]


def _sums(values: npt.NDArray[Any]) -> Floats:
    return np.append(0.0, np.cumsum(values))
