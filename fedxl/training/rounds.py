"""A round: the engine runs clients, then the server aggregates. Training, benchmarks and tests all use this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.protocol import Algorithm, ClientUpdate, Phase, Reading, ServerState
from fedxl.algorithms.server_rules import next_state
from fedxl.data.examples import Digests
from fedxl.data.participation import Plan
from fedxl.data.tables.prepare import Preparation
from fedxl.sampling import Indices
from fedxl.training.evaluate import Examiner
from fedxl.training.problem import Problem
from fedxl.training.run_folder import Form, Member


class Engine(Protocol):
    """Where rounds run. `population` is what it remembers of its clients, and goes into checkpoints."""

    @property
    def sums(self) -> bool:
        """Whether an update's parts that the server needs in sum only arrive as their mean: those of a secure sum."""

    def run_round(self, server: ServerState, round: int, cohort: Indices) -> ClientUpdate:
        """The updates of the cohort, or of the sites that replied, stacked."""

    def remarks(self) -> dict[str, Any]:
        """What to add to the metrics row, about the rounds since the last call."""

    @property
    def population(self) -> Any: ...

    def restore(self, server: ServerState, tensors: dict[str, Tensor]) -> None: ...


@dataclass(kw_only=True, eq=False)
class Task:
    """What the loop over rounds needs: a `Simulation`, or that of a server whose clients are sites."""

    problem: Problem
    engine: Engine
    examiner: Examiner
    num_clients: int
    cohort: int  # how many of them take part in a round; 0: all
    plan: Plan  # who takes part in which round
    members: Sequence[Member]
    form: Form  # what the network takes and gives
    description: dict[str, Any]  # what must be the same when the run is resumed
    preparation: Preparation | None = None  # how its data were made of files, if they were
    may_miss: bool = False  # whether a client may miss a round that it was to take part in, as sites may

    def digests(self) -> Digests | None:
        """Of the training examples, so that predictions on them can be told; None if they are elsewhere."""
        return None


class Traffic(NamedTuple):
    """Bytes that one client receives and sends in a round; those that it sends are a mean over the cohort."""

    down: int
    up: int


def play_round(
    algorithm: Algorithm, engine: Engine, server: ServerState, round: int, cohort: Indices
) -> tuple[ServerState, ClientUpdate]:
    """One round of a cohort. Round 0 is the warm-up, if there is one."""
    updates, phase = engine.run_round(server, round, cohort), algorithm.phase(round)
    return next_state(phase, server, updates, engine.sums), updates


def passive_like(phase: Phase, server: ServerState, reading: Reading, steps: int) -> Any:
    """What a client reads of the pool in a round, with the right names, types and shapes, and any numbers."""
    if phase.pool_weights(server) is None:
        return ()
    nothing = torch.zeros((), dtype=torch.int64, device=server.step.device)
    return phase.passive(server, *(nothing.expand(steps, size) for size in (reading.size1, reading.size2)))


def traffic(phase: Phase, reading: Reading, steps: int, server: ServerState, updates: ClientUpdate) -> Traffic:
    """What a round has cost: the state without the pool, what a client reads of the pool, and its update."""
    passive = passive_like(phase, server, reading, steps)
    down = tree.nbytes(phase.downlink(server)) + tree.nbytes(passive)
    return Traffic(down, tree.nbytes(updates) // len(updates.share.model))
