"""Which client holds which examples: pure functions of labels and a generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedxl.errors import require, unknown
from fedxl.sampling import Indices

Parts = list[Indices]


class Skew(NamedTuple):
    """How far clients differ. Each partition reads its own part of this."""

    alpha: float = 0.5  # of dirichlet and quantity
    one_class: int = 0  # of one_class: how many clients hold one class only


def equal(labels: Indices, clients: int, rng: np.random.Generator, skew: Skew) -> Parts:
    """Shuffled shards of equal size, as in the FeDXL paper."""
    return np.array_split(rng.permutation(len(labels)), clients)


def dirichlet(labels: Indices, clients: int, rng: np.random.Generator, skew: Skew) -> Parts:
    """Label skew: clients hold shares of each class that are drawn from Dirichlet(alpha).

    Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification
    (2019), in the form of Yurochkin et al. (ICML 2019), which hands out every example. A small alpha leaves clients
    with one class; a large one gives all the same share.
    """
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        ends = np.rint(np.cumsum(rng.dirichlet(np.full(clients, skew.alpha))) * len(members))
        ends[-1] = len(members)  # exact, despite rounding of the sum
        owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return _nobody_empty([rng.permutation(np.flatnonzero(owner == client)) for client in range(clients)])


def quantity(labels: Indices, clients: int, rng: np.random.Generator, skew: Skew) -> Parts:
    """Quantity skew: the sizes of clients are drawn from Dirichlet(alpha), regardless of class.

    Li et al., Federated Learning on Non-IID Data Silos (ICDE 2022).
    """
    ends = np.rint(np.cumsum(rng.dirichlet(np.full(clients, skew.alpha))) * len(labels)).astype(int)
    return _nobody_empty(np.split(rng.permutation(len(labels)), ends[:-1]))


def one_class(labels: Indices, clients: int, rng: np.random.Generator, skew: Skew) -> Parts:
    """Equal shards, after which the first `one_class` clients trade in pairs: one takes the positives, one the rest.

    All other clients hold what they hold with equal shards, so that the number of one-class clients is all that
    changes. 0 is `equal` itself.
    """
    check_one_class(skew.one_class, clients)
    parts = equal(labels, clients, rng, skew)
    for first in range(0, skew.one_class, 2):
        both = np.concatenate(parts[first : first + 2])
        positive = labels[both] == 1
        require(
            bool(positive.any() and not positive.all()),
            f"clients {first} and {first + 1} hold one class between them and cannot trade; use fewer clients",
        )
        parts[first : first + 2] = [both[positive], both[~positive]]
    return parts


def check_one_class(count: int, clients: int) -> None:
    require(
        count % 2 == 0 and 0 <= count <= clients,
        f"one_class must be an even number from 0 to the number of clients, {clients}, got {count}",
    )


def _nobody_empty(parts: Parts) -> Parts:
    """Give each empty client one example of the client that holds the most."""
    parts = list(parts)
    for client, part in enumerate(parts):
        if not len(part):
            richest = max(range(len(parts)), key=lambda other: len(parts[other]))
            parts[richest], parts[client] = parts[richest][:-1], parts[richest][-1:]
    return parts


PARTITIONS: Mapping[str, Callable[[Indices, int, np.random.Generator, Skew], Parts]] = {
    "equal": equal,
    "dirichlet": dirichlet,
    "quantity": quantity,
    "one_class": one_class,
}


def partition(
    name: str, labels: Indices, clients: int, rng: np.random.Generator, alpha: float, one_class: int = 0
) -> Parts:
    """Assign each example to exactly one client, and at least one example to each client.

    >>> labels = np.array([0, 0, 0, 0, 1, 1])
    >>> [len(part) for part in partition("equal", labels, 3, np.random.default_rng(0), alpha=1.0)]
    [2, 2, 2]
    """
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    require(clients <= len(labels), f"there are {clients} clients for only {len(labels)} training examples")
    return PARTITIONS[name](labels, clients, rng, Skew(alpha, one_class))


def only_first(present: int, examples: Sequence[Tensor], parts: Parts) -> tuple[list[Tensor], Parts]:
    """Keep only the first `present` clients (0: all): their examples, renumbered, and which client holds which."""
    require(
        0 <= present <= len(parts),
        f"present must lie between 0 (all) and the number of clients, {len(parts)}, got {present}",
    )
    if present in (0, len(parts)):
        return list(examples), parts
    parts = parts[:present]
    kept, ends = torch.from_numpy(np.concatenate(parts)), np.cumsum([len(part) for part in parts])
    return [leaf[kept] for leaf in examples], np.split(np.arange(ends[-1]), ends[:-1])
