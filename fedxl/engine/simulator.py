"""The in-process engine: a population of clients on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedxl import sampling, tree
from fedxl.algorithms.protocol import Algorithm, Batch, ClientUpdate, Phase, Reading, ServerState
from fedxl.data.examples import Examples, floats_as
from fedxl.data.participation import Plan
from fedxl.engine.drawing import NO_SECRETS, Drawing, Schedule, Secrets, draw_noise, host_weights
from fedxl.engine.executors import ClientRound, Draws, Executor, Feed, Group
from fedxl.errors import require
from fedxl.models import Score
from fedxl.models.functional import PRECISIONS, products
from fedxl.risks.pairing import Minibatch, PoolWeights, Share
from fedxl.sampling import Floats, Indices, Purpose
from fedxl.wire import RefusedError, fitted

CPU = torch.device("cpu")


class Placement(NamedTuple):
    """Where clients run, in which numbers, and how many of them together."""

    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    precision: str = "fp32"
    clients_at_once: int = 0  # 0: the whole cohort


ON_CPU = Placement()


class ClientStates(NamedTuple):
    """What a checkpoint must hold besides the server."""

    rounds: dict[str, Tensor]  # by client number: in how many rounds it took part
    states: dict[str, object]


@dataclass
class ClientStore:
    """Private states, and how often each client took part. Clients that never did cost nothing."""

    states: dict[int, object] = field(default_factory=dict)  # a client's may be in another process
    rounds: dict[int, int] = field(default_factory=dict)

    def visits(self, client: int) -> int:
        return self.rounds.get(client, 0)

    def put(self, states: Mapping[int, object]) -> None:
        """The states after a round in which these clients took part."""
        self.count(states)
        self.states.update(states)

    def count(self, clients: Iterable[int]) -> None:
        """These clients took part in a round, here or in another process."""
        self.rounds.update({client: self.visits(client) + 1 for client in clients})


@dataclass
class Simulator:
    """Runs the rounds of the clients that hold these examples, in this process."""

    sums: ClassVar[bool] = False
    algorithm: Algorithm
    score: Score
    data: Examples
    executor: Executor
    schedule: Schedule
    shares: Share  # [clients] how much each counts
    chances: Floats | None = None  # of each client to be in a cohort; None: all are alike
    placement: Placement = ON_CPU
    first_number: int = 0  # of the first client: draws are those of its number, wherever it runs
    secrets: Secrets = NO_SECRETS  # seeds that take the place of the run's
    here: Callable[[Indices], Indices] = lambda cohort: cohort  # which clients of a cohort run in this process
    plan: Plan | None = None  # who takes part in which round; None: uniform cohorts, as large as the last one

    def __post_init__(self) -> None:
        device, dtype = self.placement[:2]
        self.reading: Reading = self.algorithm.reading(self.schedule.batch1, self.schedule.batch2)
        # What the pairing knows of examples besides their labels.
        pairing, labels = self.reading.pairing, self.reading.pairing.targets(self.data.y)
        columns = (labels, self.data.group, self.data.time, self.data.parts)
        items = pairing.items(*columns, self.algorithm.local_pairs, self.first_number)
        self.drawing = Drawing(self.data, self.reading, self.schedule, items, self.first_number, self.secrets)
        why = "differential privacy limits how often an example is read, and weights read some more often"
        require(not self.drawing.weighted or not self.algorithm.private, f"{why}; leave them out")
        self.items = tree.map(lambda leaf: leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype), items)
        self.placed = self.data.to(device)
        self.labels = labels.to(device, dtype)
        self.shares = tree.map(lambda leaf: leaf.to(device, dtype), self.shares)
        # Rounded up, so that federations whose largest clients differ a little share one compiled program.
        most = max(map(self.drawing.num_rows, range(self.num_clients)))
        self.most_rows = 2 ** (most - 1).bit_length()
        self.store = ClientStore()
        self._bound: dict[str, ClientRound] = {}  # by phase

    @property
    def num_clients(self) -> int:
        return len(self.data.parts)

    def run_round(
        self, server: ServerState, round: int, cohort: Indices, passive: object = None, whole: int = 0
    ) -> ClientUpdate:
        """The cohort's updates, stacked in its order. Private states change only once all of them are done.

        passive: what the clients read of the pool, [C, K, ...]; None: drawn here. whole: the cohort's size over all
        processes.
        """
        phase, size = self.algorithm.phase(round), self.placement.clients_at_once or len(cohort)
        # The same object each time, so that an executor recognises its program.
        bound = ClientRound(phase.start, partial(phase.step, self.score), phase.finish)
        running = self._bound.setdefault(phase.name, bound)
        weights = phase.pool_weights(server) if passive is None else None
        pool = None if weights is None else host_weights(weights)
        states: dict[int, Any] = {}
        updates = []
        for begin in range(0, len(cohort), size):
            members = [int(client) for client in cohort[begin : begin + size]]
            given = None if passive is None else tree.map(lambda leaf, at=begin: leaf[at : at + size], passive)
            group = self._group(phase, server, round, members, pool, given)
            # Only steps run in a lower precision. Averages are always taken in full precision.
            with products(PRECISIONS[self.placement.precision]):
                clients, update = self.executor(running, server, group)
            states |= zip(members, clients, strict=True)
            # An executor may use the memory of its last updates again.
            updates.append(update if size >= len(cohort) else tree.map(torch.clone, update))
        self.store.put(states)
        seed, many = self.schedule.seed, whole or len(cohort)
        plan = self.plan or Plan(num_clients=self.num_clients, size=many, seed=seed, chances=self.chances)
        ahead = {int(client): self.store.visits(int(client)) for client in self.here(plan.cohort(round + 1))}
        self.drawing.draw_ahead(round + 1, ahead, pool)
        return updates[0] if len(updates) == 1 else tree.concat(updates)

    def restore(self, server: ServerState, tensors: dict[str, Tensor]) -> None:
        """Take the clients' states back from a checkpoint; RefusedError if they are not those of these clients."""
        members = [name.removeprefix("rounds.") for name in tensors if name.startswith("rounds.")]
        if not {str(client) for client in range(self.num_clients)}.issuperset(members):
            raise RefusedError(f"it holds clients that are not among these {self.num_clients}")
        like = {name: self.initial(server, int(name)) for name in members}
        none = torch.zeros((), dtype=torch.int64)
        rounds, states = fitted(ClientStates(dict.fromkeys(members, none), like), tensors)
        self.store.rounds = {int(name): int(number) for name, number in rounds.items()}
        self.store.states = {int(name): tree.to(state, self.placement.device) for name, state in states.items()}

    def remarks(self) -> dict[str, Any]:
        return {}  # no client fails in a simulation

    @property
    def population(self) -> ClientStates:
        rounds = {str(client): torch.tensor(number) for client, number in self.store.rounds.items()}
        return ClientStates(rounds, {str(client): state for client, state in self.store.states.items()})

    def initial(self, server: ServerState, client: int) -> Any:
        """The state of a client that never took part."""
        return self.algorithm.init_client(server, self.drawing.num_rows(client))

    def _group(
        self, phase: Phase, server: ServerState, round: int, members: list[int], pool: PoolWeights | None, given: Any
    ) -> Group:
        each = [self.drawing.draw(client, round, self.store.visits(client), pool) for client in members]
        index = self._to_device(np.array(members))
        arrays = [np.stack(mine) for mine in zip(*each, strict=True)]
        flat = self._to_device(np.concatenate([array.ravel() for array in arrays]))  # in one transfer
        pieces = flat.split([array.size for array in arrays])
        draws = Draws(*(piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True)))
        # All but the examples themselves is gathered for the whole round at once.
        passive = phase.passive(server, draws.lag1, draws.lag2) if given is None else given
        kept = self.store.states
        like, numbers = phase.noise_like(server, self.reading), [self.first_number + client for client in members]
        seeds = [self.secrets.noise.get(number, self.schedule.seed) for number in numbers]
        return Group(
            clients=[kept[client] if client in kept else self.initial(server, client) for client in members],
            largest_state=lambda: self.algorithm.init_client(server, self.most_rows),
            shares=tree.map(lambda leaf: leaf[index], self.shares),
            feed=Feed(
                draws,
                self.labels[draws.examples],
                tree.map(lambda leaf: leaf[draws.examples], self.items),
                passive,
                draw_noise(like, seeds, numbers, round, self.schedule.local_steps),
            ),
            batch=self._batch,
            seed=lambda i: sampling.torch_seed(self.drawing.seed(members[i]), Purpose.LAYERS, numbers[i], round),
            comes_again=self.algorithm.phase(round + 1).name == phase.name,
        )

    def _to_device(self, indices: Indices) -> Tensor:
        tensor, device = torch.from_numpy(indices), self.placement.device
        if device.type != "cuda":
            return tensor.to(device)
        # From pinned memory, so that the next round's draws are on their way while this one is still running.
        return tensor.pin_memory().to(device, non_blocking=True)

    def _batch(self, now: Feed) -> Batch:
        """One step's examples, of a client [B, ...] or of several [C, B, ...]."""
        draws, fresh = now.draws, tuple[Minibatch, ...]()
        own = Minibatch(self._fetch(draws.examples, draws.codes), now.y, draws.rows, now.items)
        if self.reading.fresh:
            items = tree.map(lambda leaf: leaf[draws.fresh], self.items)
            x = self._fetch(draws.fresh, draws.fresh_codes)
            fresh = (Minibatch(x, self.labels[draws.fresh], draws.fresh_rows, items),)
        return Batch(own, now.passive, fresh, now.noise)

    def _fetch(self, indices: Tensor, codes: Tensor) -> Tensor:
        return floats_as(self.placed.fetch(indices, codes), self.placement.dtype)
