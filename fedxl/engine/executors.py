"""How a group of clients runs: one by one, as one vectorised program, or captured (`cuda/graph.py`).

An executor gets a round, and the clients that run together, with everything drawn and nothing fetched.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedxl import tree
from fedxl.algorithms.protocol import Batch, ClientUpdate, ServerState
from fedxl.errors import first_line, require
from fedxl.risks.pairing import Share
from fedxl.sampling import Indices

I = TypeVar("I", Indices, Tensor)
# In torch's errors, where its developers ask for reports: what follows is not for our users.
PLEA = re.compile(r"[,.;]?\s+(?:if [^.]*,\s*)?please (?:file|open|submit)", re.IGNORECASE)


class ClientRound(NamedTuple):
    """A phase's client side with the network that it trains, of one client or, in an executor, of many."""

    start: Callable[[ServerState, Any, Share], Any]
    step: Callable[[ServerState, Any, Batch], tuple[Any, Any]]
    finish: Callable[[ServerState, Share, Any, Any], tuple[Any, Any]]


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


# Returns (clients, stacked updates). Updates may lie in the executor's own memory until its next call.
Executor = Callable[[ClientRound, ServerState, Group], tuple[list[object], ClientUpdate]]


def loop(running: ClientRound, server: ServerState, group: Group) -> tuple[list[object], ClientUpdate]:
    """One client after another."""
    clients, updates = [], []
    for i, client in enumerate(group.clients):
        share, feed = tree.map(lambda leaf, i=i: leaf[i], (group.shares, group.feed))
        batches = (group.batch(tree.map(lambda leaf, k=k: leaf[k], feed)) for k in range(group.steps))
        with seeded(group.seed(i), group.device):
            client, update = local_round(running, server, client, share, batches)
        clients.append(client)
        updates.append(update)
    return clients, tree.stack(updates)


def vectorised(running: ClientRound, server: ServerState, group: Group) -> tuple[list[object], ClientUpdate]:
    """All clients at once under `vmap`. Ragged states are padded; indices never reach the padding."""
    steps = (group.batch(tree.map(lambda leaf, k=k: leaf[:, k], group.feed)) for k in range(group.steps))
    with seeded(group.seed(0), group.device):
        stacked = tree.stack_ragged(group.clients)
        # The server's state is shared; traces arrive stacked over steps first, then over clients.
        many = ClientRound(
            vmap(running.start, in_dims=(None, 0, 0)),
            vmap(running.step, in_dims=(None, 0, 0), randomness="different"),
            vmap(running.finish, in_dims=(None, 0, 0, 1)),
        )
        stacked, updates = local_round(many, server, stacked, group.shares, steps)
    return tree.unstack_ragged(stacked, group.clients), updates


@dataclass
class Vectorised:
    """`vectorised`; for rounds with an operation that torch cannot vectorise `loop`, or if strict a UserError."""

    say: Callable[[str], None]
    strict: bool = False
    refused: list[ClientRound] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        # Torch's advice to its own developers, on operations that vmap does one by one. Not only around a round: each
        # time that filters change, Python shows other warnings again.
        warnings.filterwarnings("ignore", "There is a performance drop")

    def __call__(self, running: ClientRound, server: ServerState, group: Group) -> tuple[list[object], ClientUpdate]:
        if running not in self.refused:
            try:
                return vectorised(running, server, group)
            except Exception as error:  # whatever a model of the user's may raise
                why = f"the model cannot be vectorised: {PLEA.split(first_line(error))[0]}"
                require(not self.strict, f"{why}; leave executor = 'vmap' out, or set executor = 'loop'")
                if not self.refused:
                    self.say(f"executor: loop for rounds that need it, because {why}")
                self.refused.append(running)
        return loop(running, server, group)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout and the like draw from a stream of their own; the caller's is left as it was."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


EXECUTORS = ("loop", "vmap", "graph")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def executor(
    name: str,
    compiled: bool = True,
    say: Callable[[str], None] = lambda line: None,
    strict: bool = False,
    **graph: Any,
) -> Executor:
    """An executor; `graph` (with options of its own) keeps the step it has captured, so each engine has its own."""
    if name in ("loop", "vmap"):
        return loop if name == "loop" else Vectorised(say, strict)
    try:
        # Not before it is needed: it builds on private modules of torch, which the next torch may not have.
        from fedxl.engine.cuda.graph import GraphExecutor
    except Exception as error:  # whatever a module raises that was written for another torch
        say(f"executor: loop, because graph does not work with torch {torch.__version__}: {first_line(error)}")
        return loop
    return GraphExecutor(compiled=compiled, say=say, **graph)


def choose(model: nn.Module, device: torch.device, clients_at_once: int) -> tuple[str, str]:
    """What `auto` runs, and why (measured in docs/benchmarks.md and docs/performance.md)."""
    if device.type == "cuda":
        return "graph", f"steps of {clients_at_once} clients, captured once and replayed on the GPU"
    if clients_at_once < 2:
        return "loop", "one client at a time"
    if any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        return "loop", "grouped convolutions gain nothing on a CPU"
    return "vmap", f"{clients_at_once} clients as one program"
