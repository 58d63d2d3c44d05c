"""Which rows are trained on and which are held back, and who holds them where a federation is simulated.

Splits of tables are drawn by group, alike at every site and in both classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl.data.examples import NOTHING, UNKNOWN, Augment, Examples, Splits
from fedxl.errors import printable, require, require_known
from fedxl.sampling import Floats, Indices, Purpose, generator

if TYPE_CHECKING:
    from fedxl.data.tables.prepare import Preparation

TRAIN, VALIDATION, TEST = range(3)
SPLITS = ("train", "validation", "test")
WORDS = {
    "train": TRAIN, "training": TRAIN,
    "validation": VALIDATION, "valid": VALIDATION, "val": VALIDATION, "dev": VALIDATION,
    "test": TEST, "testing": TEST, "holdout": TEST,
}  # fmt: skip
Codes = npt.NDArray[np.int8]
Whole = npt.NDArray[np.int32]  # half of what int64 takes, for millions of rows


class Stream(IntEnum):
    """The random choices, each with its own stream, so that one setting does not change the draws of another."""

    HOLD_BACK = 2
    IMBALANCE = 3
    PARTITION = 4
    CORRUPT = 5
    TABLE = 6
    KNOWN = 7


@dataclass(frozen=True)
class Shares:
    """What is held back of rows, where nothing else says so."""

    validation: float = 0.2  # the share to draw
    test: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.seed >= 0, f"seed must not be negative, got {self.seed}")
        for name, share in (("validation", self.validation), ("test", self.test)):
            require(0 <= share < 1, f"{name} must be a share in [0, 1), got {share}")
        both = self.validation + self.test
        require(both < 1, f"validation and test are {both:g} of all rows; nothing is left")


def draw(
    sites: Whole, labels: Codes, groups: Whole | None, names: Sequence[str], shares: tuple[float, float], seed: int
) -> Codes:
    """The split of every row; a group is in one split as a whole.

    shares: of validation and test. A site's draws depend on its own rows and its name alone: it draws the same by
    itself as among others. A group that is at two sites is drawn where its first row is.
    """
    if groups is None:  # each row by itself
        owner, at, positive, sizes = None, sites, labels == 1, np.broadcast_to(np.int64(1), len(labels))
    else:
        # Groups are numbered in the order of their first rows, so sorting by number is sorting by first row.
        _, first, owner, sizes = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
        at, positive = sites[first], np.zeros(len(first), bool)
        positive[owner[labels == 1]] = True
    chosen = np.zeros(len(at), np.int8)
    # numpy sorts short numbers ten times as fast.
    order = np.argsort(at.astype(np.uint16) if len(names) < 2**16 else at, kind="stable").astype(np.int32)
    edges = np.searchsorted(at[order], np.arange(len(names) + 1))
    for site, name in enumerate(names):
        # A stream of its name, for its place among others may differ.
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
        rng = generator(seed, Purpose.DATA, number, Stream.TABLE)
        members = order[edges[site] : edges[site + 1]]
        for stratum in (members[~positive[members]], members[positive[members]]):
            drawn = rng.permutation(stratum)
            for split, some in zip((TEST, VALIDATION), _by_share(drawn, sizes[drawn], shares), strict=True):
                chosen[some] = split
    return chosen if owner is None else chosen[owner]


def _by_share(drawn: Whole, sizes: Indices, shares: tuple[float, float]) -> tuple[Whole, Whole]:
    """Test and validation: groups in a random order lie on a line, each as long as it has rows. Its middle counts."""
    ends = np.cumsum(sizes)
    place = (ends - sizes / 2) / ends[-1] if len(ends) else ends.astype(float)
    validation, test = shares
    first, second = np.searchsorted(place, (test, test + validation))  # places ascend
    return drawn[:first], drawn[first:second]


def in_order(sites: Whole, names: list[str]) -> tuple[Whole, list[str]]:
    """Sites by name, or by number if all are numbers, whatever the order of rows and files."""
    numbers = all(name.isdecimal() for name in names)
    order = sorted(range(len(names)), key=lambda at: (int(names[at]) if numbers else 0, names[at]))
    place = np.empty(len(names), np.int32)
    place[order] = np.arange(len(names))
    return place[sites], [names[at] for at in order]


def sites_of(texts: Sequence[str]) -> tuple[Whole, list[str]]:
    """The site of each row, and the sites' names in order."""
    names, at = np.unique(np.array(texts), return_inverse=True)
    return in_order(at.astype(np.int32), names.tolist())


class Order:
    """Rows sorted by split, then by site: each site's training rows lie together, and each split does."""

    def __init__(self, splits: Codes, sites: Whole, names: Sequence[str]) -> None:
        key = splits.astype(np.int32) * len(names) + sites
        if len(SPLITS) * len(names) < 2**16:
            key = key.astype(np.uint16)  # numpy sorts short numbers ten times as fast
        self.rows = np.argsort(key, kind="stable").astype(np.int32)  # the row of the file at each place
        self.edges = np.searchsorted(key[self.rows], np.arange(len(SPLITS) * len(names) + 1))
        self.names = list(names)

    def part(self, site: int, split: int = TRAIN) -> slice:
        at = split * len(self.names) + site
        return slice(int(self.edges[at]), int(self.edges[at + 1]))

    def split(self, split: int) -> slice:
        return slice(self.part(0, split).start, self.part(len(self.names) - 1, split).stop)

    def require_trained(self) -> None:
        """Raises UserError if a site has no training rows."""
        trained = np.diff(self.edges[: len(self.names) + 1])
        without = [name for name, rows in zip(self.names, trained, strict=True) if not rows]
        told = f"no row of site '{printable(''.join(without[:1]))}' is trained on; give it some, or leave it out"
        require(not without, told)


def assemble(
    order: Order, split: int, x: Tensor, y: Codes, ids: Callable[[Whole], Sequence[str]],
    known: Mapping[str, np.ndarray],
) -> Examples | None:  # fmt: skip
    """A split of rows that are in order already; None if it has none.

    y [n, L], ids and known, other columns of the record, are in the order of the file. Only training has weights.
    """
    where = order.split(split)
    rows = order.rows[where]
    if not len(rows):
        return None
    first, count = split * len(order.names), len(order.names)
    site = np.repeat(np.arange(count), np.diff(order.edges[first : first + count + 1]))
    read = {name: column[rows] for name, column in known.items() if name != "weight" or split == TRAIN}
    columns: dict[str, Any] = {name: torch.from_numpy(wide(column)) for name, column in read.items()}
    labels = torch.from_numpy(y[rows].astype(np.int64))
    return Examples(x[where], labels, site, tuple(order.names), row=ids(rows) if split else (), **columns)


def wide(column: np.ndarray) -> np.ndarray:
    """Whole numbers as those of the record; in fewer bytes while a table is read."""
    return column.astype(np.int64) if column.dtype.kind == "i" else column


def all_splits(order: Order, made: Preparation | None, *columns: Any) -> Splits:
    """All splits. columns: those of `assemble`. Raises UserError if a site has no training rows."""
    order.require_trained()
    train, validation, test = (assemble(order, split, *columns) for split in (TRAIN, VALIDATION, TEST))
    assert train is not None
    return Splits(train, validation, test, made)


# The paper's noise is for pixels in [-1, 1], as its authors' script normalises them; ours are in [0, 1].
HALF = 0.5
# The means of its site noise, -0.08 to 0.08 by 0.01. The paper has 16 sites; from the 18th on they repeat.
MEANS = tuple(round(HALF * (-0.08 + 0.01 * step), 3) for step in range(17))
Parts = list[Indices]


@dataclass(frozen=True)
class Sites:
    """Settings that all image sets share.

    site_noise: the paper adds noise of N(mu_i, 0.04) to the training images of its i-th machine,
    mu_i = -0.08 + 0.01 i. We count machines from 0 and read both numbers as its authors' script does, which takes a
    standard deviation and adds the noise to pixels in [-1, 1]. (Read as a variance it would be 0.2 here.) It is drawn
    afresh each time an image is read. 0: neither noise nor shift. Images to validate and to test on have none,
    either way.
    """

    clients: int = 16
    present: int = 0  # use only the first so many clients and their images; 0: all
    partition: str = "equal"  # or dirichlet (label skew), quantity (sizes differ), one_class (some hold one class)
    alpha: float = 0.5  # for dirichlet and quantity; the smaller, the more clients differ
    one_class: int = 0  # for one_class: so many clients trade in pairs, positives for negatives; an even number
    flipped: float = 0.0  # share of wrong training labels in each class; the paper's table 2: 0.2
    site_noise: float = 0.0  # standard deviation, of pixels in [-1, 1]
    crop: int = 0  # in training, pad with so many black pixels, then crop at a random place
    flip: bool = False  # in training, horizontally, with probability 1/2
    known: float = 1.0  # of several labels, the share that each site knows; the others are missing there
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.clients >= 1, f"clients must be at least 1, got {self.clients}")
        require_known("partition", self.partition, PARTITIONS)
        require(1e-6 <= self.alpha <= 1e6, f"alpha must lie between 0.000001 and 1,000,000, got {self.alpha}")
        even = self.one_class % 2 == 0 and 0 <= self.one_class <= self.clients
        told = f"one_class must be an even number from 0 to the number of clients, {self.clients}"
        require(even, f"{told}, got {self.one_class}")
        fits = self.one_class == 0 or self.partition == "one_class"
        require(fits, f'one_class = {self.one_class} is for partition = "one_class", not for "{self.partition}"')
        require(0 <= self.flipped <= 1, f"flipped must lie in [0, 1], got {self.flipped}")
        require(0 <= self.site_noise <= 1000, f"site_noise must lie between 0 and 1000, got {self.site_noise}")
        Augment(self.crop)  # checks it
        require(0 < self.known <= 1, f"known must lie in (0, 1], got {self.known}")
        require(self.seed >= 0, f"seed must not be negative, got {self.seed}")

    def augment(self) -> Augment:
        """The augmentation of training images that these settings describe."""
        sites = range(self.present or self.clients)
        means = tuple(MEANS[site % len(MEANS)] for site in sites) if self.site_noise else ()
        return Augment(self.crop, self.flip, HALF * self.site_noise, means)

    def parts(self, labels: Indices) -> Parts:
        """Which site holds which of the examples with these labels."""
        stream = generator(self.seed, Purpose.DATA, 0, Stream.PARTITION)
        return partition(self.partition, labels, self.clients, stream, self.alpha, self.one_class)

    def _known(self, y: Indices, parts: Parts) -> Indices:
        """Several labels [n, L], of which each site knows some; all labels are known about equally often."""
        require(self.flipped == 0, "flipped is for one label, not for several")
        count = y.shape[1]
        few = max(1, round(self.known * count))
        order = generator(self.seed, Purpose.DATA, 0, Stream.KNOWN).permutation(count)
        known = np.zeros_like(y, bool)
        for site, part in enumerate(parts):
            known[np.ix_(part, order[(site * few + np.arange(few)) % count])] = True
        return np.where(known, y, UNKNOWN)

    def share_out(self, train: Examples, validation: Examples | None, test: Examples | None) -> Splits:
        """The training examples, split over the sites, with each site's augmentation and label noise."""
        y = train.y.numpy()
        # Split by the true labels: a site holds the same images whether labels are flipped or not.
        parts = self.parts(np.asarray(y.max(1) > 0, np.int64))
        if train.labels > 1:
            y = self._known(y, parts)
        else:
            require(self.known == 1, "known is for several labels; of one, a site knows all")
            y = corrupt(y[:, 0], self.flipped, generator(self.seed, Purpose.DATA, 0, Stream.CORRUPT))[:, None]
        found = replace(train, y=torch.from_numpy(y)).share_out(first_parts(self.present, parts))
        augment = self.augment()
        return Splits(found if augment == NOTHING else found.augmented(augment), validation, test)


def equal(labels: Indices, clients: int, rng: np.random.Generator, alpha: float, one_class: int) -> Parts:
    """Shuffled shards of equal size, as in the FeDXL paper."""
    return np.array_split(rng.permutation(len(labels)), clients)


def dirichlet(labels: Indices, clients: int, rng: np.random.Generator, alpha: float, one_class: int) -> Parts:
    """Label skew: clients hold shares of each class that are drawn from Dirichlet(alpha).

    Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification
    (2019), in the form of Yurochkin et al. (ICML 2019), which hands out every example. A small alpha leaves clients
    with one class; a large one gives all the same share.
    """
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        owner[members] = deal(len(members), rng.dirichlet(np.full(clients, alpha)))
    return _nobody_empty([rng.permutation(np.flatnonzero(owner == client)) for client in range(clients)])


def quantity(labels: Indices, clients: int, rng: np.random.Generator, alpha: float, one_class: int) -> Parts:
    """Quantity skew: the sizes of clients are drawn from Dirichlet(alpha), regardless of class.

    Li et al., Federated Learning on Non-IID Data Silos (ICDE 2022).
    """
    ends = np.rint(np.cumsum(rng.dirichlet(np.full(clients, alpha))) * len(labels)).astype(int)
    return _nobody_empty(np.split(rng.permutation(len(labels)), ends[:-1]))


def trade_classes(labels: Indices, clients: int, rng: np.random.Generator, alpha: float, one_class: int) -> Parts:
    """Equal shards, after which the first `one_class` clients trade in pairs: one takes the positives, one the rest.

    All other clients hold what they hold with equal shards, so that the number of one-class clients is all that
    changes. 0 is `equal` itself.
    """
    parts = equal(labels, clients, rng, alpha, one_class)
    for first in range(0, one_class, 2):
        both = np.concatenate(parts[first : first + 2])
        positive = labels[both] == 1
        told = f"clients {first} and {first + 1} hold one class between them and cannot trade; use fewer clients"
        require(bool(positive.any() and not positive.all()), told)
        parts[first : first + 2] = [both[positive], both[~positive]]
    return parts


def deal(count: int, shares: Floats) -> Indices:
    """Who gets each of so many examples in a row: everyone a run of them, as long as its share.

    >>> deal(5, np.array([2.0, 0.0, 3.0])).tolist()
    [0, 0, 2, 2, 2]
    """
    ends = np.rint(np.cumsum(shares) / shares.sum() * count)
    ends[-1] = count  # exact, despite rounding of the sum
    return np.searchsorted(ends, np.arange(count), side="right")


def _nobody_empty(parts: Parts) -> Parts:
    """Give each empty client one example of the client that holds the most."""
    parts = list(parts)
    for client, part in enumerate(parts):
        if not len(part):
            richest = max(range(len(parts)), key=lambda other: len(parts[other]))
            parts[richest], parts[client] = parts[richest][:-1], parts[richest][-1:]
    return parts


PARTITIONS: Mapping[str, Callable[[Indices, int, np.random.Generator, float, int], Parts]] = {
    "equal": equal,
    "dirichlet": dirichlet,
    "quantity": quantity,
    "one_class": trade_classes,
}


def partition(
    name: str, labels: Indices, clients: int, rng: np.random.Generator, alpha: float, one_class: int = 0
) -> Parts:
    """Assign each example to exactly one client, and at least one example to each client.

    >>> labels = np.array([0, 0, 0, 0, 1, 1])
    >>> [len(part) for part in partition("equal", labels, 3, np.random.default_rng(0), alpha=1.0)]
    [2, 2, 2]
    """
    require(clients <= len(labels), f"there are {clients} clients for only {len(labels)} training examples")
    return PARTITIONS[name](labels, clients, rng, alpha, one_class)


def first_parts(present: int, parts: Parts) -> Parts:
    """The parts of the first `present` clients; 0: of all."""
    told = f"present must lie between 0 (all) and the number of clients, {len(parts)}, got {present}"
    require(0 <= present <= len(parts), told)
    return parts[:present] if present else parts


def hold_back(labels: Indices, count: int, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """(training, `count` validation examples), both with the same share of positives, in ascending order."""
    require(0 <= count < len(labels), f"validation must lie in [0, {len(labels)}), got {count}")
    positives, negatives = (rng.permutation(np.flatnonzero(labels == label)) for label in (1, 0))
    of_positives = round(count * len(positives) / len(labels))
    held = np.concatenate([positives[:of_positives], negatives[: count - of_positives]])
    rest = np.concatenate([positives[of_positives:], negatives[count - of_positives :]])
    return np.sort(rest), np.sort(held)


def imbalance(indices: Indices, labels: Indices, ratio: float, rng: np.random.Generator) -> Indices:
    """As many of `indices` as `ratio` positives per negative allow; 0: all. In ascending order.

    >>> labels = np.array([1, 1, 1, 1, 0, 0, 0, 0])
    >>> kept = imbalance(np.arange(8), labels, 0.25, np.random.default_rng(0))
    >>> labels[kept].tolist()
    [1, 0, 0, 0, 0]
    """
    require(ratio >= 0, f"ratio must not be negative, got {ratio}")
    if ratio == 0:
        return indices
    positives, negatives = (rng.permutation(indices[labels[indices] == label]) for label in (1, 0))
    few = at_most(len(positives), ratio * len(negatives))
    many = at_most(len(negatives), few / ratio)
    return np.sort(np.concatenate([positives[:few], negatives[:many]]))


def at_most(count: int, wanted: float) -> int:
    """How many of `count` to keep if `wanted` are wanted: at least one, if there is one.

    >>> at_most(10, 3.6), at_most(10, 0.2), at_most(10, float("inf")), at_most(0, 3.0)
    (4, 1, 10, 0)
    """
    return min(count, max(1, round(min(count, wanted))))


def corrupt(labels: Indices, share: float, rng: np.random.Generator) -> Indices:
    """The labels, with this share of the positives and of the negatives flipped.

    >>> corrupt(np.array([1, 1, 0, 0, 0, 0]), 0.5, np.random.default_rng(0)).sum()
    np.int64(3)
    """
    flipped = labels.copy()
    for label in (0, 1):
        members = np.flatnonzero(labels == label)
        flipped[rng.choice(members, round(share * len(members)), replace=False)] = 1 - label
    return flipped
