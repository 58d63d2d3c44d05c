"""The in-process engine: a population of clients on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl import sampling, tree
from fedxl.algorithms.protocol import Algorithm, Batch, Fresh, PoolWeights, Reading, RoundOf, Share
from fedxl.data.federation import Federation, Weighting, shares
from fedxl.data.source import Source, floats_as
from fedxl.engine.wave import Draws, Executor, Feed, Wave
from fedxl.models.precision import PRECISIONS, products
from fedxl.sampling import Indices, Purpose
from fedxl.wire import RefusedError, fitted

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
    first_number: int = 0  # of the first client: draws are those of its number, wherever it runs
    told_shares: Share | None = None  # how much each client counts among others than these; None: see `weighting`

    def __post_init__(self) -> None:
        self.reading: Reading = self.algorithm.reading(self.batch1, self.batch2)
        self.source: Source = self.federation.source.to(self.device)
        self.labels = self.source.labels.to(self.dtype)
        self.first = self.federation.side(self.reading.first)
        self.second = self.federation.side(self.reading.second)
        first, second = ([len(part) for part in parts] for parts in (self.first, self.second))
        counted = self.told_shares or shares(first, second, self.weighting)
        self.shares: Share = tree.map(lambda leaf: leaf.to(self.device, self.dtype), counted)
        self.largest_state = max(first)
        self._rounds: dict[int, int] = {}
        self._states: dict[int, Any] = {}
        self._ahead = _Ahead({}, None, {})

    def run_round(self, algorithm: RoundOf, server: Any, round: int, cohort: Indices) -> Any:
        """The cohort's updates, stacked in its order. Private states change only once all of them are done."""
        size = self.clients_at_once or len(cohort)
        pool = algorithm.pool_weights(server)
        pool_draws = None if pool is None else _as_weights(pool)
        states: dict[int, Any] = {}
        updates = []
        for begin in range(0, len(cohort), size):
            members = [int(client) for client in cohort[begin : begin + size]]
            wave = self._wave(algorithm, server, round, members, pool_draws)
            # Of the steps alone: averages are always taken in full precision.
            with products(PRECISIONS[self.precision]):
                clients, update = self.executor(algorithm, server, wave)
            states |= zip(members, clients, strict=True)
            # An executor may use the memory of its last updates again.
            updates.append(update if size >= len(cohort) else tree.map(torch.clone, update))
        self._rounds.update({client: self._rounds.get(client, 0) + 1 for client in map(int, cohort)})
        self._states.update(states)
        self._draw_ahead(round + 1, len(cohort), pool_draws)
        return updates[0] if len(updates) == 1 else tree.concat(updates)

    def restore(self, server: Any, tensors: dict[str, Tensor]) -> None:
        """Take the population back from a checkpoint; `wire.RefusedError` if it is not that of these clients."""
        members = [name.removeprefix("rounds.") for name in tensors if name.startswith("rounds.")]
        known = {str(client) for client in range(len(self.first))}
        if not known.issuperset(members):
            raise RefusedError(f"it holds clients that are not among these {len(known)}")
        like = {name: self.algorithm.init_client(server, len(self.first[int(name)])) for name in members}
        none = torch.zeros((), dtype=torch.int64)
        rounds, states = fitted(Population(dict.fromkeys(members, none), like), tensors)
        self._rounds = {int(name): int(number) for name, number in rounds.items()}
        self._states = {int(name): tree.to(state, self.device) for name, state in states.items()}

    def remarks(self) -> dict[str, Any]:
        """What there is to say about the rounds since it was last asked: nothing ever goes wrong in here."""
        return {}

    @property
    def population(self) -> Population:
        rounds = {str(client): torch.tensor(number) for client, number in self._rounds.items()}
        return Population(rounds, {str(client): state for client, state in self._states.items()})

    def _state(self, server: Any, client: int) -> Any:
        state = self._states.get(client)
        return self.algorithm.init_client(server, len(self.first[client])) if state is None else state

    def _wave(self, algorithm: RoundOf, server: Any, round: int, members: list[int], pool: _PoolDraws | None) -> Wave:
        each, index = [self.draw(client, round, pool) for client in members], self._device(np.array(members))
        draws = self._upload([np.stack(arrays) for arrays in zip(*each, strict=True)])
        # All but the examples themselves is gathered for the whole round at once.
        passive = algorithm.passive(server, draws.lag1, draws.lag2)
        return Wave(
            clients=[self._state(server, client) for client in members],
            largest_state=lambda: self.algorithm.init_client(server, self.largest_state),
            shares=tree.map(lambda leaf: leaf[index], self.shares),
            feed=Feed(draws, self.labels[draws.examples], passive),
            batch=self._batch,
            seed=lambda i: sampling.torch_seed(self.seed, Purpose.LAYERS, self.first_number + members[i], round),
            recurs=algorithm is self.algorithm,
        )

    def _upload(self, arrays: list[Indices]) -> Draws[Tensor]:
        """All draws of a wave in one transfer."""
        flat = self._device(np.concatenate([array.ravel() for array in arrays]))
        pieces = flat.split([array.size for array in arrays])
        return Draws(*(piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True)))

    def _device(self, indices: Indices) -> Tensor:
        tensor = torch.from_numpy(indices)
        if self.device.type != "cuda":
            return tensor.to(self.device)
        # From pinned memory, so that the next round's draws are on their way while this one is still running.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def draw(self, client: int, round: int, pool: _PoolDraws | None) -> Draws[Indices]:
        """All of a client's draws for a round."""
        key = (client, round, self._rounds.get(client, 0))
        draws = self._ahead.own.pop(key, None) or self._draw_own(*key)
        if pool is None:
            return draws
        ahead = self._ahead.lags.get((client, round)) if _even(pool) and self._ahead.pool == pool else None
        lag1, lag2 = ahead or self._draw_lags(client, round, pool)
        return draws._replace(lag1=lag1, lag2=lag2)

    def _draw_lags(self, client: int, round: int, pool: _PoolDraws) -> tuple[Indices, Indices]:
        """Which entries of the pool a client's steps read, S1's and S2's."""
        rng, (size1, size2), steps = self._stream(Purpose.POOL, client, round), self.reading[2:4], self.local_steps
        first = sampling.pooled(rng, steps * size1, pool.first).reshape(steps, size1)
        return first, sampling.pooled(rng, steps * size2, pool.second).reshape(steps, size2)

    def _stream(self, purpose: Purpose, client: int, round: int) -> np.random.Generator:
        return sampling.generator(self.seed, purpose, self.first_number + client, round)

    def _draw_own(self, client: int, round: int, visits: int) -> Draws[Indices]:
        """Which of its own examples a client reads. A side without examples is filled with the other side's.

        Stand-ins count for nothing in the gradient, but BatchNorm sees them: so they are the client's real examples.
        """
        steps, (_, _, size1, size2, fresh) = self.local_steps, self.reading

        def read(purpose: Purpose, size: int, side: Indices) -> Indices:
            count = steps * size
            if not count or not len(side):
                return np.zeros((steps, size), np.int64)
            number, begin = self.first_number + client, visits * count
            return sampling.epochs(self.seed, purpose, number, begin, count, len(side)).reshape(steps, size)

        def locate(first: Indices, second: Indices) -> Indices:
            held = self.federation.parts[client]
            sides = ((self.first[client], first), (self.second[client], second))
            located = [side[rows] if len(side) else np.resize(held, rows.shape) for side, rows in sides if rows.size]
            return np.concatenate(located, axis=1) if len(located) > 1 else located[0]

        rng = self._stream(Purpose.AUGMENT, client, round) if self.source.codes > 1 else None
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

    def _draw_ahead(self, round: int, size: int, pool: _PoolDraws | None) -> None:
        """Draw for a round to come. A GPU is still at work on this one, and will not have to wait for the host.

        What the pool will be is not known yet; if all its entries weigh the same, it will mostly be as it was.
        """
        members = [int(client) for client in sampling.cohort(self.seed, round, len(self.federation.parts), size)]
        keys = [(client, round, self._rounds.get(client, 0)) for client in members]
        own = {key: self._draw_own(*key) for key in keys}
        likely = pool if pool is not None and _even(pool) else None
        lags = {(client, round): self._draw_lags(client, round, likely) for client in members} if likely else {}
        self._ahead = _Ahead(own, likely, lags)

    def _batch(self, now: Feed) -> Batch:
        """One step's examples, of a client [B, ...] or of several [C, B, ...]."""
        draws, fresh = now.draws, None
        x = self._fetch(draws.examples, draws.codes)
        if self.reading.fresh:
            fresh = Fresh(self._fetch(draws.fresh, draws.fresh_codes), self.labels[draws.fresh], draws.fresh_rows)
        return Batch(x, now.y, draws.rows, now.passive, fresh or ())

    def _fetch(self, indices: Tensor, codes: Tensor) -> Tensor:
        return floats_as(self.source.fetch(indices, codes), self.dtype)


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


def _even(pool: _PoolDraws) -> bool:
    """Whether all entries of either side weigh the same."""
    return isinstance(pool.first, int) and isinstance(pool.second, int)


class _Ahead(NamedTuple):
    """What was drawn for the next round while this one was running."""

    own: dict[tuple[int, int, int], Draws[Indices]]  # by client, round and how often the client took part
    pool: _PoolDraws | None  # what the pool was taken for
    lags: dict[tuple[int, int], tuple[Indices, Indices]]  # by client and round
