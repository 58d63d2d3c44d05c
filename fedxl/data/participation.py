"""Who takes part in which round, a pure function of the seed and the round, and how much each client counts.

uniform: a cohort drawn anew in each round. trace: a cohort among those that a file says are available.

A plan knows its *frequency*: in which share of its rounds each client takes part, on average over the trace and over
draws. Weights p_i / frequency_i make up for it, before they are divided by their sum in a cohort (docs/maths.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl import sampling, tree
from fedxl.data.examples import Weighting
from fedxl.errors import UserError, kind_of, printable, require, require_known
from fedxl.files import read_json
from fedxl.risks.pairing import Share
from fedxl.sampling import Floats, Indices, Purpose

Participation = Literal["uniform", "trace"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A cohort for each round. This one is uniform, or by size if there are chances."""

    num_clients: int
    size: int  # clients per round; 0: all
    seed: int
    chances: Floats | None = None  # of each client to be in a cohort; None: all are alike

    def cohort(self, round: int) -> Indices:
        """The clients of a round, in ascending order."""
        return sampling.cohort(self.seed, round, self.num_clients, self.size, self.chances)

    @property
    def frequency(self) -> Floats:
        """In which share of its rounds each client takes part, on average."""
        if self.chances is not None:
            return self.chances
        return np.full(self.num_clients, min(self.size or self.num_clients, self.num_clients) / self.num_clients)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace(Plan):
    """A cohort among the clients that are available, all of them if they are no more than `size`.

    parts: of the population; if given, clients are drawn in proportion to them, as uniform cohorts are.
    """

    available: Available
    parts: Floats | None = None

    def cohort(self, round: int) -> Indices:
        row = round % len(self.available)
        present = np.flatnonzero(self.available[row])
        if not 0 < self.size < len(present):
            return present
        rng = sampling.generator(self.seed, Purpose.COHORT, 0, round)
        if self.parts is None:
            return np.sort(present[rng.choice(len(present), self.size, replace=False)])
        return sampling.systematic(self.chances_of(row), rng.permutation(self.num_clients), rng.random())

    def chances_of(self, row: int) -> Floats:
        """The probability of each client to be in the cohort of a round of the trace."""
        present: Floats = self.available[row].astype(np.float64)
        many = int(present.sum())
        if not 0 < self.size < many:
            return present
        parts = present if self.parts is None else self.parts * present
        return sampling.inclusion(parts, self.size)

    @property
    def frequency(self) -> Floats:
        total = np.zeros(self.num_clients)
        for row in range(len(self.available)):
            total += self.chances_of(row)
        return total / len(self.available)


Available = npt.NDArray[np.bool_]  # [rounds of the trace, clients]
ROUNDS = "rounds"
# Larger traces are mistakes, and would take long before the first round.
MOST_ROUNDS = 10**5
MOST_ENTRIES = 10**7


def read_trace(path: Path, names: Sequence[str]) -> Available:
    """Who of these clients is available in which round; raises UserError for a file that does not say so."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}, which run.trace names") from None
    for key in content:
        require_known("key", printable(key, 60), [ROUNDS])
    rounds = content.get(ROUNDS)
    require(isinstance(rounds, list) and bool(rounds), f'{path} must read {{"rounds": [[...], ...]}}, not be empty')
    assert isinstance(rounds, list)
    many = len(rounds)
    within = many <= MOST_ROUNDS and many * len(names) <= MOST_ENTRIES
    limits = f"at most {MOST_ROUNDS:,} rounds and {MOST_ENTRIES:,} of rounds times clients"
    require(within, f"{path} has {many:,} rounds of {len(names):,} clients; {limits} are read")
    numbers = {name: number for number, name in enumerate(names)}
    found = np.zeros((many, len(names)), np.bool_)
    for round, row in enumerate(rounds):
        where = f"round {round} of {path}"
        require(isinstance(row, list), f"{where} must be a list of clients, not {kind_of(row)}")
        require(bool(row), f"{where} names nobody; leave such rounds out: without clients there is no round")
        some = [_number(client, numbers, where) for client in row]
        require(len(set(some)) == len(some), f"{where} names a client twice")
        found[round, some] = True
    return found


def _number(client: Any, numbers: dict[str, int], where: str) -> int:
    if isinstance(client, str) and client in numbers:
        return numbers[client]
    if isinstance(client, int) and not isinstance(client, bool):
        require(0 <= client < len(numbers), f"{where} names client {client}, but they are 0 to {len(numbers) - 1}")
        return client
    known = ", ".join([*numbers][:3])
    given = printable(repr(client), 60)
    raise UserError(f"{where} names {given}, which is not a client; clients are {printable(known)}, ... or numbers")


class Weighted(NamedTuple):
    """How much clients count, and how often they take part."""

    shares: Share  # stacked over clients
    chances: Floats | None  # of each client to be in a cohort; None: all are alike


def weigh(num_first: Sequence[int], num_second: Sequence[int], weighting: Weighting, cohort: int = 0) -> Weighted:
    """Shares for cohorts of this size (0: everyone takes part), and the chances that these cohorts are drawn with.

    If cohorts were uniform, and weights by samples were divided by their sum in a cohort, a large client would count
    for less than its part of the population p_i. So `samples` draws cohorts by size, and a client's weight is p_i
    over its chance. Such weights sum to 1 in every cohort, and each is p_i on average.
    """
    share = shares(num_first, num_second, weighting)
    if weighting == "clients" or not 0 < cohort < len(num_first):
        return Weighted(share, None)
    chances = sampling.inclusion(share.part.numpy(), cohort)
    certain = torch.from_numpy(chances == 1)
    others = (1 - share.part[certain].sum()) / max(1, cohort - int(certain.sum()))
    model = torch.where(certain, share.part, torch.where(share.part > 0, others, 0.0))
    return Weighted(_counting(share, model), chances)


def weigh_by(num_first: Sequence[int], num_second: Sequence[int], weighting: Weighting, frequency: Floats) -> Share:
    """Shares for clients that take part in these shares of the rounds: the more rarely, the more it counts then.

    A client that never takes part counts for nothing, and the others make up for it.
    """
    present: list[int] = np.flatnonzero(frequency > 0).tolist()
    some = shares([num_first[i] for i in present], [num_second[i] for i in present], weighting)
    # Only ratios matter. The largest frequency counts as 1, so that if all are alike the shares are the parts.
    often = torch.from_numpy(frequency[present] / frequency.max())
    some = _counting(some, some.part / often)
    index = torch.tensor(present)
    spread = tree.map(lambda leaf: leaf.new_zeros(len(frequency), *leaf.shape[1:]).index_put((index,), leaf), some)
    return spread._replace(client=torch.arange(len(frequency), dtype=torch.float64))


def shares(num_first: Sequence[int], num_second: Sequence[int], weighting: Weighting) -> Share:
    """The weight of each client if all take part; model * factors is its mass, its part of S1 and of S2.

    `clients` is the paper's objective: every client that holds a side counts the same on it. `samples` is the
    objective of the pooled data: a client counts by its examples. Either way a client without S1 has a factor of 0
    there, and the others make up for it, so that the average over clients stays an unbiased gradient of the risk.
    """
    counts = torch.tensor([list(num_first), list(num_second)], dtype=torch.float64)  # [2, N]
    if weighting == "clients":
        model = torch.full((counts.shape[1],), 1 / counts.shape[1], dtype=torch.float64)
        mass = (counts > 0).double()
    else:
        model = counts.sum(0) / counts.sum()
        mass = counts
    mass = mass / mass.sum(1, keepdim=True).clamp(min=1)  # [2, N], each row sums to 1, or is all 0
    factors = torch.where(model > 0, mass / model, torch.zeros_like(mass))
    client = torch.arange(len(model), dtype=torch.float64)
    return _counting(Share(model, model.clone(), client, mass.T, factors.T.contiguous()), model)


def _counting(share: Share, model: Tensor) -> Share:
    """Shares of clients that count by these weights in the average of the models."""
    return share._replace(model=model, mass=model[:, None] * share.factors)
