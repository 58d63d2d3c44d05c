"""Which rows are trained on, and which are held back: drawn by group, alike at every site and in both classes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from fedxl.errors import require
from fedxl.sampling import Indices, Purpose, generator

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


def check_shares(validation: float, test: float) -> None:
    for name, share in (("validation", validation), ("test", test)):
        require(0 <= share < 1, f"{name} must be a share in [0, 1), got {share}")
    require(validation + test < 1, f"validation and test are {validation + test:g} of all rows; nothing is left")


def draw(
    sites: Whole,
    labels: Codes,
    groups: Whole | None,
    names: Sequence[str],
    shares: tuple[float, float],
    seed: int,
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
        rng = generator(seed, Purpose.DATA, _number(name), Stream.TABLE)
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


def _number(name: str) -> int:
    """A site's number for its random stream: of its name, for its place among others may differ."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
