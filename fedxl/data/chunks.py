"""Rows of a table in pieces of memory that goes back to the system piece by piece."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fedxl.data.holdout import Whole

Block = npt.NDArray[np.float64]
ROWS = 2048  # used at a time: they stay in a processor's cache


class Chunks:
    """Rows of numbers in pieces [rows, columns], whose memory goes back to the system as they are used."""

    def __init__(self, columns: int) -> None:
        self.columns, self.edges = columns, [0]  # the first row of each piece, and the number of rows
        self.pieces: list[Block | None] = []

    @property
    def count(self) -> int:
        return self.edges[-1]

    def append(self, piece: Block) -> None:
        """piece: [rows, columns], with memory of its own (`untouched`)."""
        self.pieces.append(piece)
        self.edges.append(self.count + len(piece))

    def take(self, rows: Whole) -> Block:
        """These rows, which must ascend, as [rows, columns]."""
        found = np.empty((len(rows), self.columns))
        if not len(rows):
            return found
        first, last = np.searchsorted(self.edges, (rows[0], rows[-1]), side="right") - 1
        places = np.searchsorted(rows, self.edges[first : last + 2])
        within = rows - np.repeat(self.edges[first : last + 1], np.diff(places))
        for piece, (start, end) in zip(self.pieces[first : last + 1], pairwise(places), strict=True):
            if piece is not None:
                piece.take(within[start:end], axis=0, out=found[start:end], mode="clip")
        return found

    def drain(self, use: Callable[[int, Block], None]) -> None:
        """Call `use` with the number of a row and `ROWS` rows from it on, in a few threads. What was used is gone."""

        def drained(number: int) -> None:
            piece, self.pieces[number] = self.pieces[number], None
            assert piece is not None
            for start in range(0, len(piece), ROWS):
                use(self.edges[number] + start, piece[start : start + ROWS])

        with ThreadPoolExecutor(os.cpu_count()) as workers:
            list(workers.map(drained, range(len(self.pieces))))  # which raises what one of them raised


def untouched(rows: int, columns: int, kind: type[np.floating[Any]]) -> npt.NDArray[Any]:
    """Memory of its own, [rows, columns], that takes none until it is written to, and then in small pages.

    Many places of it may be written to at a time. Large pages would be filled with zeros at the first of them.
    """
    memory = mmap.mmap(
        -1, max(1, np.dtype(kind).itemsize * columns * rows), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with suppress(AttributeError, OSError):  # where there are no large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, kind, columns * rows).reshape(rows, columns)
