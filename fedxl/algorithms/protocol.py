"""What an algorithm is: a client's round as pure functions over named tensors, everything random already drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedxl import tree
from fedxl.errors import require
from fedxl.models import Score, Weights, check_buffers
from fedxl.risks import Side

T = TypeVar("T")
WEIGHTS = "change of weights"  # the size that every update has


class Share(NamedTuple):
    """How much one client counts; scalars, see `data.federation.shares`."""

    model: Tensor  # in the average of the models; sums to 1 over the population
    first: Tensor  # factor of its gradient from S1, 0 if it holds none
    second: Tensor  # the same for S2


class Fresh(NamedTuple):
    """Examples that are scored for the pool but not trained on: the z-hat of Algorithm 2."""

    x: Tensor  # [F1 + F2, ...]
    y: Tensor  # [F1 + F2]
    rows: Tensor  # [F1]


class Batch(NamedTuple):
    """One step's examples of S1, then of S2, and the pooled scores to pair them with."""

    x: Tensor  # [B1 + B2, ...]
    y: Tensor  # [B1 + B2] 0 or 1, as floats
    rows: Tensor  # [B1] where the examples of S1 stand in this client's u
    passive: Any  # what the algorithm's `passive` took from the pool for this step
    fresh: Fresh | tuple[()]


class Reading(NamedTuple):
    """What an algorithm reads at each step: which labels, how many, and whether fresh points besides."""

    first: Side
    second: Side
    size1: int
    size2: int
    fresh: bool = False


class Assignment(NamedTuple):
    """What a client was asked to do in a round: its update is checked against it."""

    share: Share
    steps: int
    reading: Reading


class PoolWeights(NamedTuple):
    """How likely each entry of the pool is to be drawn, S1's and S2's; no entry at all is one of weight 0."""

    first: Tensor
    second: Tensor


class ClientRound(Protocol):
    """What runs at a client; an executor may offer its own version for many clients at once."""

    def start(self, server: Any, client: Any, share: Share) -> Any: ...

    def step(self, server: Any, work: Any, batch: Batch) -> tuple[Any, Any]: ...

    def finish(self, server: Any, share: Share, work: Any, trace: Any) -> tuple[Any, Any]: ...


class RoundOf(ClientRound, Protocol):
    """One kind of round, clients and server together."""

    def pool_weights(self, server: Any) -> PoolWeights | None:
        """How to draw from the pool, or None: nothing is drawn."""

    def passive(self, server: Any, lag1: Tensor, lag2: Tensor) -> Any:
        """The pool's entries at these indices of any shape, S1's and S2's: a whole round's at once."""

    def aggregate(self, server: Any, updates: Any) -> Any: ...

    def check_update(self, server: Any, update: Any, asked: Assignment) -> dict[str, Tensor]:
        """The sizes of what one client changes, by name, which an engine compares with the other clients'.

        Raises RefusedError for an update that no client can have come to. Its tensors have the right shapes already
        and are finite, except for u.
        """

    def check_server(self, server: Any) -> None:
        """Raises RefusedError for a state that no client could work with; its tensors are finite, except for u."""


class Algorithm(RoundOf, Protocol):
    """Hyper-parameters are the fields of a frozen dataclass; state goes in and comes out.

    *Server* is the global state and the downlink message, *Client* is private to its site, *Work* lives inside a
    round, *Trace* is what a step emits and *Update* is the uplink message. Every Server has `weights` and `step`,
    every Update `weights` and `share`; the rest is each algorithm's own affair. `aggregate` gets updates stacked, a
    row a client.
    """

    @property
    def prelude(self) -> RoundOf | None:
        """What runs as round 0, or None: then training begins with round 1."""

    def reading(self, batch1: int, batch2: int) -> Reading: ...

    def init(self, weights: Weights) -> Any: ...

    def init_client(self, server: Any, num_rows: int) -> Any: ...

    def rejoin(self, server: Any, num_rows: int) -> Any:
        """The state of a client that took part before and has lost what it knew."""


def local_round(
    algorithm: ClientRound, server: Any, client: Any, share: Share, batches: Iterable[Batch]
) -> tuple[Any, Any]:
    """One client's round, a scan over its steps: (client, update). Traces come stacked, steps first."""
    work = algorithm.start(server, client, share)
    traces = []
    for batch in batches:
        work, trace = algorithm.step(server, work, batch)
        traces.append(trace)
    return algorithm.finish(server, share, work, tree.stack(traces))


@dataclass(frozen=True, kw_only=True, eq=False)
class Descent:
    """What all local methods share: a score function, a learning rate and its decay, and what becomes of buffers."""

    score: Score
    lr: float = 0.1
    milestones: tuple[int, ...] = ()  # local steps at which the rate is multiplied by `decay`
    decay: float = 0.1
    weight_decay: float = 0.0
    buffers: Literal["average", "local"] = "average"  # BatchNorm statistics: averaged, or each client's own

    def __post_init__(self) -> None:
        require(self.lr > 0, f"lr must be positive, got {self.lr}")
        require(0 < self.decay <= 1, f"decay must lie in (0, 1], got {self.decay}")
        require(self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}")
        require(
            all(step > 0 for step in self.milestones) and list(self.milestones) == sorted(set(self.milestones)),
            f"milestones must be positive and ascending, got {list(self.milestones)}",
        )

    def rate(self, step: Tensor, dtype: torch.dtype) -> Tensor | float:
        """The learning rate at a step; a plain number while there is nothing to decay."""
        if not self.milestones:
            return float(self.lr)
        rate = torch.full_like(step, self.lr, dtype=dtype)
        for milestone in self.milestones:
            rate = torch.where(step >= milestone, rate * self.decay, rate)
        return rate

    def descend(self, params: dict[str, Tensor], G: dict[str, Tensor], step: Tensor) -> dict[str, Tensor]:
        """params - rate (G + weight_decay params)."""
        if self.weight_decay:
            G = tree.map(lambda g, w: torch.add(g, w, alpha=self.weight_decay), G, params)
        rate = self.rate(step, next(iter(params.values())).dtype)
        if isinstance(rate, float):
            return tree.map(lambda w, g: torch.add(w, g, alpha=-rate), params, G)
        back = -rate
        return tree.map(lambda w, g: torch.addcmul(w, g, back), params, G)

    # What a method without pairs and pool does; those with them say otherwise.

    @property
    def prelude(self) -> RoundOf | None:
        return None

    def reading(self, batch1: int, batch2: int) -> Reading:
        return Reading("all", "none", batch1 + batch2, 0)

    def pool_weights(self, server: Any) -> PoolWeights | None:
        return None

    def passive(self, server: Any, lag1: Tensor, lag2: Tensor) -> Any:
        return ()

    def init_client(self, server: Any, num_rows: int) -> Any:
        raise NotImplementedError

    def rejoin(self, server: Any, num_rows: int) -> Any:
        return self.init_client(server, num_rows)

    def check_update(self, server: Any, update: Any, asked: Assignment) -> dict[str, Tensor]:
        check_buffers(update.weights.buffers)
        buffers = tree.map(lambda new, old: new.double() - old, update.weights.buffers, server.weights.buffers)
        # Counters change by whole steps. In one norm with statistics they would drown these.
        counts = {name for name, leaf in update.weights.buffers.items() if not leaf.is_floating_point()}
        return {
            WEIGHTS: _moved(update.weights.params, server.weights.params),
            "change of buffers": tree.norm({name: leaf for name, leaf in buffers.items() if name not in counts}),
            "change of counters": tree.norm({name: buffers[name] for name in counts}),
        }

    def check_server(self, server: Any) -> None:
        pass  # weights are whatever they are, as long as they are finite

    def own_buffers(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """What of the buffers a client keeps to itself between its rounds."""
        return buffers if self.buffers == "local" else {}


def _moved(new: dict[str, Tensor], old: dict[str, Tensor]) -> Tensor:
    """How far weights have moved; what lies beyond the origin, where they would be turned round, counts tenfold.

    The distance alone does not tell weights times -3 from those of an honest client at a high learning rate, which
    may move by more than their own length. But these hardly ever turn.
    """
    turned = -tree.inner(new, old) / tree.norm(old).clamp(min=torch.finfo(torch.float64).tiny)
    return tree.norm(tree.map(torch.sub, new, old)) + 10 * turned.clamp(min=0)


def average(stacked: T, shares: Tensor, otherwise: T) -> T:
    """The weighted mean over clients, leaf by leaf; `otherwise` where no client counts.

    Integer leaves (BatchNorm's counters) are averaged too, and rounded.
    """
    total = shares.sum()
    some = total > 0
    weights = shares / torch.where(some, total, torch.ones_like(total))

    def mean(leaf: Tensor, fallback: Tensor) -> Tensor:
        exact = leaf if leaf.is_floating_point() else leaf.double()
        averaged = torch.tensordot(weights.to(exact.dtype), exact, 1)
        averaged = averaged if leaf.is_floating_point() else averaged.round().to(leaf.dtype)
        return torch.where(some, averaged, fallback)

    return tree.map(mean, stacked, otherwise)
