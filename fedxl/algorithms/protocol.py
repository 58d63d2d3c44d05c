"""What an algorithm is: a client's round as pure functions over named tensors, everything random already drawn."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedxl.algorithms.descent import Descent
from fedxl.errors import require
from fedxl.models import Score, Weights
from fedxl.options import require_types, without_defaults
from fedxl.risks.pairing import Minibatch, OneLabel, Pairing, PoolWeights, Share, Side
from fedxl.risks.xrisk import XRisk

A = TypeVar("A", bound="Algorithm")
# The functions that build a chain of rules from a user's options, and tell the options of a chain.
RULES = {
    "options": "fedxl.algorithms.server_rules:server_rules",
    "describe": "fedxl.algorithms.server_rules:settings_of",
}


class Batch(NamedTuple):
    """What one step reads."""

    examples: Minibatch
    passive: Any  # what the phase's `passive` took from the pool for this step
    fresh: tuple[Minibatch, ...] = ()  # examples that are scored for the pool but not trained on: the paper's z-hat
    noise: Any = ()  # whole numbers, as the phase's `noise_like` asks for


class NoTrace(NamedTuple):
    """The trace of a step that emits nothing."""


class Reading(NamedTuple):
    """What an algorithm reads at each step."""

    first: Side  # which labels form S1
    second: Side  # which labels form S2; "none" if there are no pairs
    size1: int  # examples of S1 per step
    size2: int  # examples of S2 per step
    fresh: bool = False  # whether as many fresh examples are scored besides
    pairing: Pairing = OneLabel()  # how examples are drawn


class Assignment(NamedTuple):
    """What the server tells a client to do in a round. The client's update is checked against it."""

    share: Share
    steps: int
    reading: Reading


class DataFacts(NamedTuple):
    """What an algorithm may know of all clients' data together."""

    # The probability that an example is positive, with clients weighted as in the run.
    positive_share: float = math.nan
    one_class: float = 0.0  # clients with one class: 0: none; 1: should lend scores; 2: should train; 3: are all
    pairs: Any = None  # what the pairing must know


class ServerState(Protocol):
    """What every server state has. Other fields are known to its algorithm alone."""

    @property
    def weights(self) -> Weights: ...

    @property
    def step(self) -> Tensor: ...  # local steps since the beginning

    @property
    def rules(self) -> Any: ...  # the states of the server's rules; an algorithm leaves them alone


class ClientUpdate(Protocol):
    """What every update has. Other fields are known to its algorithm alone."""

    @property
    def weights(self) -> Weights: ...

    @property
    def share(self) -> Share: ...

    @property
    def steps(self) -> Tensor: ...


class Rule(Protocol):
    """Something the server does to updates before it takes their mean: a part that any algorithm gets.

    `server_rules.py` has clipping, robust means, whole-number sums, momentum and Adam.
    """

    def init(self, phase: Phase, server: Any) -> Any:
        """Its state before the first round."""

    def __call__(
        self, state: Any, phase: Phase, server: Any, updates: Any, shares: Tensor
    ) -> tuple[Any, Any, Tensor]:
        """Its next state, and what it makes of updates [C, ...] and of how much each counts [C]."""


class Phase:
    """One kind of round, clients and server together. `Algorithm` has the contract."""

    name: ClassVar[str] = "training"  # rounds with the same name run the same program
    risk: XRisk
    averaged: ClassVar[tuple[str, ...]] = ("weights",)  # fields of state and update that the server averages
    rules: tuple[Rule, ...] = ()

    # At the server, before the round.

    def pool_weights(self, server: Any) -> PoolWeights | None:
        """How to draw from the pool; None if nothing is drawn."""
        return None

    def passive(self, server: Any, lag1: Tensor, lag2: Tensor) -> Any:
        """The pool's entries at these indices of S1 and of S2. They are those of a whole round, in any shape."""
        return ()

    def downlink(self, server: Any) -> Any:
        """The state as clients receive it: without the pool, of which they receive `passive`."""
        return server._replace(rules=())

    # At a client.

    def noise_like(self, server: Any, reading: Reading) -> Any:
        """The noise that a step wants, with the right names, types and shapes."""
        return ()

    def start(self, server: Any, client: Any, share: Share) -> Any:
        """What the first step begins with."""
        raise NotImplementedError

    def step(self, score: Score, server: Any, work: Any, batch: Batch) -> tuple[Any, Any]:
        """One mini-batch: the next work, and what the step emits."""
        raise NotImplementedError

    def finish(self, server: Any, share: Share, work: Any, trace: Any) -> tuple[Any, Any]:
        """What the client keeps until its next round, and what it sends."""
        raise NotImplementedError

    # At the server, after the round.

    def update_like(self, server: Any, assignment: Assignment) -> Any:
        """An update with the right names, types and shapes; its numbers do not matter."""
        raise NotImplementedError

    def counts(self, share: Share) -> Tensor:
        """How much clients count in the mean: 0 if they do not train."""
        return share.model

    def growth(self, share: Share) -> Tensor:
        """By how much a client's gradient is multiplied, above 1 if it holds rare examples."""
        return torch.ones_like(share.model, dtype=torch.float64)

    def parts(self, state: Any) -> dict[str, Any]:
        """The parts of a server state, or of an update, that rules may change and checks compare."""
        return {name: getattr(state, name) for name in self.averaged}

    def position(self, server: Any, updates: Any) -> tuple[Any, ...]:
        """Where updates lie, as checks and rules measure it: the parameters, and what else moves the model."""
        return (updates.weights.params,)

    def sent_scores(self, update: Any) -> Any:
        """The scores in an update; None if it has none."""
        return None

    def pooled_scores(self, server: Any) -> Any:
        """The score pool; None if there is none."""
        return None

    def aggregate(self, server: Any, mean: dict[str, Any], updates: Any) -> Any:
        """The new state, from the mean of `averaged` and from updates stacked with one row per client."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Algorithm(Phase):
    """An immutable object of hyper-parameters and a risk. It knows no network, no device and no file.

    The states that it moves are NamedTuples of tensors: *server* is the global state and the downlink message,
    *client* is private to its site, *work* lives inside a round, *trace* is what a step emits, and *update* is the
    uplink message. A `Phase` is what runs in a round; an algorithm is its own, unless it overrides `phase`. One of
    your own adds `init`, `init_client`, `start`, `step`, `finish`, `update_like` and `aggregate`.

    The contract of a phase's functions:

    - They are pure. State goes in and comes out; nothing is kept in the object, nothing is written in place.
    - Everything random is drawn beforehand and arrives in the batch. Dropout and the like draw inside `score`.
    - No branch depends on numbers in a tensor: `start`, `step` and `finish` run under `vmap` and are traced once.
      Use `torch.where` instead. `aggregate` and the checks may branch.
    - Nothing that `step` returns is a view of what came in, and no leaf of the new work is another leaf of the old.
    - `finish` gets the traces stacked, steps first.
    - Updates may lie in memory that the engine uses again, so `aggregate` copies what it keeps of them.
    - A NaN means "unknown" in leaves named in `may_be_nan`, and a mistake everywhere else.
    """

    centralized: ClassVar[bool] = False  # whether it wants all data in one place: a reference, not a federated method
    local_pairs: ClassVar[bool] = False  # whether both sides of a pair must be at one client
    summable: ClassVar[bool] = True  # whether the server needs `averaged` in sum only, so that secure sums suffice
    may_be_nan: ClassVar[tuple[str, ...]] = ()  # leaves of states and updates in which NaN means "unknown"
    first_round: ClassVar[int] = 1  # 0 if there is a warm-up round
    facts_read: ClassVar[tuple[str, ...]] = ("pairs",)  # which of `DataFacts` real sites must be told
    # What may depend on settings; then it is a property.
    lends: ClassVar[bool] = False  # whether clients with one class lend their scores and do not train
    guards_level: ClassVar[bool] = True  # whether scores stay where their link passes gradient
    private: ClassVar[bool] = False  # whether it clips and adds noise, so that a run has an epsilon
    order: ClassVar[str] = "sorted"  # of uploaded scores, or "drawn"; algorithms that upload none count as sorted
    learns_grades: ClassVar[bool] = False  # whether it learns the grades of queries themselves, without pairs

    risk: XRisk  # what is reported and, except by Local SGD and CODASCA, optimised
    _: KW_ONLY
    lr: float = 0.1  # learning rate
    descent: Descent = Descent()
    buffers: Literal["average", "local"] = "average"  # BatchNorm statistics: averaged, or each client keeps its own
    server: tuple[Rule, ...] = field(default=(), metadata=RULES)

    def __post_init__(self) -> None:
        require_types(type(self), {item.name: getattr(self, item.name) for item in fields(self)})
        require(self.lr > 0, f"lr must be positive, got {self.lr}")
        right = isinstance(self.server, tuple) and all(map(callable, self.server))
        require(right, f"server must be rules, such as (Clip(3.0),), not {self.server!r}")

    __repr__ = without_defaults

    @property
    def rules(self) -> tuple[Rule, ...]:  # type: ignore[override]
        return self.server

    def phase(self, round: int) -> Phase:
        """What runs in this round."""
        return self

    def with_network(self: A, normed_scores: bool) -> A:
        """The algorithm as it suits a network; normed_scores: whether that norms its scores itself."""
        return self

    def with_facts(self: A, facts: DataFacts) -> A:
        """The algorithm with what it needs to know of the data filled in; at real sites `facts_read` of it alone."""
        pairing = self.risk.pairing.informed(facts.pairs)
        return self if pairing is self.risk.pairing else replace(self, risk=replace(self.risk, pairing=pairing))

    def reading(self, batch1: int, batch2: int) -> Reading:
        """What a step reads, with the batch sizes of the run."""
        return Reading("all", "none", batch1 + batch2, 0)

    def init(self, weights: Weights) -> Any:
        """The state before the first round; `server_rules.begin` adds the rules' own."""
        raise NotImplementedError

    def init_client(self, server: Any, num_rows: int) -> Any:
        """The state of a client before it first takes part; it holds `num_rows` examples of S1."""
        raise NotImplementedError

    def rejoin(self, server: Any, num_rows: int) -> Any:
        """The state of a client that took part before and has lost its state."""
        return self.init_client(server, num_rows)

    def own_buffers(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The buffers that a client keeps between its rounds: all, or none."""
        return buffers if self.buffers == "local" else {}

    def optimised_scores(self, h: Tensor, y: Tensor) -> Tensor:
        """Outputs of examples with these labels as the risk sees them before its link."""
        return h
