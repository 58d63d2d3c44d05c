"""A table in memory before its columns are scaled: what a site summarises, and what a `Preparation` is applied to."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedxl.data.federation import Federation, Split, Splits
from fedxl.data.holdout import SPLITS, TRAIN
from fedxl.data.preparation import Category, Preparation, fit
from fedxl.data.source import TensorSource
from fedxl.data.summary import Summary, merge, summarize
from fedxl.errors import printable, require
from fedxl.sampling import Indices

Block = npt.NDArray[np.float64]
ROWS = 2**13  # applied at a time


class Scratch:
    """Numbers [rows, columns], whose memory goes back to the system as they are read."""

    def __init__(self, rows: int, columns: int) -> None:
        self.memory = mmap.mmap(-1, max(1, rows * columns * 8))
        self.block: Block = np.frombuffer(self.memory, np.float64, rows * columns).reshape(rows, columns)

    def drain(self) -> Iterator[tuple[int, Block]]:
        """(first row, rows) in order; each batch is gone when the next one comes."""
        gone = 0
        for start in range(0, len(self.block), ROWS):
            yield start, self.block[start : start + ROWS]
            end = (start + ROWS) * self.block.shape[1] * 8 // mmap.PAGESIZE * mmap.PAGESIZE
            end = min(end, len(self.memory) // mmap.PAGESIZE * mmap.PAGESIZE)
            if end > gone:
                self.memory.madvise(mmap.MADV_DONTNEED, gone, end - gone)
                gone = end


class Order:
    """Rows sorted by split, then by site: each site's training rows lie together, and each split does."""

    def __init__(self, splits: npt.NDArray[np.int8], sites: Indices, names: Sequence[str]) -> None:
        key = splits.astype(np.int64) * len(names) + sites
        self.rows = np.argsort(key, kind="stable")  # the row of the file at each place
        self.edges = np.searchsorted(key[self.rows], np.arange(len(SPLITS) * len(names) + 1))
        self.names = list(names)

    @property
    def places(self) -> Indices:
        """Where each row of the file goes."""
        places = np.empty_like(self.rows)
        places[self.rows] = np.arange(len(self.rows))
        return places

    def part(self, site: int, split: int = TRAIN) -> slice:
        at = split * len(self.names) + site
        return slice(int(self.edges[at]), int(self.edges[at + 1]))

    def split(self, split: int) -> slice:
        return slice(self.part(0, split).start, self.part(len(self.names) - 1, split).stop)

    def parts(self) -> list[Indices]:
        """Each site's training rows; one line if one has none."""
        found = [np.arange(*self.part(site).indices(len(self.rows))) for site in range(len(self.names))]
        without = [name for name, part in zip(self.names, found, strict=True) if not len(part)]
        told = f"no row of site '{printable(''.join(without[:1]))}' is trained on; give it some, or leave it out"
        require(not without, told)
        return found


def assemble(order: Order, x: Any, labels: Indices, ids: Callable[[Indices], list[str]], made: Preparation) -> Splits:
    """Splits of rows that are already in order; ids: what identifies rows of the file."""
    parts, y = order.parts(), torch.from_numpy(labels[order.rows])
    x = torch.from_numpy(x)
    count = order.split(TRAIN).stop

    def held(split: int) -> Split | None:
        where = order.split(split)
        if where.start == where.stop:
            return None
        sizes = [order.part(site, split) for site in range(len(order.names))]
        sites = np.repeat(np.arange(len(order.names)), [part.stop - part.start for part in sizes])
        return Split(x[where], y[where], sites, ids(order.rows[where]))

    return Splits(Federation(TensorSource(x[:count], y[:count]), parts), held(1), held(2), order.names, made)


@dataclass
class RawTable:
    """A table of features, in order."""

    order: Order
    scratch: Scratch
    columns: list[str]
    texts: list[list[str] | None]  # by column: the text of each index; None for numbers
    labels: Indices  # of the file's rows, as are ids
    ids: Callable[[Indices], list[str]]
    about: dict[str, Any]  # the other fields of a preparation
    rare: int

    def summary(self, site: int) -> Summary:
        """What a site tells of its training rows."""
        return summarize(self.scratch.block[self.order.part(site)], self.columns, self.texts, self.rare)

    def fitted(self) -> Preparation:
        """As a server would fit it: each site tells its summary, and they are merged in the order of the sites."""
        self.order.parts()
        return fit(merge({name: self.summary(site) for site, name in enumerate(self.order.names)}), **self.about)

    def splits(self, made: Preparation) -> Splits:
        """The rows as a network's inputs. The table is empty afterwards."""
        recode = recoding(made, self.columns, self.texts)
        x = np.empty((len(self.order.rows), made.width), np.float32)
        for start, block in self.scratch.drain():
            made.apply(recode(block), x[start : start + len(block)])
        return assemble(self.order, x, self.labels, self.ids, made)


def recoding(
    made: Preparation, columns: Sequence[str], texts: Sequence[Sequence[str] | None]
) -> Callable[[Block], Block]:
    """Indices of a table's own texts become those of the preparation; NaN for texts that it does not know.

    One line if the table has other columns than the preparation, or another kind of them.
    """
    wanted = {column.name: column for column in made.columns}
    require(list(wanted) == list(columns), f"the preparation is of the columns {_some(wanted)}, not {_some(columns)}")
    places: Mapping[int, Block] = {}
    for at, (name, known) in enumerate(zip(columns, texts, strict=True)):
        column = wanted[name]
        if isinstance(column, Category):
            index = {text: float(place) for place, text in enumerate(column.values)}
            # None: the table has no value in this column, of any kind.
            places = {**places, at: np.array([*(index.get(text, np.nan) for text in known or ()), np.nan])}
        else:
            require(known is None, f"the preparation has numbers in column '{printable(name)}', the table has texts")

    def recode(block: Block) -> Block:
        if not places:
            return block
        block = block.copy()
        for at, place in places.items():
            values = block[:, at]
            block[:, at] = place[np.where(np.isnan(values), len(place) - 1, values).astype(np.int64)]
        return block

    return recode


def _some(names: Any) -> str:
    few = ", ".join(printable(name, 40) for name in list(names)[:5])
    return f"{few}, ... ({len(names)} in all)" if len(names) > 5 else few
