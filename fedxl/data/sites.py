"""The sites of a simulated federation: how many there are, what each holds, and how they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedxl.data.federation import Federation, Split, Splits
from fedxl.data.forms import UNKNOWN
from fedxl.data.holdout import Stream
from fedxl.data.source import MOST_CROP, NOTHING, Augment, TensorSource
from fedxl.errors import require, unknown
from fedxl.sampling import Indices, Purpose, generator

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
        if self.partition not in PARTITIONS:
            raise unknown("partition", self.partition, PARTITIONS)
        require(self.alpha > 0, f"alpha must be positive, got {self.alpha}")
        require(1e-6 <= self.alpha <= 1e6, f"alpha must lie between 0.000001 and 1,000,000, got {self.alpha}")
        check_one_class(self.one_class, self.clients)
        require(
            self.one_class == 0 or self.partition == "one_class",
            f'one_class = {self.one_class} is for partition = "one_class", not for "{self.partition}"',
        )
        require(0 <= self.flipped <= 1, f"flipped must lie in [0, 1], got {self.flipped}")
        require(self.site_noise >= 0, f"site_noise must not be negative, got {self.site_noise}")
        require(self.site_noise <= 1000, f"site_noise must be at most 1000, got {self.site_noise}")
        require(self.crop >= 0, f"crop must not be negative, got {self.crop}")
        require(self.crop <= MOST_CROP, f"crop must be at most {MOST_CROP} pixels, got {self.crop}")
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

    def _known(self, labels: Indices, parts: Parts) -> Indices:
        """Several labels [n, L], of which each site knows some; all labels are known about equally often."""
        require(self.flipped == 0, "flipped is for one label, not for several")
        count = labels.shape[1]
        few = max(1, round(self.known * count))
        order = generator(self.seed, Purpose.DATA, 0, Stream.KNOWN).permutation(count)
        known = np.zeros_like(labels, bool)
        for site, part in enumerate(parts):
            known[np.ix_(part, order[(site * few + np.arange(few)) % count])] = True
        return np.where(known, labels, UNKNOWN)

    def share_out(self, train: Split, validation: Split | None, test: Split | None) -> Splits:
        """The training examples, split over the sites, with each site's augmentation and label noise."""
        labels = train.y.numpy()
        # Split by the true labels: a site holds the same images whether labels are flipped or not.
        parts = self.parts(labels if labels.ndim == 1 else np.asarray(labels.max(1) > 0, np.int64))
        if labels.ndim == 2:
            labels = self._known(labels, parts)
        else:
            require(self.known == 1, "known is for several labels; of one, a site knows all")
            labels = corrupt(labels, self.flipped, generator(self.seed, Purpose.DATA, 0, Stream.CORRUPT))
        (x, y), parts = only_first(self.present, (train.x, torch.from_numpy(labels)), parts)
        federation = Federation(TensorSource(x, y), parts)
        augment = self.augment()
        return Splits(federation if augment == NOTHING else federation.augmented(augment), validation, test)


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
        ends = np.rint(np.cumsum(rng.dirichlet(np.full(clients, alpha))) * len(members))
        ends[-1] = len(members)  # exact, despite rounding of the sum
        owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
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
    check_one_class(one_class, clients)
    parts = equal(labels, clients, rng, alpha, one_class)
    for first in range(0, one_class, 2):
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
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    require(clients <= len(labels), f"there are {clients} clients for only {len(labels)} training examples")
    return PARTITIONS[name](labels, clients, rng, alpha, one_class)


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
