"""The engine of several processes: each runs its share of every cohort, with any executor.

An algorithm's `aggregate` gets updates stacked, one row per client. Of networks each rank holds the rows of its own
clients. A weighted sum over clients (`torch.tensordot`) adds up each rank's part and then the parts. Whatever else is
done to a leaf gathers its rows first. So every rank runs the algorithm's own `aggregate` and gets the same state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.protocol import Assignment, ClientUpdate, ServerState
from fedxl.engine.ranks.team import Team
from fedxl.engine.simulator import ClientStates, Simulator
from fedxl.sampling import Floats, Indices
from fedxl.wire import parts

# What is known of a leaf without its rows.
PROPERTIES = ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")
ABOUT = {getattr(Tensor, name).__get__ for name in PROPERTIES} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.numel),
}


class Rows:
    """Which rank has which rows of a cohort's updates."""

    def __init__(self, team: Team, orders: Sequence[Sequence[int]]) -> None:
        """orders: by rank, which rows of the cohort it has, in the order in which it has them."""
        self.team, self.counts = team, [len(order) for order in orders]
        self.count = sum(self.counts)
        self.mine = torch.tensor(list(orders[team.rank]), dtype=torch.int64)
        # Where each row of the cohort lies once the rows of all ranks stand one after another.
        self.order = torch.argsort(torch.tensor([row for order in orders for row in order]))

    def gathered(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The leaves with all rows, in the order of the cohort, by one message."""
        if not leaves:
            return []
        own = torch.cat([as_bytes(leaf) for leaf in leaves])
        sizes = [row_bytes(leaf) for leaf in leaves]
        parts = self.team.gather(own, [many * sum(sizes) for many in self.counts])
        columns = [part.split([many * size for size in sizes]) for part, many in zip(parts, self.counts, strict=True)]
        whole = []
        for leaf, *pieces in zip(leaves, *columns, strict=True):
            stacked = torch.cat([piece.clone() for piece in pieces]).view(leaf.dtype)
            whole.append(stacked.view(self.count, *leaf.shape[1:])[self.order.to(leaf.device)])
        return whole


class Network:
    """The rows of one network's tensors at this rank."""

    def __init__(self, rows: Rows, leaves: Mapping[str, Tensor]) -> None:
        self.rows, self.leaves = rows, dict(leaves)
        self._weights: Tensor | None = None
        self._sums: dict[str, Tensor] = {}

    def spread(self) -> dict[str, Tensor]:
        return {name: Spread(self, name) for name in self.leaves}

    def summed(self, name: str, weights: Tensor) -> Tensor:
        """The weighted sum of a leaf over all clients. The first call adds up the whole network, in one message."""
        if self._weights is None or not torch.equal(self._weights, weights):
            # In double precision the result hardly depends on which rank had which client.
            own = weights[self.rows.mine.to(weights.device)].double()
            parts = {key: torch.tensordot(own, leaf.double(), 1) for key, leaf in self.leaves.items()}
            total = self.rows.team.total(torch.cat([part.flatten() for part in parts.values()]))
            pieces = total.split([part.numel() for part in parts.values()])
            self._sums = {key: piece.view(parts[key].shape) for key, piece in zip(parts, pieces, strict=True)}
            self._weights = weights.clone()
        return self._sums[name].to(self.leaves[name].dtype)


class Spread(Tensor):
    """A leaf of stacked updates, of which this rank holds the rows of its own clients."""

    network: Network
    name_: str
    whole_: Tensor | None

    @staticmethod
    def __new__(cls, network: Network, name: str) -> Spread:
        own = network.leaves[name]
        shape = (network.rows.count, *own.shape[1:])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name_, self.whole_ = network, name, None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Spread({self.name_}, {self.network.rows.counts})"  # without its numbers, which would be gathered

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in ABOUT:
            return super().__torch_function__(func, types, args, options)  # type: ignore[no-untyped-call]
        if func is Tensor.data_ptr:
            return id(args[0])  # the rows lie in several places; this tells one leaf from another
        if func is torch.tensordot and _weighs(*args, **options):
            return args[1].network.summed(args[1].name_, args[0])
        return func(*_whole(args), **_whole(options))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_whole(args), **_whole(kwargs or {}))

    def whole(self) -> Tensor:
        if self.whole_ is None:
            (self.whole_,) = self.network.rows.gathered([self.network.leaves[self.name_]])
        return self.whole_


def _weighs(first: Any, second: Any, dims: Any = 2, out: Any = None) -> bool:
    """Whether a product is that of weights [C] and rows [C, ...]."""
    plain = type(first) is not Spread and isinstance(first, Tensor) and first.ndim == 1
    return plain and type(second) is Spread and dims == 1 and out is None


def _whole(value: Any) -> Any:
    """Arguments with whole tensors in place of spread ones."""
    if type(value) is Spread:
        return value.whole()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return type(value)(_whole(item) for item in value) if type(value) in (list, tuple) else value


def as_bytes(leaf: Tensor) -> Tensor:
    # A copy: an expanded leaf with one number counts as contiguous and yet cannot be seen as bytes.
    return leaf.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def row_bytes(leaf: Tensor) -> int:
    return math.prod(leaf.shape[1:]) * leaf.element_size()


# Nanoseconds on a CPU core, measured with `benchmarks/ranks.py`. Only their ratios matter, and they are the same at
# all ranks and in every run: a placement by clocks would not be repeated to the bit.
STEP = 1e5  # of a step, whatever the network
FLOP = 0.1  # of an operation
ROW = 1.0  # of an example of S1 in u, which a step copies
BACKWARD = 3  # a step's operations, over those of a forward pass


@dataclass
class Ranked:
    """Runs this rank's part of each round. A client's private state moves to the rank that runs it next."""

    sums: ClassVar[bool] = False
    simulator: Simulator
    team: Team
    costs: Floats  # [clients] of a round
    homes: dict[int, int] = field(default_factory=dict)  # the rank that holds a client's state

    def __post_init__(self) -> None:
        self.simulator.here = lambda cohort: cohort[self._ordered(cohort, self._places(cohort), self.team.rank)]
        self._like: Callable[[int], Any] = lambda client: ()  # a client's state, with the right types and shapes

    def run_round(self, server: ServerState, round: int, cohort: Indices) -> ClientUpdate:
        """The cohort's updates in its order; networks stay where they are, all else is gathered."""
        places = self._places(cohort)
        self._like = lambda client: self.simulator.initial(server, client)
        self._move(cohort, places)
        self.simulator.store.count(int(c) for c, rank in zip(cohort, places, strict=True) if rank != self.team.rank)
        orders = [self._ordered(cohort, places, rank) for rank in range(self.team.size)]
        mine = orders[self.team.rank]
        simulator = self.simulator
        if mine:
            update = simulator.run_round(server, round, cohort[mine], whole=len(cohort))
        else:  # no rows, but the types and shapes of the others'
            share = tree.map(lambda leaf: leaf[0], simulator.shares)
            work = Assignment(share, simulator.schedule.local_steps, simulator.reading)
            like = simulator.algorithm.phase(round).update_like(server, work)
            update = tree.map(lambda leaf: leaf.new_empty(0, *leaf.shape), like)
        return _together(Rows(self.team, orders), update)

    def remarks(self) -> dict[str, Any]:
        return self.simulator.remarks()

    @property
    def population(self) -> ClientStates:
        """All clients' states at rank 0, which writes them down; at other ranks their own."""
        rounds, states = self.simulator.population
        own = _joined([_bytes(state).cpu() for state in states.values()])
        names: list[list[str]] = self.team.heard(list(states))
        likes = [{name: self._like(int(name)) for name in each} for each in names] if self.team.leads else []
        sent = [own if rank == 0 else own[:0] for rank in range(self.team.size)]
        lengths = [sum(map(_size, each.values())) for each in likes] or [0] * self.team.size
        received = self.team.exchange(sent, lengths)
        if not self.team.leads:
            return ClientStates(rounds, states)
        found: dict[str, object] = {}
        for flat, each in zip(received, likes, strict=True):
            found |= zip(each, _states(flat, list(each.values())), strict=True)
        return ClientStates(rounds, {name: found[name] for name in rounds})

    def restore(self, server: ServerState, tensors: dict[str, Tensor]) -> None:
        """Take the states back from a checkpoint, of whatever number of ranks, and keep this rank's."""
        store = self.simulator.store
        self.simulator.restore(server, tensors)
        known = np.array(sorted(store.states), np.int64)
        places = longest_first([self.costs[client] for client in known], self.team.size)
        self.homes = {int(client): rank for client, rank in zip(known, places, strict=True)}
        self._like = lambda client: self.simulator.initial(server, client)
        for client, rank in self.homes.items():
            if rank != self.team.rank:
                del store.states[client]

    def _places(self, cohort: Indices) -> list[int]:
        homes = {i: self.homes[int(c)] for i, c in enumerate(cohort) if int(c) in self.homes}
        return longest_first([self.costs[int(client)] for client in cohort], self.team.size, homes)

    def _ordered(self, cohort: Indices, places: list[int], rank: int) -> list[int]:
        """A rank's rows of the cohort, the costliest first: clients that run together are then alike."""
        rows = [row for row, place in enumerate(places) if place == rank]
        return sorted(rows, key=lambda row: (-self.costs[int(cohort[row])], row))

    def _move(self, cohort: Indices, places: list[int]) -> None:
        """Bring each client's state to the rank that runs it; every rank knows who has what."""
        team, store = self.team, self.simulator.store
        new = {int(client): rank for client, rank in zip(cohort, places, strict=True)}
        moving = [client for client, rank in new.items() if self.homes.get(client, rank) != rank]
        if any(_size(self._like(client)) for client in moving):
            out = [[c for c in moving if self.homes[c] == team.rank and new[c] == rank] for rank in range(team.size)]
            come = [[c for c in moving if new[c] == team.rank and self.homes[c] == rank] for rank in range(team.size)]
            likes = [[self._like(client) for client in each] for each in come]
            sent = [_joined([_bytes(store.states.pop(client)) for client in each]) for each in out]
            received = team.exchange(sent, [sum(map(_size, each)) for each in likes])
            for flat, clients, each in zip(received, come, likes, strict=True):
                store.states.update(zip(clients, _states(flat, each), strict=True))
        else:  # states without any number are the same everywhere
            for client in moving:
                if new[client] == team.rank:
                    store.states[client] = self._like(client)
                if self.homes[client] == team.rank:
                    del store.states[client]
        self.homes |= new


def _together(rows: Rows, update: ClientUpdate) -> ClientUpdate:
    """Updates of all clients: numbers of networks spread over the ranks, all else at every rank."""
    found = {path: part for path, part in parts(update) if isinstance(part, dict)}
    # BatchNorm's counters are no numbers of a network.
    networks = {
        path: {name: leaf for name, leaf in part.items() if leaf.is_floating_point()} for path, part in found.items()
    }
    spread = tree.pack({path: Network(rows, leaves).spread() for path, leaves in networks.items()})
    packed = tree.pack(update)
    others = {path: leaf for path, leaf in packed.items() if path not in spread}
    gathered = dict(zip(others, rows.gathered(list(others.values())), strict=True))
    return tree.unpack(update, spread | gathered)


def _bytes(state: object) -> Tensor:
    return _joined([as_bytes(leaf) for leaf in tree.leaves(state)])


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _size(like: object) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(like))


def _states(flat: Tensor, likes: list[Any]) -> list[Any]:
    """States from their bytes."""
    found = []
    for like, own in zip(likes, flat.split([_size(like) for like in likes]), strict=True):
        leaves = tree.leaves(like)
        pieces = own.split([leaf.numel() * leaf.element_size() for leaf in leaves])
        # Copies: a piece may begin where its type must not.
        whole = (p.clone().view(l.dtype).view(l.shape).to(l.device) for p, l in zip(pieces, leaves, strict=True))
        found.append(tree.rebuild(like, whole))
    return found


def costs(forward: float, batch: int, steps: int, num_first: Sequence[int], padded: bool = False) -> Floats:
    """What a round of each client costs. forward: operations per example. padded: all u have equal length."""
    rows = np.asarray(num_first, np.float64)
    rows = np.full_like(rows, rows.max()) if padded else rows
    return steps * (STEP + BACKWARD * FLOP * forward * batch + ROW * rows)


def longest_first(cost: Sequence[float], ranks: int, homes: Mapping[int, int] | None = None) -> list[int]:
    """The rank of each client: longest processing time first (Graham. SIAM J. Appl. Math. 17, 1969).

    The largest load is at most 4/3 of the least possible one. Among ranks that have equally little to do, a client
    goes to the one that holds its state.

    >>> longest_first([1, 1, 1, 3], 2)
    [1, 1, 1, 0]
    """
    loads, homes, places = [0.0] * ranks, homes or {}, [0] * len(cost)
    for i in sorted(range(len(cost)), key=lambda i: (-cost[i], i)):
        least, home = min(loads), homes.get(i, -1)
        rank = home if home >= 0 and loads[home] <= least * (1 + 1e-12) else loads.index(least)
        places[i] = rank
        loads[rank] += cost[i]
    return places
