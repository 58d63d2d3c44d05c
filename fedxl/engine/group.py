"""What an executor gets: a round, and the clients that run together, with everything drawn and nothing fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.protocol import Batch, ClientUpdate, Phase, ServerState
from fedxl.models import Score
from fedxl.risks.pairing import Share
from fedxl.sampling import Indices

I = TypeVar("I", Indices, Tensor)


class BoundRound:
    """A phase's client side with the network that it trains. An executor may wrap it to run many clients at once."""

    def __init__(self, phase: Phase, score: Score) -> None:
        self.phase, self.score = phase, score
        self.start, self.step, self.finish = phase.start, partial(phase.step, score), phase.finish


class ClientRound(Protocol):
    """A bound round, of one client or of many."""

    def start(self, server: ServerState, client: Any, share: Share) -> Any: ...

    def step(self, server: ServerState, work: Any, batch: Batch) -> tuple[Any, Any]: ...

    def finish(self, server: ServerState, share: Share, work: Any, trace: Any) -> tuple[Any, Any]: ...


def local_round(
    running: ClientRound, server: ServerState, client: Any, share: Share, batches: Iterable[Batch]
) -> tuple[Any, Any]:
    """One client's round, a scan over its steps: (client, update). Traces come stacked, steps first."""
    work = running.start(server, client, share)
    traces = []
    for batch in batches:
        work, trace = running.step(server, work, batch)
        traces.append(trace)
    return running.finish(server, share, work, tree.stack(traces))


class Draws(NamedTuple, Generic[I]):
    """Every index a client needs in a round (of several clients: [C, ...]); examples are positions in the source."""

    examples: I  # [K, B1 + B2]
    codes: I  # [K, B1 + B2] how each is augmented
    rows: I  # [K, B1]
    lag1: I  # [K, B1]
    lag2: I  # [K, B2]
    fresh: I  # [K, F1 + F2]
    fresh_codes: I  # [K, F1 + F2]
    fresh_rows: I  # [K, F1]


class Feed(NamedTuple):
    """What the steps of a round read, all but the examples themselves; [C, K, ...], or cut to a client or a step."""

    draws: Draws[Tensor]
    y: Tensor  # [.., B1 + B2]
    items: object  # [.., B1 + B2] what else the pairing knows of these examples
    passive: object  # what the phase's `passive` took from the pool
    noise: object = ()  # of a private algorithm


class Group(NamedTuple):
    """The clients that run together: everything an executor needs, already on the device."""

    clients: Sequence[object]  # their private states
    largest_state: Callable[[], object]  # a state as long as the longest, for executors that need one length for all
    shares: Share  # [C]
    feed: Feed  # [C, K, ...]
    batch: Callable[[Feed], Batch]  # one step's feed, of one client or of several, to what the step reads
    seed: Callable[[int], int]  # of a client, for the layers that draw inside the model (dropout)
    comes_again: bool  # whether the next round runs the same program, so that compiling it pays

    @property
    def steps(self) -> int:
        return self.feed.y.shape[1]

    @property
    def device(self) -> torch.device:
        return self.shares.model.device

    def take(self, members: Sequence[int]) -> Group:
        """Some of the clients, in this order; one may be named more than once."""
        if list(members) == list(range(len(self.clients))):
            return self
        index = torch.tensor(members, device=self.device)
        shares, feed = tree.map(lambda leaf: leaf[index], (self.shares, self.feed))
        clients, seed = [self.clients[i] for i in members], self.seed
        return self._replace(clients=clients, shares=shares, feed=feed, seed=lambda i: seed(members[i]))


class Executor(Protocol):
    def __call__(self, running: ClientRound, server: ServerState, group: Group) -> tuple[list[object], ClientUpdate]:
        """(clients, stacked updates). Updates may lie in the executor's own memory until its next call."""
