"""What the server believes of an update: its form, its scores, and its size beside the others'."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.pool import Pool, Scores
from fedxl.algorithms.protocol import Assignment, Phase
from fedxl.errors import RefusedError
from fedxl.models import check_buffers
from fedxl.risks.xrisk import ScoreRange, XRisk

WEIGHTS = "change of the model"  # the size that every update has
ENOUGH = 8  # scores of a side that say where the pool lies
FARTHEST = 100.0  # times the pool's spread, from its median: how far a raw score may lie
# What a smaller spread of raw scores counts as: ten margins of the surrogates. In honest runs at high learning rates
# the farthest score was at 15 times this, and at 840 times the pool's own spread.
LEAST_SPREAD = 10.0
# The limit of u if the range of scores says nothing of losses: vectors of any length, or losses that overflow.
MOST_ESTIMATE = 1e9
QUARTILE = 3  # updates that a round needs for an upper quartile of its own
REMEMBERED = 20  # rounds

Sizes = Mapping[str, float]  # by name


def check_update(phase: Phase, server: Any, update: Any, assignment: Assignment) -> Sizes:
    """How large each part of an update is, by name, to compare with other clients'; empty if it does not count.

    Raises RefusedError for values that no honest client can send. The engine has checked before that the update has
    the form of `update_like`, and that its numbers are finite, except for NaN where `may_be_nan` allows it.
    """
    if not all(map(torch.equal, tree.leaves(update.share), tree.leaves(assignment.share))):
        # With share 0 its scores would enter the pool, and its sizes would not be compared.
        raise RefusedError("its share is not what the server assigned")
    if not 0 <= int(update.steps) <= assignment.steps:
        raise RefusedError(f"it reports {int(update.steps)} steps of {assignment.steps}")
    check_buffers(update.weights.buffers)
    sizes = _sizes_of_change(phase, server, update, assignment.steps)
    if not phase.averaged and float(sum(size for size in sizes.values())):
        raise RefusedError("it changes weights or G in the warm-up round, which only scores")
    if not float(phase.counts(update.share)) > 0:
        sizes = {}  # who does not count in the mean moves nothing, but its scores are pooled
    scores = phase.sent_scores(update)
    if scores is not None:
        sizes |= _check_sent(phase, server, scores, assignment)
    return {name: float(size) for name, size in sizes.items()} if float(update.share.model) > 0 else {}


def _sizes_of_change(phase: Phase, server: Any, update: Any, steps: int) -> dict[str, Tensor]:
    """Weights and what else moves the model have one size: how far they move it until the end of the next round.

    The norm of G by itself says little, because it depends on the last batches alone. If most sites have nothing left
    to learn from theirs, an honest G may be 100 times the median. A client with rare examples has its gradient
    multiplied; that alone is not an excess.
    """
    # Of the steps that were assigned: with those that it reports, a client would choose how much its G counts.
    params, *others = phase.position(server, update._replace(steps=torch.full_like(update.steps, steps)))
    parts, before = phase.parts(update), phase.parts(server)
    more = [name for name in parts if name not in ("weights", "G")]  # which have sizes of their own
    ahead = 0.0 if more else tree.norm(tuple(others))
    model = (_distance(params, server.weights.params) + ahead) / phase.growth(update.share).clamp(min=1)
    buffers = tree.map(lambda new, old: new.double() - old, update.weights.buffers, server.weights.buffers)
    # Counters change by whole steps. In one norm with the statistics, they would hide changes of these.
    counts = {name for name, leaf in update.weights.buffers.items() if not leaf.is_floating_point()}
    sizes = {
        WEIGHTS: model,
        "change of buffers": tree.norm({name: leaf for name, leaf in buffers.items() if name not in counts}),
        "change of counters": tree.norm({name: buffers[name] for name in counts}),
    }
    return sizes | {f"change of {name}": tree.distance(parts[name], before[name]) for name in more}


def _check_sent(phase: Phase, server: Any, scores: Scores, assignment: Assignment) -> dict[str, Tensor]:
    """The size of its part of the pool, if nothing else bounds scores. Raises RefusedError for impossible scores."""
    risk, mass = phase.risk, assignment.share.mass
    check_scores(risk, scores)
    check_distance(risk, phase.pooled_scores(server), scores, mass)
    # Squared, as the steepest surrogates are in the scores.
    bounded = risk.score_range.bounded
    return {} if bounded else {"largest score, squared,": largest_score(scores, mass).square()}


def check_server(phase: Phase, server: Any) -> None:
    """Raises RefusedError for a state from which clients could not continue."""
    pool = phase.pooled_scores(server)
    if isinstance(pool, Pool):
        never = torch.nonzero(pool.first.weight <= 0)[:, 0]  # drawn: placeholders, whose u mean nothing
        u = pool.first.u.index_fill(0, never, torch.nan)
        check_scores(phase.risk, Scores(pool.first.entry, u, pool.second.entry))


def _distance(new: dict[str, Tensor], old: dict[str, Tensor]) -> Tensor:
    """How far weights have moved. A move past the origin, which reverses the weights, counts tenfold.

    The distance alone does not distinguish weights times -3 from those of an honest client at a high learning rate,
    which may move by more than their own length. But honest weights hardly ever reverse.
    """
    turned = -tree.inner(new, old) / tree.norm(old).clamp(min=torch.finfo(torch.float64).tiny)
    return tree.distance(new, old) + 10 * turned.clamp(min=0)


def check_scores(risk: XRisk, scores: Scores) -> None:
    """Raises RefusedError for scores that the link cannot give, impossible targets, or u that no scores can have."""
    low, high = risk.score_range[:2]
    for name, entry in (("first", scores.a), ("second", scores.b)):
        if not risk.score_range.holds(entry.score):
            raise RefusedError(f"its scores ({name}) are not all within [{low:g}, {high:g}], as this risk's are")
    if why := risk.pairing.check_entries(scores.a, scores.b):
        raise RefusedError(why)
    u = scores.u
    u = u[~u.isnan().reshape(len(u), -1).any(1)]  # the others are never drawn
    if risk.linear or not len(u):
        return
    least, most = inner_range(risk)
    if not bool(((u >= least) & (u <= most)).all()):
        raise RefusedError("its inner estimates u are beyond what pairs of scores in range can give")


def check_distance(risk: XRisk, pool: Pool, sent: Scores, mass: Tensor) -> None:
    """Raises RefusedError for a raw score that lies far from the pool's. A bounded link bounds scores by itself.

    The spread is the median distance from the median, which less than half of the pool cannot move far. A client
    does not know the pool, and cannot check this. mass: [2] of the client's sides; one of 0 is not pooled.
    """
    sides = [side.entry.score[side.weight > 0] for side in pool]
    if risk.score_range.bounded or min(map(len, sides)) < ENOUGH:
        return
    known = torch.cat([scores.flatten() for scores in sides]).double()
    level = known.median()
    reach = FARTHEST * (known - level).abs().median().clamp(min=LEAST_SPREAD)
    for name, entry, counted in zip(("first", "second"), (sent.a, sent.b), mass, strict=True):
        if bool(counted > 0) and bool(((entry.score - level).abs() > reach).any()):
            raise RefusedError(
                f"its scores ({name}) lie more than {FARTHEST:g} times the pool's spread from its median"
            )


def largest_score(sent: Scores, mass: Tensor) -> Tensor:
    """The largest absolute value of the scores that are pooled."""
    each = [torch.where(m > 0, e.score.abs().max(), 0.0) for e, m in zip((sent.a, sent.b), mass, strict=True)]
    return torch.stack(each).max().double()


def inner_range(risk: XRisk) -> tuple[Tensor, Tensor]:
    """Between which numbers [*m] inner estimates of scores in range lie.

    A mean, of whatever pairs and however blended, lies between the smallest and the largest pair loss; so does a
    log-mean-exp, over lam. Both losses are looked for among pairs of probing scores, with a margin for pairs
    that have their extreme between two probes.
    """
    l = _probe_losses(risk)
    if l is None or not bool(l.isfinite().all()):
        limit = torch.full(risk.inner_shape, MOST_ESTIMATE, dtype=torch.float64)
        return -limit, limit
    l = l if risk.lam is None else l / risk.lam
    least, most = l.amin(0), l.amax(0)
    margin = 0.05 * (most - least) + 1e-3
    low = least - margin
    if risk.lam is None:
        # The mean of losses that are never negative is not either, and f may have its pole just below 0.
        low = torch.where(least >= 0, low.clamp(min=0), low)
    return low, most + margin


def _probe_losses(risk: XRisk) -> Tensor | None:
    """The losses [pairs, *m] of probing scores, with either label; None if they would say nothing."""
    targets = torch.tensor(risk.pairing.probed_targets, dtype=torch.float64)
    probes = probe_scores(risk.score_range, () if risk.pairing.labels else risk.score_shape)
    if probes is None or not len(targets):
        return None
    both = torch.cat([probes] * len(targets))
    return risk.pair(probes, both, targets.repeat_interleave(len(probes))).flatten(0, 1)


def probe_scores(within: ScoreRange, shape: tuple[int, ...]) -> Tensor | None:
    """Scores [n, *d] between which pair losses reach their extremes; None: not to be found by a few of them."""
    if not shape:
        return torch.linspace(within.low, within.high, 65, dtype=torch.float64)
    if not within.unit:
        return None
    vectors = math.prod(shape) // within.unit
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * vectors)  # [2^v, v]
    along = torch.zeros(within.unit, dtype=torch.float64)
    along[0] = 1
    return (signs.reshape(-1, vectors, 1) * along).reshape(-1, *shape)


@dataclass
class Influence:
    """Refuses updates that are far larger than usual, and remembers what is usual.

    The usual size is the upper quartile of the round, or the median of past rounds' upper quartiles if that is
    larger: if most sites learn little in a round, one that learns more is not hostile. Up to a quarter of the sites
    may be hostile without raising the usual size. In a round of two updates the usual size is the smaller one; a
    round of one relies on past rounds. In the first round of a run, a single update cannot be checked. Updates of
    size 0 are always accepted and do not count towards the usual size.

    Honest sizes have heavy tails. Among 29,766 updates of 97 runs (digits at 16 sites, six of one class; all
    algorithms at the learning rates of the demo, all risks; 1 to 64 local steps, cohorts of 1 to 16, either
    weighting, rare positives, strong shifts) the largest was 13.7 times the usual size, below the default limit of
    20. A hostile site can still move the model as much as a few honest ones: the check does not see what stays
    below the limit.
    """

    limit: float  # times the usual size; 0: no limit
    usual: dict[str, list[float]] = field(default_factory=dict)  # by name: quartiles of past rounds, oldest first

    def excesses(self, updates: Mapping[int, Sizes]) -> dict[int, str]:
        """The updates that are too large, and why."""
        usual = {name: self._usual(name, updates.values()) for name in _names(updates.values())}
        found: dict[int, str] = {}
        for row, sizes in updates.items():
            for name, size in sizes.items():
                if self.limit and usual[name] and size > self.limit * usual[name]:
                    times = f"{size / usual[name]:.3g} times as large as usual"
                    found[row] = f"its {name} is {times}; the limit is {self.limit:g} times"
        return found

    def remember(self, updates: Iterable[Sizes]) -> None:
        """Add a round's accepted updates to what is usual."""
        accepted = list(updates)
        for name in _names(accepted):
            if present := _present(name, accepted):
                self.usual[name] = [*self.usual.get(name, []), _upper_quartile(present)][-REMEMBERED:]

    def as_tensors(self) -> dict[str, Tensor]:
        """What is usual, for a checkpoint."""
        return {name: torch.tensor(each, dtype=torch.float64) for name, each in self.usual.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `as_tensors`."""
        self.usual = {name: leaf.tolist() for name, leaf in tensors.items()}

    def _usual(self, name: str, updates: Iterable[Sizes]) -> float:
        """The usual size; 0: unknown."""
        present = _present(name, updates)
        past = median(self.usual[name]) if name in self.usual else 0.0
        if len(present) >= QUARTILE:
            return max(past, _upper_quartile(present))
        return max(past, min(present)) if len(present) > 1 else past


def _names(updates: Iterable[Sizes]) -> set[str]:
    return {name for sizes in updates for name in sizes}


def _present(name: str, updates: Iterable[Sizes]) -> list[float]:
    return [sizes[name] for sizes in updates if sizes.get(name, 0.0) > 0]


def _upper_quartile(sizes: Sequence[float]) -> float:
    """The size below which three quarters of the others lie."""
    return sorted(sizes)[3 * (len(sizes) - 1) // 4]
