"""The in-process engine: a population of clients on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl import sampling, tree
from fedxl.algorithm import Algorithm, Batch, Fresh, PoolWeights, Reading, RoundOf, Share
from fedxl.data.federation import Federation, Weighting, shares
from fedxl.data.source import Source
from fedxl.engine.wave import Draws, Executor, Feed, Wave
from fedxl.precision import PRECISIONS, products
from fedxl.sampling import Indices, Purpose

CPU = torch.device("cpu")


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
    precision: str = "fp32"

    def __post_init__(self) -> None:
        self.reading: Reading = self.algorithm.reading(self.batch1, self.batch2)
        self.source: Source = self.federation.source.to(self.device)
        self.labels = self.source.labels.to(self.dtype)
        self.first = self.federation.side(self.reading.first)
        self.second = self.federation.side(self.reading.second)
        first, second = ([len(part) for part in parts] for parts in (self.first, self.second))
        counted = shares(first, second, self.weighting)
        self.shares: Share = tree.map(lambda leaf: leaf.to(self.device, self.dtype), counted)
        self.roomiest = max(first)
        self.population = Population({}, {})
        self._ahead: dict[tuple[int, int, int], Draws[Indices]] = {}

    def run_round(self, algorithm: RoundOf, server: Any, round: int, cohort: Indices) -> Any:
        """The cohort's updates, stacked in its order. Private states change only once all of them are done."""
        size = self.clients_at_once or len(cohort)
        pool = algorithm.pool_weights(server)
        pool_draws = None if pool is None else _as_weights(pool)
        states: dict[str, Any] = {}
        updates = []
        for begin in range(0, len(cohort), size):
            members = [int(client) for client in cohort[begin : begin + size]]
            wave = self._wave(algorithm, server, round, members, pool_draws)
            # Of the steps alone: averages are always taken in full precision.
            with products(PRECISIONS[self.precision]):
                clients, update = self.executor(algorithm, server, wave)
            states |= {str(member): client for member, client in zip(members, clients, strict=True)}
            # An executor may use the memory of its last updates again.
            updates.append(update if size >= len(cohort) else tree.map(torch.clone, update))
        counts = {str(client): torch.tensor(self._rounds(client) + 1) for client in map(int, cohort)}
        self.population = Population(self.population.rounds | counts, self.population.states | states)
        self._draw_ahead(round + 1, len(cohort))
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
        each, index = [self.draw(client, round, pool) for client in members], self._device(np.array(members))
        draws = Draws(*(self._device(np.stack(arrays)) for arrays in zip(*each, strict=True)))
        # All but the examples themselves is gathered for the whole round at once.
        passive = algorithm.passive(server, draws.lag1, draws.lag2)
        return Wave(
            clients=[self._state(server, client) for client in members],
            roomiest=self.algorithm.init_client(server, self.roomiest),
            shares=tree.map(lambda leaf: leaf[index], self.shares),
            feed=Feed(draws, self.labels[draws.examples], passive),
            batch=self._batch,
            seed=lambda i: sampling.torch_seed(self.seed, Purpose.LAYERS, members[i], round),
            recurs=algorithm is self.algorithm,
        )

    def _device(self, indices: Indices) -> Tensor:
        tensor = torch.from_numpy(indices)
        if self.device.type != "cuda":
            return tensor.to(self.device)
        # From pinned memory, so that the next round's draws are on their way while this one is still running.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def draw(self, client: int, round: int, pool: _PoolDraws | None) -> Draws[Indices]:
        """All of a client's draws for a round."""
        key = (client, round, self._rounds(client))
        draws = self._ahead.pop(key, None) or self._draw_own(*key)
        if pool is None:
            return draws
        rng = sampling.generator(self.seed, Purpose.POOL, client, round)
        lag1, lag2 = (
            sampling.pooled(rng, self.local_steps * size, weights).reshape(self.local_steps, size)
            for size, weights in zip(self.reading[2:4], pool, strict=True)
        )
        return draws._replace(lag1=lag1, lag2=lag2)

    def _draw_own(self, client: int, round: int, visits: int) -> Draws[Indices]:
        """Which of its own examples a client reads. A side without examples is filled with the other side's.

        Stand-ins count for nothing in the gradient, but BatchNorm sees them: so they are the client's real examples.
        """
        steps, (_, _, size1, size2, fresh) = self.local_steps, self.reading

        def read(purpose: Purpose, size: int, side: Indices) -> Indices:
            count = steps * size
            if not count or not len(side):
                return np.zeros((steps, size), np.int64)
            return sampling.epochs(self.seed, purpose, client, visits * count, count, len(side)).reshape(steps, size)

        def locate(first: Indices, second: Indices) -> Indices:
            held = self.federation.parts[client]
            sides = ((self.first[client], first), (self.second[client], second))
            located = [side[rows] if len(side) else np.resize(held, rows.shape) for side, rows in sides if rows.size]
            return np.concatenate(located, axis=1) if len(located) > 1 else located[0]

        rng = sampling.generator(self.seed, Purpose.AUGMENT, client, round) if self.source.codes > 1 else None
        rows = read(Purpose.FIRST, size1, self.first[client])
        examples = locate(rows, read(Purpose.SECOND, size2, self.second[client]))
        codes, none = sampling.codes(rng, examples.shape, self.source.codes), rows[:, :0]
        draws = Draws(examples, codes, rows, none, none, none, none, none)
        if not fresh:
            return draws
        rows = read(Purpose.FRESH_FIRST, size1, self.first[client])
        examples = locate(rows, read(Purpose.FRESH_SECOND, size2, self.second[client]))
        codes = sampling.codes(rng, examples.shape, self.source.codes)
        return draws._replace(fresh=examples, fresh_codes=codes, fresh_rows=rows)

    def _draw_ahead(self, round: int, size: int) -> None:
        """Draw for a round to come. A GPU is still at work on this one, and will not have to wait for the host."""
        members = sampling.cohort(self.seed, round, len(self.federation.parts), size)
        keys = [(client, round, self._rounds(client)) for client in map(int, members)]
        self._ahead = {key: self._draw_own(*key) for key in keys}

    def _batch(self, now: Feed) -> Batch:
        """One step's examples, of a client [B, ...] or of several [C, B, ...]."""
        draws, fresh = now.draws, None
        x = self._fetch(draws.examples, draws.codes)
        if self.reading.fresh:
            fresh = Fresh(self._fetch(draws.fresh, draws.fresh_codes), self.labels[draws.fresh], draws.fresh_rows)
        return Batch(x, now.y, draws.rows, now.passive, fresh or ())

    def _fetch(self, indices: Tensor, codes: Tensor) -> Tensor:
        x = self.source.fetch(indices, codes)
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
