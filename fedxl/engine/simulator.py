"""The in-process engine: a population of clients on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl import sampling, tree
from fedxl.algorithm import Algorithm, Batch, Fresh, PoolWeights, Reading, RoundOf, Share
from fedxl.data.federation import Federation, Weighting, shares
from fedxl.data.source import Source
from fedxl.engine.executors import Executor, Wave
from fedxl.sampling import Indices, Purpose

CPU = torch.device("cpu")
I = TypeVar("I", Indices, Tensor)


class Draws(NamedTuple, Generic[I]):
    """Every index a client needs in a round (of several clients: [C, ...]); examples are positions in the source."""

    examples: I  # [K, B1 + B2]
    rows: I  # [K, B1]
    lag1: I  # [K, B1]
    lag2: I  # [K, B2]
    fresh: I  # [K, F1 + F2]
    fresh_rows: I  # [K, F1]


class Population(NamedTuple):
    """The clients' private side of a run: what a checkpoint must hold besides the server."""

    rounds: dict[str, Tensor]  # by client number: in how many rounds it took part
    states: dict[str, Any]


@dataclass
class Simulator:
    """Runs rounds of a federation in this process. Clients that never took part cost nothing but their data."""

    algorithm: Algorithm
    federation: Federation
    executor: Executor
    local_steps: int
    batch1: int
    batch2: int
    seed: int = 0
    weighting: Weighting = "clients"
    clients_at_once: int = 0  # 0: the whole cohort
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.reading: Reading = self.algorithm.reading(self.batch1, self.batch2)
        self.source: Source = self.federation.source.to(self.device)
        self.labels = self.source.labels.to(self.dtype)
        self.first = self.federation.side(self.reading.first)
        self.second = self.federation.side(self.reading.second)
        first, second = ([len(part) for part in parts] for parts in (self.first, self.second))
        self.shares: Share = tree.map(lambda leaf: leaf.to(self.dtype), shares(first, second, self.weighting))
        self.population = Population({}, {})

    def run_round(self, algorithm: RoundOf, server: Any, round: int, cohort: Indices) -> Any:
        """The cohort's updates, stacked in its order. Private states change only once all of them are done."""
        size = self.clients_at_once or len(cohort)
        pool = algorithm.pool_weights(server)
        pool_draws = None if pool is None else _as_weights(pool)
        states: dict[str, Any] = {}
        updates = []
        for begin in range(0, len(cohort), size):
            members = [int(client) for client in cohort[begin : begin + size]]
            clients, update = self.executor(
                algorithm, server, self._wave(algorithm, server, round, members, pool_draws)
            )
            states |= {str(member): client for member, client in zip(members, clients, strict=True)}
            updates.append(update)
        counts = {str(client): torch.tensor(self._rounds(client) + 1) for client in map(int, cohort)}
        self.population = Population(self.population.rounds | counts, self.population.states | states)
        return updates[0] if len(updates) == 1 else tree.concat(updates)

    def restore(self, server: Any, tensors: dict[str, Tensor]) -> None:
        """Take the population back from a checkpoint."""
        members = [name.removeprefix("rounds.") for name in tensors if name.startswith("rounds.")]
        like = {name: self.algorithm.init_client(server, len(self.first[int(name)])) for name in members}
        population = tree.unpack(Population({name: torch.zeros(()) for name in members}, like), tensors)
        self.population = population._replace(states=tree.to(population.states, self.device))

    def _rounds(self, client: int) -> int:
        rounds = self.population.rounds.get(str(client))
        return 0 if rounds is None else int(rounds)

    def _state(self, server: Any, client: int) -> Any:
        state = self.population.states.get(str(client))
        return self.algorithm.init_client(server, len(self.first[client])) if state is None else state

    def _wave(self, algorithm: RoundOf, server: Any, round: int, members: list[int], pool: _PoolDraws | None) -> Wave:
        draws = [self.draw(client, round, pool) for client in members]
        joint = Draws(*(self._device(np.stack(arrays)) for arrays in zip(*draws, strict=True)))
        return Wave(
            clients=[self._state(server, client) for client in members],
            shares=tree.map(lambda leaf: leaf[members].to(self.device), self.shares),
            batches=lambda which: self._batches(algorithm, server, Draws(*(indices[which] for indices in joint))),
            seed=lambda i: sampling.torch_seed(self.seed, Purpose.LAYERS, members[i], round),
        )

    def _device(self, indices: Indices) -> Tensor:
        return torch.from_numpy(indices).to(self.device)

    def draw(self, client: int, round: int, pool: _PoolDraws | None) -> Draws[Indices]:
        """All of a client's draws for a round. A side without examples is filled with the other side's.

        Stand-ins count for nothing in the gradient, but BatchNorm sees them: so they are the client's real examples.
        """
        steps, (_, _, size1, size2, fresh) = self.local_steps, self.reading
        visits = self._rounds(client)

        def read(purpose: Purpose, size: int, side: Indices) -> Indices:
            count = steps * size
            if not count or not len(side):
                return np.zeros((steps, size), np.int64)
            return sampling.epochs(self.seed, purpose, client, visits * count, count, len(side)).reshape(steps, size)

        def locate(first: Indices, second: Indices) -> Indices:
            held = self.federation.parts[client]
            sides = ((self.first[client], first), (self.second[client], second))
            return np.concatenate(
                [side[rows] if len(side) else np.resize(held, rows.shape) for side, rows in sides], axis=1
            )

        def lags(pool: _PoolDraws) -> Iterator[Indices]:
            rng = sampling.generator(self.seed, Purpose.POOL, client, round)
            for size, weights in zip((size1, size2), pool, strict=True):
                yield sampling.pooled(rng, steps * size, weights).reshape(steps, size)

        rows = read(Purpose.FIRST, size1, self.first[client])
        lag1, lag2 = lags(pool) if pool else (rows[:, :0], rows[:, :0])
        fresh_rows = read(Purpose.FRESH_FIRST, size1 * fresh, self.first[client])
        return Draws(
            examples=locate(rows, read(Purpose.SECOND, size2, self.second[client])),
            rows=rows,
            lag1=lag1,
            lag2=lag2,
            fresh=locate(fresh_rows, read(Purpose.FRESH_SECOND, size2 * fresh, self.second[client])),
            fresh_rows=fresh_rows,
        )

    def _batches(self, algorithm: RoundOf, server: Any, draws: Draws[Tensor]) -> Iterator[Batch]:
        """The steps' batches; indices have shape [K, B] for one client or [C, K, B] for several.

        All but the examples themselves is gathered for the whole round at once.
        """
        steps = draws.rows.ndim - 2
        y = self.labels[draws.examples]
        passive = algorithm.passive(server, draws.lag1, draws.lag2)
        for k in range(self.local_steps):
            now = Draws(*(indices.select(steps, k) for indices in draws))
            yield Batch(
                x=self._fetch(now.examples),
                y=y.select(steps, k),
                rows=now.rows,
                passive=tree.map(lambda leaf, k=k: leaf.select(steps, k), passive),
                fresh=Fresh(self._fetch(now.fresh), self.labels[now.fresh], now.fresh_rows)
                if self.reading.fresh
                else (),
            )

    def _fetch(self, indices: Tensor) -> Tensor:
        x = self.source.fetch(indices)
        return x.to(self.dtype) if x.is_floating_point() else x


class _PoolDraws(NamedTuple):
    """The pool as `sampling.pooled` takes it: a size where all entries weigh the same, their weights otherwise."""

    first: npt.NDArray[np.float64] | int
    second: npt.NDArray[np.float64] | int


def _as_weights(pool: PoolWeights) -> _PoolDraws:
    def side(weights: Tensor) -> npt.NDArray[np.float64] | int:
        host: npt.NDArray[np.float64] = weights.double().cpu().numpy()
        # One entry of weight 0 stands for an empty pool: draw it, it counts for nothing.
        return len(host) if float(np.ptp(host)) <= 1e-12 * float(host.max()) else host

    return _PoolDraws(side(pool.first), side(pool.second))
