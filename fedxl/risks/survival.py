"""Time to event: who has the event is compared with those who were still at risk then, wherever they are.

    cox          F(w) = mean_{i: event} log mean_{j in R_i} exp(h_j - h_i),   R_i those with T_j >= T_i
    concordance  F(w) = mean_{i: event, j: outlives i} l(h_i - h_j)

The higher a score, the earlier the event. S1 holds the events and S2 everybody. R_i is a part of S2 that differs by
event: `part_i` is how likely an example drawn from S2 belongs to it (`risk_share`). A pair that a step draws counts
1 / part_i if j belongs to R_i, else 0, so that the mean over all draws is the mean over R_i. `part_i` follows from
how many examples there are at each time (`Timetable`), and never from scores.

cox is the partial likelihood (D. Cox, JRSS B 34, 1972), per event. Tied events share their time's risk set; in
Efron's form (JASA 72, 1977) the k-th of d tied events, from 0, sees each of them with the weight 1 - k / d. With
times in bins all d see each other with the mean of these weights, so that all events of a bin look alike in the pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.risks.pairing import Column, Entry, Holder, Minibatch, Pairing, PoolWeights, Share, Sides
from fedxl.risks.scores import named, surrogate_named
from fedxl.risks.timetable import Timetable, times_of, timetable
from fedxl.risks.xrisk import XRisk, gap, identity
from fedxl.sampling import Floats, Indices, pooled

Relation = Literal["at risk", "outlives"]
Ties = Literal["efron", "breslow"]
TINY = 1e-12
PAIRS = 2**19  # looked at together
MOST_BINS = 300
MOST_BEHIND = 3.0  # how many times its running estimate the estimate of a batch may be (docs/maths.md)


class Patients(NamedTuple):
    """What the pairing reads of each example besides its label."""

    time: Tensor  # [n] the number of its time
    event: Tensor  # [n] 1 if it has the event then, 0 if it was last seen then
    tie_discount: Tensor  # [n] by how much it counts tied events less: Efron's k / d; else 0
    risk_share: Tensor  # [n] how much of S2 it meets, if it has the event
    stratum: Tensor  # [n] within which it meets others: the number of its client if strata are kept apart, else 0


class AtEvent(NamedTuple):
    """The target of an entry of S1."""

    time: Tensor
    tie_discount: Tensor
    risk_share: Tensor
    stratum: Tensor


class AtRisk(NamedTuple):
    """The target of an entry of S2."""

    time: Tensor
    event: Tensor
    stratum: Tensor


@dataclass(frozen=True)
class TimeToEvent(Pairing):
    """An event meets those who are at risk at its time, or those who outlive it."""

    timed: ClassVar[bool] = True
    has_level: ClassVar[bool] = False
    probed_targets: ClassVar[tuple[float, ...]] = ()  # losses do not depend on targets

    relation: Relation
    ties: Ties = "efron"
    stratified: bool = False
    time_bins: int = 0  # at most this many distinct times; 0: all
    table: Timetable | None = field(default=None, compare=False)  # of all clients' times; None until they are counted

    def __post_init__(self) -> None:
        right = self.time_bins == 0 or 2 <= self.time_bins <= MOST_BINS
        require(right, f"time_bins must be 2 to {MOST_BINS}, or 0 for exact times, got {self.time_bins}")

    @property
    def why_not_at_sites(self) -> str:  # type: ignore[override]
        if self.stratified:
            why = "stratified: risk sets lie within a site, so that no score need leave it"
            return f"{why}; use local_pair, which compares each site's own examples"
        public = self.time_bins > 0 and (self.table is None or self.table.public)
        return "" if public else "real sites share times in public bins: set time_bins in [risk], for example to 10"

    @property
    def public_times(self) -> Floats | None:  # type: ignore[override]
        return None if self.table is None or self.why_not_at_sites else self.table.at

    def facts(self, holders: Sequence[Holder], by_samples: bool) -> Timetable | None:
        times = [holder.times for holder in holders if holder.times is not None]
        return timetable(times, by_samples, self.time_bins) if len(times) == len(holders) > 0 else None

    def informed(self, facts: Timetable | None) -> TimeToEvent:
        return self if facts is None else replace(self, table=facts)

    # In a step.

    def entries(self, h: Tensor, of: Minibatch) -> tuple[Entry, Entry]:
        size1, items = of.rows.shape[0], of.items
        first = AtEvent(*(leaf[:size1] for leaf in (items.time, items.tie_discount, items.risk_share, items.stratum)))
        second = AtRisk(*(leaf[size1:] for leaf in (items.time, items.event, items.stratum)))
        return Entry(h[:size1], first), Entry(h[size1:], second)

    def losses(self, pair: Any, a: Entry, b: Entry) -> Tensor:
        found: Tensor = pair(a.score, b.score, b.target.event)
        return found

    def meets(self, a: Entry, b: Entry, side: Any) -> Tensor | None:
        """1 / risk_share for a pair of which the second is at risk when the first has the event, else 0."""
        first, second = a.target.time.unsqueeze(-1), b.target.time.unsqueeze(-2)
        same = (second == first).to(b.score.dtype)
        event = b.target.event.unsqueeze(-2)
        tied = 1 - (event if self.relation == "outlives" else event * a.target.tie_discount.unsqueeze(-1))
        meets = (second > first).to(b.score.dtype) + same * tied
        if self.stratified:
            meets = meets * (a.target.stratum.unsqueeze(-1) == b.target.stratum.unsqueeze(-2))
        found: Tensor = meets / a.target.risk_share.unsqueeze(-1)
        return found

    def met(self, meets: Tensor) -> Tensor:
        """As many as there are: over all draws the mean of a row of `meets` is 1."""
        return torch.full_like(meets[..., :1], meets.shape[-1])

    # In the pool.

    def group(self, entry: Entry) -> Tensor | None:
        found: Tensor = entry.target.stratum
        return found if self.stratified else None

    def pool_target(self, first: bool, like: Tensor) -> Any:
        nobody, zero = torch.full((1,), -1, dtype=torch.int64, device=like.device), like.new_zeros(1)
        return AtEvent(nobody, zero, zero + 1, nobody) if first else AtRisk(nobody, zero, nobody)

    def check_entries(self, first: Entry, second: Entry) -> str:
        a, b = first.target, second.target
        if self.table is None:
            return "there is no table of times"
        in_table = all(bool(((each >= 0) & (each < len(self.table.at))).all()) for each in (a.time, b.time))
        events = bool(((b.event == 0) | (b.event == 1)).all())
        if not (in_table and events and bool(((a.tie_discount >= 0) & (a.tie_discount < 1)).all())):
            return "it has times or events that are not in the table of times"
        if not self.stratified and bool(a.stratum.any() | b.stratum.any()):
            return "its strata must be 0, since the risk is not stratified"
        number, tie_discount = a.time.cpu().numpy(), a.tie_discount.double().cpu().numpy()
        if self.time_bins and not np.allclose(tie_discount, self._mean_discount(self.table)[number], atol=1e-4):
            return "its weights of tied events do not follow from its times"
        right = torch.from_numpy(self._risk_share(self.table, number, tie_discount))
        return (
            ""
            if torch.allclose(a.risk_share.double().cpu(), right, rtol=1e-4)
            else "its shares at risk do not follow from its times"
        )

    # What a client reads.

    def items(self, y: Tensor, groups: Column, time: Column, held: Sequence[Indices], local: bool, first: int) -> Any:
        """local, or stratified: each client has a table of its own."""
        assert time is not None
        times, event = time.cpu().double().numpy(), y.cpu().double().numpy()
        binned = self.time_bins > 0 and not local
        if binned and self.table is not None:
            times = self.table.at[self.table.number(times)]
        number, stratum = (np.zeros(len(times), np.int64) for _ in range(2))
        tie_discount, share = np.zeros(len(times)), np.ones(len(times))
        earlier: Any = 0  # events at each time, at the clients before
        for client, part in enumerate(held):
            table = self.table
            if local or self.stratified:
                table, earlier = timetable([times_of(times[part], event[part])], True), 0
            require(table is not None, "what all clients' times are must be known before any of them trains")
            assert table is not None
            number[part], stratum[part] = table.number(times[part]), (first + client) * self.stratified
            who = part[event[part] > 0]
            if binned:  # of all: others stand in where a client has no event
                tie_discount[part] = self._mean_discount(table)[number[part]]
            else:
                tie_discount[who] = self._discount(table, number[who], earlier)
            earlier = earlier + np.bincount(number[who], minlength=len(table.at))
            share[part] = self._risk_share(table, number[part], tie_discount[part])
        tensors = (torch.from_numpy(each) for each in (number, event, tie_discount, share, stratum))
        return Patients(*tensors)

    def _discount(self, table: Timetable, number: Indices, earlier: Any) -> Floats:
        """Efron's k / d of a client's events at these times; `earlier` clients' events come first."""
        if self.ties == "breslow":
            return np.zeros(len(number))
        order = np.argsort(number, kind="stable")
        rank = np.zeros(len(number))
        rank[order] = np.arange(len(number)) - np.searchsorted(number[order], number[order])
        return np.asarray((rank + np.broadcast_to(earlier, len(table.at))[number]) / table.tied[number])

    def _mean_discount(self, table: Timetable) -> Floats:
        """[m] the mean of Efron's k / d of the events at each time; 0 where each tied event sees all others."""
        tied = np.maximum(table.tied, 1)
        return np.asarray((1 - 1 / tied) / 2 if self.ties == "efron" else np.zeros(len(tied)))

    def _risk_share(self, table: Timetable, number: Indices, tie_discount: Floats) -> Floats:
        """How much of S2 an event at these times meets. Of pairs that outlive each other, all count the same."""
        if self.relation == "at risk":
            return np.asarray(np.maximum(table.since[number] - tie_discount * table.events[number], TINY))
        outlived = table.since - table.events
        mean = float(table.events @ outlived / max(float(table.events.sum()), TINY))
        return np.full(len(number), max(mean, TINY))

    def example_groups(self, items: Any) -> Indices | None:
        found: Indices = items.stratum.cpu().numpy()
        return found if self.stratified else None

    def draw_pool(
        self, rng: np.random.Generator, pool: PoolWeights, steps: int, sizes: tuple[int, int], groups: Any
    ) -> tuple[Indices, Indices]:
        """If strata are kept apart, a client reads entries of its own."""
        if not self.stratified:
            return super().draw_pool(rng, pool, steps, sizes, groups)
        found = []
        for of, size in zip(pool.groups, sizes, strict=True):
            mine = np.flatnonzero(of == groups.flat[0])
            mine = mine if len(mine) else np.zeros(1, np.int64)  # a placeholder, which meets nobody
            found.append(mine[pooled(rng, steps * size, len(mine))].reshape(steps, size))
        return found[0], found[1]

    # How much clients count.

    def spread(self, share: Share, holders: Sequence[Holder], sides: Sides, by_samples: bool, local: bool) -> Share:
        """If strata are kept apart, a client counts by its events on either side."""
        if local or not self.stratified:
            return share
        return share._replace(factors=share.factors[:, :1].expand_as(share.factors).clone())

    # The whole objective.

    def value(self, risk: Any, h: Tensor, labels: Tensor, groups: Column = None, time: Column = None) -> Tensor:
        """cox: the negative logarithm of the partial likelihood per event. NaN if nobody can be compared."""
        assert time is not None, "a risk of time to event needs the time of each example"
        number = torch.unique(time.to(h.device), return_inverse=True)[1]  # exact: bins are for what leaves a site
        if self.relation == "at risk":
            return negative_partial_likelihood(h, number, labels > 0, self.ties)
        first = labels > 0
        zero, one = torch.zeros_like(h), torch.ones_like(h)
        event = labels.to(h.dtype)
        b = Entry(h, AtRisk(number, event, number))
        total, pairs = h.new_zeros(()), h.new_zeros(())
        for rows in torch.nonzero(first).flatten().split(max(1, PAIRS // max(1, len(h)))):
            a = Entry(h[rows], AtEvent(number[rows], zero[rows], one[rows], number[rows]))
            meets = replace(self, stratified=False).meets(a, b, "all")
            assert meets is not None
            total, pairs = total + (risk.losses(a, b) * meets).sum(), pairs + meets.sum()
        return total / pairs if bool(pairs > 0) else h.new_tensor(float("nan"))


def negative_partial_likelihood(h: Tensor, time: Tensor, event: Tensor, ties: Ties) -> Tensor:
    """Per event, in time n log n. time: any numbers that are equal for equal times."""
    if not bool(event.any()):
        return h.new_tensor(float("nan"))
    order = torch.argsort(time, descending=True, stable=True)
    h, time, event = h[order], time[order], event[order]
    _, counts = torch.unique_consecutive(time, return_counts=True)
    last = counts.cumsum(0) - 1  # the last example at each time: those up to it are at risk
    place = torch.repeat_interleave(torch.arange(len(counts), device=h.device), counts)
    at_risk = torch.logcumsumexp(h, 0)[last][place]  # [n] log of the sum over the risk set of each example's time
    found = at_risk[event]
    if ties == "efron":
        events = event.long().cumsum(0)
        first = events[last] - torch.zeros_like(counts).scatter_add(0, place, event.long())  # events after this time
        rank = (events - 1 - first[place])[event]
        d = torch.zeros_like(counts).scatter_add(0, place, event.long())[place][event]
        top = at_risk[event]
        own = torch.zeros(len(counts), dtype=h.dtype, device=h.device)
        tied = own.scatter_add(0, place[event], (h[event] - top).exp())[place][event]  # their part of the risk set
        found = top + torch.log1p(-rank.to(h.dtype) / d * tied)
    return (found - h[event]).mean()


@dataclass(frozen=True, eq=False, repr=False)
class PartialLikelihood(XRisk):
    """Log-mean-exps of raw scores, whose running estimates never lie far below those of their own batches.

    Such an estimate has fallen behind scores that grew, and the next step would move them further.
    """

    def update_u(self, u: Tensor, l: Tensor, meets: Tensor | None, gamma: float) -> Tensor:
        found = super().update_u(u, l, meets, gamma)
        return torch.fmax(found, self.estimate(l, meets) - math.log(MOST_BEHIND))  # NaN: not known


@named
def cox(ties: Ties = "efron", stratified: bool = False, time_bins: int = 0, max_share: float = 10.0) -> XRisk:
    """Proportional hazards: each event against all who are at risk then, the negative log partial likelihood.

    F = mean_{i: event} log mean_{j at risk at T_i} exp(h_j - h_i), which is the partial likelihood up to a constant.
    ties: efron or breslow. stratified: risk sets lie within a site. time_bins: at most this many distinct times,
    of about as many events each, so that no exact time leaves a site; 0: exact times. max_share: an example at
    risk counts at most this many times as much as the mean of those at risk. Scores have no bounds here, and those of
    others are a round old: without a limit, a high learning rate ends with weights of 1e6. Where hazards spread so
    far that the limit binds, coefficients come out too large, by 0 to 11 % if they are 1 to 2 (docs/maths.md).
    """
    require(max_share > 1, f"max_share must be above 1, got {max_share}")
    return PartialLikelihood(
        pair=lambda a, b, y: -gap(a, b),
        outer=identity,
        slope=1.0,
        lam=1.0,
        sides=("positive", "all"),
        max_coupling=max_share,
        metric="cindex",
        pairing=TimeToEvent("at risk", ties, stratified, time_bins),
    )


@named
def concordance(
    surrogate: str = "logistic", margin: float = 1.0, stratified: bool = False, time_bins: int = 0
) -> XRisk:
    """A surrogate of Harrell's C: of two examples that can be compared, who has the event first scores higher.

    F = mean over pairs (i has the event, j outlives i) of l(h_i - h_j).
    """
    loss = surrogate_named(surrogate, margin)
    return XRisk(
        pair=lambda a, b, y: loss(gap(a, b)),
        outer=identity,
        slope=1.0,
        sides=("positive", "all"),
        metric="cindex",
        pairing=TimeToEvent("outlives", "breslow", stratified, time_bins),
    )
