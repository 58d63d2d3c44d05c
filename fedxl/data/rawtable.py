"""A table in memory before its columns are scaled: what a site summarises, and what a `Preparation` is applied to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl.data.csv_blocks import Chunks, untouched
from fedxl.data.federation import Federation, Split, Splits
from fedxl.data.forms import quoted
from fedxl.data.holdout import SPLITS, TEST, TRAIN, VALIDATION, Codes, Whole
from fedxl.data.preparation import Category, Preparation, fit
from fedxl.data.source import TensorSource
from fedxl.data.summary import LABELS, Summary, merge, summarize
from fedxl.data.summary import ROWS as BLOCK
from fedxl.errors import printable, require
from fedxl.sampling import Floats, Indices

Block = npt.NDArray[np.float64]


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

    def parts(self) -> list[Indices]:
        """Each site's training rows; one line if one has none."""
        found = [np.arange(*self.part(site).indices(len(self.rows))) for site in range(len(self.names))]
        without = [name for name, part in zip(self.names, found, strict=True) if not len(part)]
        told = f"no row of site '{printable(''.join(without[:1]))}' is trained on; give it some, or leave it out"
        require(not without, told)
        return found


def assemble(
    order: Order,
    x: Tensor,
    labels: Codes,
    ids: Callable[[Whole], Sequence[str]],
    made: Preparation,
    weights: Floats | None = None,
    queries: Whole | None = None,
) -> Splits:
    """Splits of rows that are already in order; ids: what identifies rows of the file, as weights and queries do."""
    parts, count = order.parts(), order.split(TRAIN).stop
    rows = order.rows[:count]
    heavy = None if weights is None else torch.from_numpy(weights[rows])
    source = TensorSource(x[:count], _tensor(labels[rows]), weights=heavy, queries=_queries(queries, rows))
    return Splits(Federation(source, parts), *held_back(order, x, labels, ids, queries), order.names, made)


def held_back(
    order: Order, x: Tensor, labels: Codes, ids: Callable[[Whole], Sequence[str]], queries: Whole | None = None
) -> tuple[Split | None, Split | None]:
    """Validation and test data, where there are any."""

    def held(split: int) -> Split | None:
        where = order.split(split)
        rows = order.rows[where]
        if not len(rows):
            return None
        sizes = [order.part(site, split) for site in range(len(order.names))]
        sites = np.repeat(np.arange(len(order.names)), [part.stop - part.start for part in sizes])
        return Split(x[where], _tensor(labels[rows]), sites, ids(rows), _queries(queries, rows))

    return held(VALIDATION), held(TEST)


def _tensor(numbers: Codes | Whole) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int64))


def _queries(queries: Whole | None, rows: Whole) -> Tensor | None:
    return None if queries is None else _tensor(queries[rows])


@dataclass
class RawTable:
    """A table of features, in order."""

    order: Order
    chunks: Chunks  # of the file's rows, as are labels and ids
    columns: list[str]
    texts: list[list[str] | None]  # by column: the text of each index; None for numbers, empty if it has no value
    labels: Codes
    ids: Callable[[Whole], Sequence[str]]
    about: dict[str, Any]  # the other fields of a preparation
    rare: int
    weights: Floats | None = None
    queries: Whole | None = None  # of the file's rows
    query_names: Callable[[Whole], list[str]] | None = None  # the texts that these numbers stand for, of some rows

    def summary(self, site: int) -> Summary:
        """What a site tells of its training rows."""
        return summarize(self.blocks(site, TRAIN), self.columns, self.texts, self.rare, self.about)

    def blocks(self, site: int, split: int) -> Iterator[Block]:
        """A site's rows of a split."""
        rows = self.order.rows[self.order.part(site, split)]
        return (self.chunks.take(rows[start : start + BLOCK]) for start in range(0, len(rows), BLOCK))

    def fitted(self) -> Preparation:
        """As a server would fit it: each site tells its summary, and they are merged in the order of the sites."""
        self.order.parts()
        told = [*map(self.summary, range(len(self.order.names)))]
        return fit(merge(dict(zip(self.order.names, told, strict=True))))

    def splits(self, made: Preparation) -> Splits:
        """The rows as a network's inputs. The table is empty afterwards."""
        return assemble(self.order, self._inputs(made), self.labels, self.ids, made, self.weights, self.queries)

    def held_back(self, made: Preparation) -> tuple[Split | None, Split | None]:
        """Validation and test data alone, of a table that need not have others. It is empty afterwards."""
        return held_back(self.order, self._inputs(made), self.labels, self.ids, self.queries)

    def _inputs(self, made: Preparation) -> Tensor:
        both = (made.labels, tuple(self.about.get(LABELS, ())))
        named = [f"the labels {quoted(names)}" if names else "one label" for names in both]
        require(both[0] == both[1], f"the preparation is for {named[0]}, and the table has {named[1]}")
        recode = recoding(made, self.columns, self.texts)
        rows, x = self.order.rows, untouched(self.chunks.count, made.width, np.float32)
        places = np.empty_like(rows)
        places[rows] = np.arange(len(rows), dtype=rows.dtype)
        whole = f"V{4 * made.width}"  # a row as one item, which is copied at once

        # Rows of a split and site keep their order. So each of these parts of x is written from its beginning to its
        # end, and takes memory as raw rows give theirs back.
        def place(first: int, block: Block) -> None:
            found = made.apply(recode(block))
            x.view(whole)[places[first : first + len(block)]] = found.view(whole)

        self.chunks.drain(place)
        return torch.from_numpy(x)


def recoding(
    made: Preparation, columns: Sequence[str], texts: Sequence[Sequence[str] | None]
) -> Callable[[Block], Block]:
    """A function that makes indices of a table's own texts those of the preparation, NaN for texts that it lacks.

    Raises UserError if the table has other columns than the preparation, or another kind of them.
    """
    wanted = {column.name: column for column in made.columns}
    same = list(wanted) == list(columns)
    require(same, f"the preparation is of the columns {quoted([*wanted])}, not {quoted(columns)}")
    places: dict[int, Block] = {}
    for at, (name, known) in enumerate(zip(columns, texts, strict=True)):
        column = wanted[name]
        where = f"in column '{printable(name)}'"
        if isinstance(column, Category):
            require(known is not None, f"the preparation has categories {where}, the table has numbers")
            index = {text: float(place) for place, text in enumerate(column.values)}
            places[at] = np.array([*(index.get(text, np.nan) for text in known or ()), np.nan])
        else:
            require(not known, f"the preparation has numbers {where}, the table has texts")

    def recode(block: Block) -> Block:
        if not places:
            return block
        block = block.copy()
        for at, place in places.items():
            values = block[:, at]
            block[:, at] = place[np.where(np.isnan(values), len(place) - 1, values).astype(np.int64)]
        return block

    return recode
