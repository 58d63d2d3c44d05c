"""The sites of a simulated federation of images: how many there are, what each holds, and how they differ."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from fedxl.data.augment import MOST_CROP, NOTHING, Augment
from fedxl.data.binary import corrupt
from fedxl.data.federation import Federation, Split, Splits
from fedxl.data.label_columns import UNKNOWN
from fedxl.data.partition import PARTITIONS, Parts, check_one_class, only_first, partition
from fedxl.data.source import TensorSource
from fedxl.errors import require, unknown
from fedxl.sampling import Indices, Purpose, generator

# The paper's noise is for pixels in [-1, 1], as its authors' script normalises them; ours are in [0, 1].
HALF = 0.5
# The means of its site noise, -0.08 to 0.08 by 0.01. The paper has 16 sites; from the 18th on they repeat.
MEANS = tuple(round(HALF * (-0.08 + 0.01 * step), 3) for step in range(17))


class Stream(IntEnum):
    """The random choices, each with its own stream, so that one setting does not change the draws of another."""

    HOLD_BACK = 2
    IMBALANCE = 3
    PARTITION = 4
    CORRUPT = 5
    TABLE = 6
    KNOWN = 7


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

    def _flipped(self, labels: Indices) -> Indices:
        return corrupt(labels, self.flipped, generator(self.seed, Purpose.DATA, 0, Stream.CORRUPT))

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
        require(labels.ndim == 2 or self.known == 1, "known is for several labels; of one, a site knows all")
        given = labels if labels.ndim == 2 else self._flipped(labels)
        (x, y), parts = only_first(self.present, (train.x, torch.from_numpy(given)), parts)
        federation = Federation(TensorSource(x, y), parts)
        augment = self.augment()
        return Splits(federation if augment == NOTHING else federation.augmented(augment), validation, test)
