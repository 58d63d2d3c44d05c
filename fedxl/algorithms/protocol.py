"""What an algorithm is: a client's round as pure functions over named tensors, everything random already drawn."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from fedxl import tree
from fedxl.models import Score, Weights
from fedxl.risks import Side, XRisk


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
    passive: Any  # what the phase's `passive` took from the pool for this step
    fresh: Fresh | tuple[()]


class NoTrace(NamedTuple):
    """The trace of a step that emits nothing."""


class Reading(NamedTuple):
    """What an algorithm reads at each step: which labels, how many, and whether fresh points besides."""

    first: Side
    second: Side
    size1: int
    size2: int
    fresh: bool = False


class Assignment(NamedTuple):
    """What a client has to do in a round: its update is checked against it."""

    share: Share
    steps: int
    reading: Reading


class PoolWeights(NamedTuple):
    """How likely each entry of the pool is to be drawn, S1's and S2's; no entry at all is one of weight 0."""

    first: Tensor
    second: Tensor


class DataFacts(NamedTuple):
    """What an algorithm may know of all clients' data together."""

    positive_share: float  # how likely an example is positive, clients weighted as the run weights them


class ServerState(Protocol):
    """What every server state has; the rest is its algorithm's own affair."""

    @property
    def weights(self) -> Weights: ...

    @property
    def step(self) -> Tensor: ...


class ClientUpdate(Protocol):
    """What every update has."""

    @property
    def weights(self) -> Weights: ...

    @property
    def share(self) -> Share: ...

    @property
    def steps(self) -> Tensor: ...


Server = TypeVar("Server", bound=ServerState)
Client = TypeVar("Client")
Work = TypeVar("Work")
Trace = TypeVar("Trace")
Update = TypeVar("Update", bound=ClientUpdate)


class Phase(Protocol[Server, Client, Work, Trace, Update]):
    """One kind of round, clients and server together; `Algorithm` has the contract."""

    @property
    def name(self) -> str:
        """Rounds with the same name run the same program: "warm-up", "training"."""

    # At the server, before the round.

    def pool_weights(self, server: Server) -> PoolWeights | None:
        """How to draw from the pool, or None: nothing is drawn."""

    def passive(self, server: Server, lag1: Tensor, lag2: Tensor) -> Any:
        """The pool's entries at these indices of any shape, S1's and S2's: a whole round's at once."""

    def downlink(self, server: Server) -> Server:
        """The state as clients receive it: without what reaches them by `passive`."""

    # At a client.

    def start(self, server: Server, client: Client, share: Share) -> Work: ...

    def step(self, score: Score, server: Server, work: Work, batch: Batch) -> tuple[Work, Trace]: ...

    def finish(self, server: Server, share: Share, work: Work, trace: Trace) -> tuple[Client, Update]: ...

    # At the server, after the round.

    def update_like(self, server: Server, assignment: Assignment) -> Update:
        """What an update looks like: the names, types and shapes of a tree with any numbers."""

    def check_update(self, server: Server, update: Update, assignment: Assignment) -> dict[str, Tensor]:
        """The sizes of what one client changes, by name, which an engine compares with other clients' sizes.

        Raises RefusedError for an update that no client can have come to. The update looks like `update_like`, and
        its numbers are finite, except where the algorithm's `may_be_nan` allows NaN.
        """

    def aggregate(self, server: Server, updates: Update) -> Server: ...

    def check_server(self, server: Server) -> None:
        """Raises RefusedError for a state from which no client could go on."""


class Algorithm(Protocol[Server, Client, Work, Trace, Update]):
    """An immutable object of hyper-parameters and a risk. It knows no network, no device and no file.

    The states that it moves are NamedTuples of tensors: *Server* is the global state and the downlink message,
    *Client* is private to its site, *Work* lives inside a round, *Trace* is what a step emits, and *Update* is the
    uplink message. What runs in a round is the business of its `Phase`.

    The contract of a phase's functions:

    - They are pure. State goes in and comes out; nothing is kept in the object, nothing is written in place.
    - Everything random is drawn beforehand and arrives in the batch. Dropout and the like draw inside `score`.
    - No branch depends on numbers in a tensor: `start`, `step` and `finish` run under `vmap` and are traced once.
      `torch.where` decides instead. `aggregate` and the checks may look.
    - Nothing that `step` returns is a view of what came in, and no leaf of the new work is another leaf of the old.
    - `finish` gets the traces stacked, steps first.
    - `aggregate` gets updates stacked, a row a client. They may lie in memory that the engine uses again, so
      `aggregate` copies what it keeps.
    - A NaN means "unknown" in leaves named in `may_be_nan`, and a mistake everywhere else.

    `Descent` is a base class with defaults for all but the maths.
    """

    @property
    def risk(self) -> XRisk:
        """What the model is judged by, and mostly what is optimised."""

    @property
    def centralized(self) -> bool:
        """Whether it wants all data in one place: a reference, not a federated method."""

    @property
    def local_pairs(self) -> bool:
        """Whether both sides of a pair must be at one client."""

    @property
    def may_be_nan(self) -> tuple[str, ...]:
        """Names of the leaves of server states and updates in which NaN means "unknown"."""

    @property
    def first_round(self) -> int:
        """0 if there is a warm-up round, else 1."""

    def phase(self, round: int) -> Phase[Server, Client, Work, Trace, Update]:
        """What runs in this round."""

    def with_facts(self, facts: DataFacts) -> Algorithm[Server, Client, Work, Trace, Update]:
        """The algorithm with what it needs to know of the data filled in."""

    def reading(self, batch1: int, batch2: int) -> Reading: ...

    def init(self, weights: Weights) -> Server: ...

    def init_client(self, server: Server, num_rows: int) -> Client: ...

    def rejoin(self, server: Server, num_rows: int) -> Client:
        """The state of a client that took part before and has lost what it knew."""


# An engine moves the states of any algorithm and looks into none of them.
AnyPhase = Phase[Any, Any, Any, Any, Any]
AnyAlgorithm = Algorithm[Any, Any, Any, Any, Any]


class ClientRound(Protocol):
    """What runs at a client, its score function bound; an executor may offer its own version for many clients."""

    def start(self, server: ServerState, client: Any, share: Share) -> Any: ...

    def step(self, server: ServerState, work: Any, batch: Batch) -> tuple[Any, Any]: ...

    def finish(self, server: ServerState, share: Share, work: Any, trace: Any) -> tuple[Any, Any]: ...


class BoundRound:
    """A phase's client side with the network that it trains."""

    def __init__(self, phase: AnyPhase, score: Score) -> None:
        self.phase, self.score = phase, score
        self.start, self.step, self.finish = phase.start, partial(phase.step, score), phase.finish


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
