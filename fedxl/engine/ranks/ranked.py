"""The engine of several processes: each runs its share of every cohort, with any executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedxl import tree
from fedxl.algorithms.protocol import Assignment, ClientUpdate, ServerState
from fedxl.engine.ranks.spread import Network, Rows, as_bytes
from fedxl.engine.ranks.team import Team
from fedxl.engine.simulator import ClientStates, Simulator
from fedxl.sampling import Floats, Indices
from fedxl.wire import parts

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
        if mine:
            update = self.simulator.run_round(server, round, cohort[mine], whole=len(cohort))
        else:
            update = self._nothing(server, round)
        return _together(Rows(self.team, orders), update)

    def remarks(self) -> dict[str, Any]:
        return self.simulator.remarks()

    @property
    def population(self) -> ClientStates:
        """All clients' states at rank 0, which writes them down; at other ranks their own."""
        rounds, states = self.simulator.store.packed
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
        known = np.array(sorted(store.known), np.int64)
        places = longest_first([self.costs[client] for client in known], self.team.size)
        self.homes = {int(client): rank for client, rank in zip(known, places, strict=True)}
        self._like = lambda client: self.simulator.initial(server, client)
        for client, rank in self.homes.items():
            if rank != self.team.rank:
                store.take(client)

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
            sent = [_joined([_bytes(store.take(client)) for client in each]) for each in out]
            received = team.exchange(sent, [sum(map(_size, each)) for each in likes])
            for flat, clients, each in zip(received, come, likes, strict=True):
                store.bring(dict(zip(clients, _states(flat, each), strict=True)))
        else:  # states without any number are the same everywhere
            here = [client for client in moving if new[client] == team.rank]
            store.bring({client: self._like(client) for client in here})
            for client in moving:
                if self.homes[client] == team.rank:
                    store.take(client)
        self.homes |= new

    def _nothing(self, server: ServerState, round: int) -> ClientUpdate:
        """The updates of a rank without clients: no rows, but the types and shapes of the others'."""
        simulator = self.simulator
        share = tree.map(lambda leaf: leaf[0], simulator.shares)
        phase, steps = simulator.algorithm.phase(round), simulator.schedule.local_steps
        like = phase.update_like(server, Assignment(share, steps, simulator.reading))
        none: ClientUpdate = tree.map(lambda leaf: leaf.new_empty(0, *leaf.shape), like)
        return none


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


def operations(model: nn.Module, probe: Tensor) -> float:
    """Multiplications and additions of a forward pass per example."""
    from torch.utils.flop_counter import FlopCounterMode

    training = model.training
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(probe)
    model.train(training)
    return float(counter.get_total_flops()) / len(probe)


def longest_first(cost: Sequence[float], ranks: int, homes: Mapping[int, int] | None = None) -> list[int]:
    """The rank of each client: longest processing time first (Graham. SIAM J. Appl. Math. 17, 1969).

    The largest load is at most 4/3 of the least possible one. Among ranks that have equally little to do, a client
    goes to the one that holds its state.

    >>> longest_first([1, 1, 1, 3], 2)
    [1, 1, 1, 0]
    """
    loads, homes = [0.0] * ranks, homes or {}
    places = [0] * len(cost)
    for i in sorted(range(len(cost)), key=lambda i: (-cost[i], i)):
        least = min(loads)
        home = homes.get(i, -1)
        rank = home if home >= 0 and loads[home] <= least * (1 + 1e-12) else loads.index(least)
        places[i] = rank
        loads[rank] += cost[i]
    return places
