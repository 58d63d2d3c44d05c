"""What the curious try: a server follows an example through the rounds, a site asks whose scores it reads.

Both know the run's seed, its settings and how many examples each client holds. Everything else they must see.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fedxl import sampling, tree
from fedxl.algorithms.protocol import Reading
from fedxl.engine.drawing import Schedule, draw_lags
from fedxl.risks.pairing import PoolWeights
from fedxl.sampling import Floats, Indices, Purpose

NOBODY = -1


class Upload(NamedTuple):
    """One side of a client's upload. The server sees the values; `examples` is what it would like to know."""

    values: Floats  # [n, columns] of S1 its scores and u, of S2 its scores
    examples: Indices  # [n] of which example each is

    def sorted(self) -> Upload:
        """As the client sends it with order = "sorted"."""
        rows = tree.sorting_order([torch.from_numpy(column) for column in self.values.T]).numpy()
        return Upload(self.values[rows], self.examples[rows])


def rows_by_seed(seed: int, purpose: Purpose, number: int, visits: int, count: int, held: int) -> Indices:
    """Which rows of a side with `held` examples a client reads in its next round, if it draws them from the seed."""
    return sampling.Stream(seed, number).epochs(purpose, visits * count, count, held)


def link_rows(before: Indices, after: Indices) -> Indices:
    """For each entry of the later upload one of the earlier that should be of the same row; NOBODY: there is none."""
    places = {int(row): place for place, row in enumerate(before)}
    return np.array([places.get(int(row), NOBODY) for row in after])


def link_nearest(before: Floats, after: Floats) -> Indices:
    """For each entry of the later upload the nearest of the earlier one. Order plays no part.

    Columns are brought to mean 0 and variance 1, since from round to round all scores move together.
    """
    distance = ((_scaled(after)[:, None] - _scaled(before)[None]) ** 2).sum(2)
    nearest: Indices = distance.argmin(1)
    return nearest


def _scaled(values: Floats) -> Floats:
    scale = values.std(0)
    scaled: Floats = (values - values.mean(0)) / np.where(scale > 0, scale, 1.0)
    return scaled


class Success(NamedTuple):
    """How many of the links that can be right are right, and how many would be if they were drawn at random."""

    right: float
    chance: float


def judge(links: Indices, before: Indices, after: Indices) -> Success:
    """Links against the truth, of the entries whose example is in the earlier upload, too. NaN if there are none."""
    there = np.isin(after, before)
    if not there.any():
        return Success(np.nan, np.nan)
    found = (links != NOBODY) & (before[links] == after)
    shares = (before[None] == after[:, None]).mean(1)
    return Success(float(found[there].mean()), float(shares[there].mean()))


def owners_read(
    schedule: Schedule, reading: Reading, number: int, round: int, pool: PoolWeights, owners: tuple[Indices, Indices],
    secret: int = 0,
) -> tuple[Indices, Indices]:  # fmt: skip
    """Whose scores a client reads in a round, S1's [K, B1] and S2's [K, B2], if they are drawn from this seed."""
    first, second = draw_lags(schedule, reading, number, round, pool, secret)
    return owners[0][first], owners[1][second]
