"""Who takes part in which round: plans, each a pure function of the seed and the round.

uniform: a cohort drawn anew in each round. trace: a cohort among those that a file says are available.

A plan knows its *frequency*: in which share of its rounds each client takes part, on average over the trace and over
draws. Whatever it is, weights p_i / frequency_i make client i count p_i on average (docs/maths.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedxl import sampling
from fedxl.data.availability import Available
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
