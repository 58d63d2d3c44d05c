"""What an algorithm is: a client's round as pure functions over named tensors, everything random already drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from fedxl import tree
from fedxl.models import Score, Weights
from fedxl.risks import Side, XRisk


class Share(NamedTuple):
    """How much one client counts; scalars but for `labels`, see `data.federation.shares`."""

    model: Tensor  # in the average of the models; only the ratios within a cohort matter
    first: Tensor  # factor of its gradient from S1, 0 if it holds none
    second: Tensor  # the same for S2
    part: Tensor  # of the population; sums to 1 over all clients. It differs from `model` where cohorts are by size
    client: Tensor  # its number
    labels: Tensor | tuple[()] = ()  # [2, L] of several labels: `first` and `second` for each of them


class Fresh(NamedTuple):
    """Examples that are scored for the pool but not trained on: the z-hat of Algorithm 2."""

    x: Tensor  # [F1 + F2, ...]
    y: Tensor  # [F1 + F2]
    rows: Tensor  # [F1]


class Items(NamedTuple):
    """What is known of items of queries (`risks/queries.py`), example by example."""

    query: Tensor  # [n] the number of its query, the same at all clients
    weight: Tensor  # [n] of its f, 0 if it is not relevant
    size: Tensor  # [n] items of its query
    part1: Tensor  # [n] which part of its query's relevant items is at its client
    part2: Tensor  # [n] which part of its query's items is at its client


class Batch(NamedTuple):
    """One step's examples of S1, then of S2, and the pooled scores to pair them with."""

    x: Tensor  # [B1 + B2, ...]
    y: Tensor  # [B1 + B2] 0 or 1, as floats; of several labels [B1 + B2, L], and -1 where one is not known
    rows: Tensor  # [B1] where the examples of S1 stand in this client's u
    passive: Any  # what the phase's `passive` took from the pool for this step
    fresh: Fresh | tuple[()]
    noise: Any = ()  # draws of N(0, 1), like the phase's `noise_like`, where it has one
    items: Items | tuple[()] = ()  # [B1 + B2], if pairs lie within queries; each side is in equal blocks, one a query


class NoTrace(NamedTuple):
    """The trace of a step that emits nothing."""


class Reading(NamedTuple):
    """What an algorithm reads at each step."""

    first: Side  # which labels form S1
    second: Side  # which labels form S2; "none": there are no pairs
    size1: int  # examples of S1 a step
    size2: int  # examples of S2 a step
    fresh: bool = False  # whether as many fresh examples are scored besides
    queries: int = 0  # into how many queries both sides of a step are divided; 0: there are none


class Assignment(NamedTuple):
    """What the server tells a client to do in a round. The client's update is checked against it."""

    share: Share
    steps: int
    reading: Reading


class PoolWeights(NamedTuple):
    """How likely each entry of the pool is to be drawn, S1's and S2's. An empty side is one entry of weight 0."""

    first: Tensor
    second: Tensor
    # Whose each entry is, where nobody is to draw its own; None: anyone may draw any.
    owners: tuple[Tensor, Tensor] | None = None
    queries: tuple[Tensor, Tensor] | None = None  # of each entry, if pairs lie within queries


class DataFacts(NamedTuple):
    """What an algorithm may know of all clients' data together."""

    # The probability that an example is positive, with clients weighted as in the run.
    positive_share: float = math.nan
    both_classes: float = 1.0  # whether any client holds both classes: 1 or 0


class Health(NamedTuple):
    """What may have gone wrong in training."""

    collapsed: bool = False  # scores are all alike, or no gradient passes their link
    stale: Mapping[str, int] = {}  # the age of a side's passive scores in rounds, by name, if it is too high


class ServerState(Protocol):
    """What every server state has. Other fields are known to its algorithm alone."""

    @property
    def weights(self) -> Weights: ...

    @property
    def step(self) -> Tensor: ...


class ClientUpdate(Protocol):
    """What every update has. Other fields are known to its algorithm alone."""

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
        """How to draw from the pool; None: nothing is drawn."""

    def passive(self, server: Server, lag1: Tensor, lag2: Tensor) -> Any:
        """The pool's entries at these indices of S1 and of S2. They are those of a whole round, in any shape."""

    def downlink(self, server: Server) -> Server:
        """The state as clients receive it: without the pool, of which they receive `passive`."""

    # At a client.

    def start(self, server: Server, client: Client, share: Share) -> Work:
        """What the first step begins with."""

    def step(self, score: Score, server: Server, work: Work, batch: Batch) -> tuple[Work, Trace]:
        """One mini-batch."""

    def finish(self, server: Server, share: Share, work: Work, trace: Trace) -> tuple[Client, Update]:
        """What the client keeps until its next round, and what it sends."""

    # At the server, after the round.

    def update_like(self, server: Server, assignment: Assignment) -> Update:
        """An update with the right names, types and shapes; its numbers do not matter."""

    def check_update(self, server: Server, update: Update, assignment: Assignment) -> dict[str, Tensor]:
        """How large each part of an update is, by name. An engine compares these sizes with other clients'.

        Raises RefusedError for values that no honest client can send. The engine has checked before that the update
        has the form of `update_like`, and that its numbers are finite, except for NaN where `may_be_nan` allows it.
        """

    def aggregate(self, server: Server, updates: Update) -> Server:
        """The new state, from updates stacked with one row a client."""

    def check_server(self, server: Server) -> None:
        """Raises RefusedError for a state from which clients could not continue."""


class Algorithm(Protocol[Server, Client, Work, Trace, Update]):
    """An immutable object of hyper-parameters and a risk. It knows no network, no device and no file.

    The states that it moves are NamedTuples of tensors: *Server* is the global state and the downlink message,
    *Client* is private to its site, *Work* lives inside a round, *Trace* is what a step emits, and *Update* is the
    uplink message. A `Phase` is what runs in a round.

    The contract of a phase's functions:

    - They are pure. State goes in and comes out; nothing is kept in the object, nothing is written in place.
    - Everything random is drawn beforehand and arrives in the batch. Dropout and the like draw inside `score`.
    - No branch depends on numbers in a tensor: `start`, `step` and `finish` run under `vmap` and are traced once.
      Use `torch.where` instead. `aggregate` and the checks may branch.
    - Nothing that `step` returns is a view of what came in, and no leaf of the new work is another leaf of the old.
    - `finish` gets the traces stacked, steps first.
    - `aggregate` gets updates stacked, a row a client. They may lie in memory that the engine uses again, so
      `aggregate` copies what it keeps.
    - A NaN means "unknown" in leaves named in `may_be_nan`, and a mistake everywhere else.

    `Descent` is a base class with defaults for all but the maths. What an algorithm may have besides is listed in
    `algorithms/optional.py`.
    """

    @property
    def risk(self) -> XRisk:
        """The risk that is reported and, except by Local SGD and CODASCA, optimised."""

    @property
    def centralized(self) -> bool:
        """Whether it wants all data in one place: a reference, not a federated method."""

    @property
    def local_pairs(self) -> bool:
        """Whether both sides of a pair must be at one client."""

    @property
    def needs_both_classes(self) -> bool:
        """Whether some client must hold both classes, or nobody would train."""

    @property
    def may_be_nan(self) -> tuple[str, ...]:
        """Names of the leaves of server states and updates in which NaN means "unknown"."""

    @property
    def first_round(self) -> int:
        """0 if there is a warm-up round, else 1."""

    def phase(self, round: int) -> Phase[Server, Client, Work, Trace, Update]:
        """What runs in this round."""

    def with_network(self, normed_scores: bool) -> Algorithm[Server, Client, Work, Trace, Update]:
        """The algorithm as it suits a network; normed_scores: whether that norms its scores itself."""

    def with_facts(self, facts: DataFacts) -> Algorithm[Server, Client, Work, Trace, Update]:
        """The algorithm with what it needs to know of the data filled in."""

    def reading(self, batch1: int, batch2: int) -> Reading:
        """What a step reads, with the batch sizes of the run."""

    def init(self, weights: Weights) -> Server:
        """The state before the first round."""

    def init_client(self, server: Server, num_rows: int) -> Client:
        """The state of a client before it first takes part; it holds `num_rows` examples of S1."""

    def rejoin(self, server: Server, num_rows: int) -> Client:
        """The state of a client that took part before and has lost its state."""


# An engine moves the states of any algorithm and looks into none of them.
AnyPhase = Phase[Any, Any, Any, Any, Any]
AnyAlgorithm = Algorithm[Any, Any, Any, Any, Any]


class ClientRound(Protocol):
    """A phase's client side with its score function bound. An executor may wrap it to run many clients at once."""

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
