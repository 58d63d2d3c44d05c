"""The in-process engine: a population of clients on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedxl import sampling, tree
from fedxl.algorithms.protocol import Algorithm, Batch, ClientUpdate, Phase, Reading, ServerState
from fedxl.data.federation import Federation
from fedxl.data.participation import Plan
from fedxl.data.source import Source, floats_as, queries_of
from fedxl.engine import noise
from fedxl.engine.drawing import NO_SECRETS, Drawing, Schedule, Secrets, host_weights
from fedxl.engine.group import BoundRound, Draws, Executor, Feed, Group
from fedxl.errors import require
from fedxl.models import Score
from fedxl.models.precision import PRECISIONS, products
from fedxl.risks.pairing import Examples, PoolWeights, Share
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

    num_clients: int
    _visits: dict[int, int] = field(default_factory=dict)
    _states: dict[int, object] = field(default_factory=dict)

    def visits(self, client: int) -> int:
        return self._visits.get(client, 0)

    def state(self, client: int, init: Callable[[int], object]) -> object:
        """The client's state, or what `init` makes of a client that never took part."""
        state = self._states.get(client)
        return init(client) if state is None else state

    def put(self, states: Mapping[int, object]) -> None:
        """The states after a round in which these clients took part."""
        self.count(states)
        self._states.update(states)

    def count(self, clients: Iterable[int]) -> None:
        """These clients took part in a round, here or in another process."""
        self._visits.update({client: self.visits(client) + 1 for client in clients})

    @property
    def known(self) -> set[int]:
        """The clients whose states are here."""
        return set(self._states)

    def take(self, client: int) -> object:
        """The state of a client that goes on elsewhere; how often it took part stays known."""
        return self._states.pop(client)

    def bring(self, states: Mapping[int, object]) -> None:
        """The states of clients that were elsewhere."""
        self._states.update(states)

    @property
    def packed(self) -> ClientStates:
        rounds = {str(client): torch.tensor(number) for client, number in self._visits.items()}
        return ClientStates(rounds, {str(client): state for client, state in self._states.items()})

    def restore(self, tensors: Mapping[str, Tensor], init: Callable[[int], object], device: torch.device) -> None:
        """Take the states back from a checkpoint; RefusedError if they are not those of these clients."""
        members = [name.removeprefix("rounds.") for name in tensors if name.startswith("rounds.")]
        if not {str(client) for client in range(self.num_clients)}.issuperset(members):
            raise RefusedError(f"it holds clients that are not among these {self.num_clients}")
        like = {name: init(int(name)) for name in members}
        none = torch.zeros((), dtype=torch.int64)
        rounds, states = fitted(ClientStates(dict.fromkeys(members, none), like), tensors)
        self._visits = {int(name): int(number) for name, number in rounds.items()}
        self._states = {int(name): tree.to(state, device) for name, state in states.items()}


@dataclass
class Simulator:
    """Runs rounds of a federation in this process."""

    sums: ClassVar[bool] = False
    algorithm: Algorithm
    score: Score
    federation: Federation
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
        source, parts = self.federation.source, self.federation.parts
        local = self.algorithm.local_pairs
        items = self.reading.pairing.items(source.labels, queries_of(source), parts, local)
        self.drawing = Drawing(self.federation, self.reading, self.schedule, items, self.first_number, self.secrets)
        why = "differential privacy limits how often an example is read, and weights read some more often"
        require(not self.drawing.weighted or not self.algorithm.private, f"{why}; leave them out")
        self.items = tree.map(lambda leaf: leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype), items)
        self.source: Source = self.federation.source.to(device)
        self.labels = self.source.labels.to(dtype)
        self.shares = tree.map(lambda leaf: leaf.to(device, dtype), self.shares)
        # Rounded up, so that federations whose largest clients differ a little share one compiled program.
        most = max(map(self.drawing.num_rows, range(len(self.federation.parts))))
        self.most_rows = 2 ** (most - 1).bit_length()
        self.store = ClientStore(len(self.federation.parts))
        self._bound: dict[str, BoundRound] = {}

    def run_round(
        self, server: ServerState, round: int, cohort: Indices, passive: object = None, whole: int = 0
    ) -> ClientUpdate:
        """The cohort's updates, stacked in its order. Private states change only once all of them are done.

        passive: what the clients read of the pool, [C, K, ...]; None: drawn here. whole: the cohort's size over all
        processes.
        """
        phase, size = self.algorithm.phase(round), self.placement.clients_at_once or len(cohort)
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
                clients, update = self.executor(self._bind(phase), server, group)
            states |= zip(members, clients, strict=True)
            # An executor may use the memory of its last updates again.
            updates.append(update if size >= len(cohort) else tree.map(torch.clone, update))
        self.store.put(states)
        self._draw_ahead(round + 1, whole or len(cohort), pool)
        return updates[0] if len(updates) == 1 else tree.concat(updates)

    def restore(self, server: ServerState, tensors: dict[str, Tensor]) -> None:
        """Take the clients' states back from a checkpoint; RefusedError if they are not those of these clients."""
        self.store.restore(tensors, lambda client: self.initial(server, client), self.placement.device)

    def remarks(self) -> dict[str, Any]:
        return {}  # no client fails in a simulation

    @property
    def population(self) -> ClientStates:
        return self.store.packed

    def _bind(self, phase: Phase) -> BoundRound:
        """The phase with our network; the same object each time, so that an executor recognises its program."""
        return self._bound.setdefault(phase.name, BoundRound(phase, self.score))

    def initial(self, server: ServerState, client: int) -> Any:
        """The state of a client that never took part."""
        return self.algorithm.init_client(server, self.drawing.num_rows(client))

    def _group(
        self, phase: Phase, server: ServerState, round: int, members: list[int], pool: PoolWeights | None, given: Any
    ) -> Group:
        each = [self.drawing.draw(client, round, self.store.visits(client), pool) for client in members]
        index = self._to_device(np.array(members))
        draws = self._upload([np.stack(arrays) for arrays in zip(*each, strict=True)])
        # All but the examples themselves is gathered for the whole round at once.
        passive = phase.passive(server, draws.lag1, draws.lag2) if given is None else given
        seed, first = self.drawing.seed, self.first_number
        return Group(
            clients=[self.store.state(client, lambda client: self.initial(server, client)) for client in members],
            largest_state=lambda: self.algorithm.init_client(server, self.most_rows),
            shares=tree.map(lambda leaf: leaf[index], self.shares),
            feed=Feed(
                draws,
                self.labels[draws.examples],
                tree.map(lambda leaf: leaf[draws.examples], self.items),
                passive,
                self._noise(phase, server, round, members),
            ),
            batch=self._batch,
            seed=lambda i: sampling.torch_seed(seed(members[i]), Purpose.LAYERS, first + members[i], round),
            comes_again=self.algorithm.phase(round + 1).name == phase.name,
        )

    def _noise(self, phase: Phase, server: ServerState, round: int, members: list[int]) -> Any:
        numbers = [self.first_number + client for client in members]
        seeds = [self.secrets.noise.get(number, self.schedule.seed) for number in numbers]
        like = phase.noise_like(server, self.reading)
        return noise.draw_noise(like, seeds, numbers, round, self.schedule.local_steps)

    def _upload(self, arrays: list[Indices]) -> Draws[Tensor]:
        """All draws of a group in one transfer."""
        flat = self._to_device(np.concatenate([array.ravel() for array in arrays]))
        pieces = flat.split([array.size for array in arrays])
        return Draws(*(piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True)))

    def _to_device(self, indices: Indices) -> Tensor:
        tensor, device = torch.from_numpy(indices), self.placement.device
        if device.type != "cuda":
            return tensor.to(device)
        # From pinned memory, so that the next round's draws are on their way while this one is still running.
        return tensor.pin_memory().to(device, non_blocking=True)

    def _draw_ahead(self, round: int, size: int, pool: PoolWeights | None) -> None:
        many, seed = len(self.federation.parts), self.schedule.seed
        plan = self.plan or Plan(num_clients=many, size=size, seed=seed, chances=self.chances)
        members = plan.cohort(round)
        visits = {int(client): self.store.visits(int(client)) for client in self.here(members)}
        self.drawing.draw_ahead(round, visits, pool)

    def _batch(self, now: Feed) -> Batch:
        """One step's examples, of a client [B, ...] or of several [C, B, ...]."""
        draws, fresh = now.draws, tuple[Examples, ...]()
        own = Examples(self._fetch(draws.examples, draws.codes), now.y, draws.rows, now.items)
        if self.reading.fresh:
            items = tree.map(lambda leaf: leaf[draws.fresh], self.items)
            x = self._fetch(draws.fresh, draws.fresh_codes)
            fresh = (Examples(x, self.labels[draws.fresh], draws.fresh_rows, items),)
        return Batch(own, now.passive, fresh, now.noise)

    def _fetch(self, indices: Tensor, codes: Tensor) -> Tensor:
        return floats_as(self.source.fetch(indices, codes), self.placement.dtype)
