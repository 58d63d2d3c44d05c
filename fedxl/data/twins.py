"""Examples that occur twice, found by a hash of their numbers and then compared exactly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl.sampling import Indices

Hashes = npt.NDArray[np.uint64]
WORDS = 2**20  # words of 8 bytes that are hashed at a time


class Rows:
    """Examples that can be read by their indices, and a hash of each."""

    def __init__(self, read: Callable[[Tensor], Tensor], count: int) -> None:
        self.read = read
        width = max(1, read(torch.zeros(1, dtype=torch.int64)).numel()) if count else 1
        blocks = torch.arange(count).split(max(1, WORDS // width)) if count else []
        self.hashes = np.concatenate([np.empty(0, np.uint64), *(_hashed(_numbers(read(b))) for b in blocks)])
        self.order = np.argsort(self.hashes, kind="stable")

    def __len__(self) -> int:
        return len(self.hashes)

    def also_in(self, other: Rows) -> tuple[Indices, Indices]:
        """(rows of this, their twins in the other)."""
        places = np.searchsorted(other.hashes[other.order], self.hashes)
        known = places < len(other)
        twins = other.order[np.where(known, places, 0)] if len(other) else np.zeros(len(self), np.int64)
        mine = np.flatnonzero(known & (other.hashes[twins] == self.hashes)) if len(other) else np.empty(0, np.int64)
        same = _same(self, mine, other, twins[mine])
        return mine[same], twins[mine][same]

    def firsts(self) -> Indices:
        """For each row, the first one that is equal to it: itself, if it is the first or the only one."""
        ordered = self.hashes[self.order]
        begins = np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)]
        run = np.maximum.accumulate(np.where(begins, np.arange(len(ordered)), 0))
        first = np.empty(len(self), np.int64)
        first[self.order] = self.order[run]
        rows = np.flatnonzero(first != np.arange(len(self)))
        different = rows[~_same(self, rows, self, first[rows])]
        first[different] = different
        return first


def _same(first: Rows, mine: Indices, second: Rows, theirs: Indices) -> npt.NDArray[np.bool_]:
    """Whether rows are equal, number by number: two examples may share a hash by chance, or by design."""
    found = [np.empty(0, np.bool_)]
    for start in range(0, len(mine), 1024):
        a = _numbers(first.read(torch.from_numpy(mine[start : start + 1024])))
        b = _numbers(second.read(torch.from_numpy(theirs[start : start + 1024])))
        found.append((a == b).all(1) if a.shape == b.shape and a.dtype == b.dtype else np.zeros(len(a), np.bool_))
    return np.concatenate(found)


def _numbers(x: Tensor) -> npt.NDArray[np.generic]:
    """[n, numbers], in which zero has one sign."""
    values = x.flatten(1)
    values = values.float() if values.dtype == torch.bfloat16 else values
    return np.asarray(values + 0 if values.is_floating_point() else values)


def _hashed(rows: npt.NDArray[np.generic]) -> Hashes:
    """A hash of each row: its words of 8 bytes, mixed (as in splitmix64) with their places, and added up."""
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    data = np.pad(data, ((0, 0), (0, -data.shape[1] % 8)))
    words = data.view(np.uint64) ^ _mixed(np.arange(1, data.shape[1] // 8 + 1, dtype=np.uint64))
    return np.asarray(_mixed(words).sum(1, dtype=np.uint64))


def _mixed(z: Hashes) -> Hashes:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
