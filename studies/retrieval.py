"""Ranking data that can be made anywhere: a search for similar digits, and synthetic queries with known utilities.

Five archives hold the documents. A query goes to all of them, so its items lie at several clients; which archive an
item is in says something of what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl.data.examples import Splits
from fedxl.data.inputs import from_queries
from fedxl.sampling import Indices

ARCHIVES = 5
GROUPS = np.array([0, 1, 2, 2, 3, 4, 0, 1, 4, 3])  # of each digit: 0 and 6, 1 and 7, 2 and 3, 4 and 9, 5 and 8
Floats = npt.NDArray[np.float64]


class Items(NamedTuple):
    """Items of queries, and what they would be ranked by if the truth were known."""

    x: Floats  # [n, features]
    grades: Indices
    queries: Indices
    kinds: Indices  # which archive would collect such items
    utility: Floats

    @property
    def ranked(self) -> tuple[Floats, Indices, Indices]:
        return self.x.astype(np.float32), self.grades, self.queries


def digits(rng: np.random.Generator, queries: tuple[int, ...] = (100, 40, 80), length: int = 30) -> list[Items]:
    """Images like the one that is asked for: grade 2 for the same digit, 1 for one that is mistaken for it.

    For training, validation and test. No image is in two of them. Features are how far each pixel of an item is from
    the query's.
    """
    from sklearn.datasets import load_digits

    found, made = load_digits(), []
    images, target = found.data / 16, found.target
    for count, pool in zip(queries, np.array_split(rng.permutation(len(images)), len(queries)), strict=True):
        asked = rng.choice(pool, count)
        rows = np.stack(
            [rng.choice(np.setdiff1d(pool, [one]), length, replace=False) for one in asked]
        )  # [q, length]
        same, alike = target[rows] == target[asked][:, None], GROUPS[target[rows]] == GROUPS[target[asked]][:, None]
        grades = (same.astype(np.int64) + alike).ravel()
        x = np.abs(images[rows] - images[asked][:, None]).reshape(-1, images.shape[1])
        made.append(Items(x, grades, _numbers(count, length), GROUPS[target[rows]].ravel(), grades.astype(float)))
    return made


def synthetic(rng: np.random.Generator, queries: tuple[int, ...] = (100, 40, 80), length: int = 30) -> list[Items]:
    """Items with utilities: a function of ten features, the kind of item, and how hard the query is.

    Grades 0 to 3 are places of the utility with noise within its query, so that they say nothing across queries. Half
    of the features tell how hard the query is, which does not matter for the order of its items.
    """
    mix, kind_means = rng.normal(size=(10, 10)) / 10**0.5, rng.normal(size=(ARCHIVES, 10))
    made = []
    for count in queries:
        kinds = rng.integers(0, ARCHIVES, (count, length))
        own = rng.normal(size=(count, length, 10)) + kind_means[kinds]
        hard = rng.normal(size=(count, 1, 10))
        hidden = np.tanh(own @ mix)
        utility = hidden.sum(-1) + own[..., 0]
        noisy = utility + 0.5 * rng.normal(size=utility.shape)
        place = (-noisy).argsort(1).argsort(1) / length
        grades = np.select([place < 0.05, place < 0.15, place < 0.35], [3, 2, 1], 0)
        x = np.concatenate((own + hard, np.broadcast_to(hard, own.shape)), -1) + 0.1 * rng.normal(size=(20,))
        flat = (x.reshape(-1, 20), grades.ravel().astype(np.int64), _numbers(count, length))
        made.append(Items(*flat, kinds.ravel(), utility.ravel()))
    return made


def _numbers(count: int, length: int) -> Indices:
    return np.repeat(np.arange(count), length)


def by_query(items: Items) -> Indices:
    """Whole queries at clients."""
    return items.queries % ARCHIVES


def by_kind(items: Items) -> Indices:
    """Each query's items at all clients, by what they are."""
    return items.kinds


SPREADS = {"whole queries": by_query, "items by kind": by_kind}
DATA = {"digits": digits, "synthetic": synthetic}


def federate(made: list[Items], spread: str) -> Splits:
    """The archives as clients; validation and test queries are of all of them together."""
    train, of = made[0], SPREADS[spread](made[0])
    clients: Mapping[str, tuple[Floats, Indices, Indices]] = {
        f"archive {client}": tuple(leaf[of == client] for leaf in train.ranked) for client in range(ARCHIVES)
    }
    return from_queries(clients, made[1].ranked, made[2].ranked)
