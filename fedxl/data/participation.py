"""Who takes part in which round: plans, each a pure function of the seed and the round.

uniform: a cohort drawn anew in each round. trace: a cohort among those that a file says are available.

A plan knows its *frequency*: in which share of its rounds each client takes part, on average over the trace and over
draws. Weights p_i / frequency_i make up for it, before they are divided by their sum in a cohort (docs/maths.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedxl import sampling
from fedxl.errors import UserError, kind_of, printable, require, unknown
from fedxl.files import read_json
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
        if key != ROUNDS:
            raise unknown("key", printable(key, 60), [ROUNDS])
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
    raise UserError(f"{where} names {given}, which is no client; clients are {printable(known)}, ... or numbers")
