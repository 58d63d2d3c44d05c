"""A table in memory before its columns are scaled: one block of numbers, with categories as indices of texts.

It is what a site summarises, and what a `Preparation` is applied to. NaN where a value is missing.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl.data.examples import Examples, Splits
from fedxl.data.splits import SPLITS, TEST, TRAIN, VALIDATION, Codes, Order, Whole, all_splits, assemble
from fedxl.data.tables.prepare import Category, Preparation, fit
from fedxl.data.tables.read import LONGEST, Block, File, Kind
from fedxl.data.tables.summary import LABELS, LARGEST, Summary, merge, summarize
from fedxl.data.tables.summary import ROWS as BLOCK
from fedxl.data.targets import as_number, canonical, quoted
from fedxl.errors import UserError, printable, require
from fedxl.sampling import Indices

ROWS = 2048  # used at a time: they stay in a processor's cache
PLURAL = {"number": "numbers", "category": "texts"}
FEWEST = 100  # rows of a table of which a column that numbers them is told: in fewer, amounts differ by chance, too
MOST_TEXTS = 10_000  # different texts in one column; more are names or remarks, and no categories


class Features:
    """Reads some columns of files that agree in them. `texts` grow as they are met, unless they are given."""

    def __init__(
        self,
        files: Sequence[File],
        names: Sequence[str],
        categorical: Sequence[str] = (),
        known: Mapping[str, Any] | None = None,
    ) -> None:
        """known: the texts of each column of categories, None for numbers: of a preparation; then nothing is new."""
        self.files, self.names, self.fixed = files, list(names), known is not None
        if known is None:
            self.kinds: dict[str, Kind] = {n: "category" if n in categorical else agreed(files, n) for n in names}
        else:
            self.kinds = {name: "number" if texts is None else "category" for name, texts in known.items()}
            for file, name in product(files, names):
                right = self.kinds[name] == "category" or file.columns[name].kind in ("number", "empty")
                told = f"{file.path}: column '{printable(name)}' held numbers in the training data, and does not here"
                told += " (a text is among them, or they have decimal commas)"
                require(right, told)
        given = {name: texts for name, texts in (known or {}).items() if texts is not None}
        self.index = {name: {text: at for at, text in enumerate(given.get(name, ()))} for name in names}
        self.strange: Counter[str] = Counter()  # values by column that are not among the given texts

    @property
    def texts(self) -> list[list[str] | None]:
        """By column: the text of each index, None for numbers; of a column without any value there is none."""
        return [None if self.kinds[name] == "number" else list(self.index[name]) for name in self.names]

    def blocks(self, more: Sequence[str] = ()) -> Iterator[tuple[int, Block, dict[str, Any]]]:
        """The rows of all files in batches: the file's number, the features, and these other columns as texts."""
        for number, file in enumerate(self.files):
            numbers = [n for n in self.names if self.kinds[n] == "number" and file.columns[n].kind == "number"]
            rest = [name for name in self.names if name not in numbers]
            wanted = [*dict.fromkeys([*rest, *more])]
            for batch in file.batches(wanted, numbers):
                block = untouched(len(batch.numbers), len(self.names), np.float64)
                if rest:
                    block[:, [self.names.index(name) for name in numbers]] = batch.numbers
                    _require_below_largest(batch.numbers, numbers, file)
                else:
                    block[:] = batch.numbers
                    _require_below_largest(block, numbers, file)  # where they lie side by side now
                for name in rest:
                    block[:, self.names.index(name)] = self._values(batch.texts[name], name, file)
                yield number, block, {name: batch.texts[name] for name in more}

    def _values(self, values: Any, name: str, file: File) -> Block:
        """A column that the file does not have as numbers."""
        if self.kinds[name] == "empty" and values.null_count < len(values):
            self.kinds[name] = "number" if _as_numbers(values) is not None else "category"
        if self.kinds[name] == "category":
            return self._codes(values, name, file)
        found = _as_numbers(values)
        held = "numbers" if file.columns[name].kind == "empty" else "numbers in other files"
        told = f"{file.path}: column '{printable(name)}' holds {held}, but also texts"
        require(found is not None, f"{told}; correct it, or name it in categorical")
        assert found is not None
        _require_below_largest(found[:, None], [name], file)
        return found

    def _codes(self, values: Any, name: str, file: File) -> Block:
        """Indices of texts. Each different text is looked up once per batch."""
        encoded, index = values.dictionary_encode(), self.index[name]
        places = np.full(len(encoded.dictionary) + 1, np.nan)  # the last one is for missing values
        for at, text in enumerate(encoded.dictionary.to_pylist()):
            word = canonical(text)
            if word not in index and not self.fixed:
                where = f"{file.path}: column '{printable(name)}' holds"
                long = f"{where} a text of {len(word):,} characters; categories have at most {LONGEST}"
                require(len(word) <= LONGEST, f"{long}: name it in drop")
                odd = among_numbers([*index, word]) if len(index) >= MOST_TEXTS else ""
                require(not odd, f"{where} numbers, but also '{printable(odd, 40)}'; correct it, or name it in drop")
                many = f"{where} more than {MOST_TEXTS:,} different texts, no categories; name it in drop"
                many += f", or, if it identifies rows, name it: id = '{printable(name)}'"
                require(len(index) < MOST_TEXTS, many)
                index[word] = len(index)
            places[at] = index.get(word, np.nan)
        codes: Indices = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
        found = places[codes]
        self.strange[name] += int(np.isnan(found).sum()) - values.null_count
        return found


def _require_below_largest(values: Block, names: Sequence[str], file: File) -> None:
    """Raises UserError if a number among [rows, columns] is larger than any that was measured."""
    # Of NaN and a number, these are the number.
    largest = max(np.fmax.reduce(values, None, initial=0), -np.fmin.reduce(values, None, initial=0))
    if largest > LARGEST:
        where = f"{file.path}: column '{printable(names[int(np.flatnonzero((np.abs(values) > LARGEST).any(0))[0])])}'"
        raise UserError(f"{where} holds numbers beyond {LARGEST:g}; correct or drop it")


def agreed(files: Iterable[File], name: str) -> Kind:
    """What a column holds in all files together; raises UserError if it cannot be learned from."""
    found: dict[Kind, File] = {}
    for file in files:
        kind = file.columns[name].kind
        where = f"{file.path}: column '{printable(name)}'"
        dates = f"{where} holds dates or times; make it a number (days since an event), or name it in drop"
        require(kind != "date", dates)
        text = str(file.columns[name].type) == "binary"  # what arrow calls a text that it cannot decode
        require(not text, f"{where} is not encoded as UTF-8; save the file as UTF-8, or name the column in drop")
        require(kind != "other", f"{where} has the Arrow type {file.columns[name].type}; name it in drop")
        if kind != "empty":
            found.setdefault(kind, file)
    if len(found) > 1:
        where = " and ".join(f"{PLURAL.get(kind, kind)} in {file.path}" for kind, file in found.items())
        raise UserError(f"column '{printable(name)}' holds {where}; correct it, or name it in categorical")
    return next(iter(found), "empty")


def _as_numbers(values: Any) -> Block | None:
    """Texts as numbers; None if one is not."""
    import pyarrow as pa

    try:
        return values.cast(pa.float64()).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    except pa.ArrowInvalid:
        return None


def among_numbers(texts: Sequence[str]) -> str:
    """The first text that is no number, if most are numbers."""
    odd = [text for text in texts if canonical(as_number(text)) != text]
    return odd[0] if 0 < len(odd) < len(texts) / 2 else ""


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


def numbering(columns: Sequence[str], texts: Sequence[Sequence[str] | None], chunks: Chunks) -> dict[str, str]:
    """Columns of whole numbers that differ in every row, as numbers of patients do, and what to do about each."""
    if chunks.count < FEWEST:
        return {}
    found = {}
    for at, name in enumerate(columns):
        pieces = [piece[:, at] for piece in chunks.pieces if piece is not None]
        if texts[at] is None and _differ(pieces[0]) and _differ(np.concatenate(pieces)):
            found[name] = f"differs in every row: if it identifies rows, name it: id = '{printable(name, 40)}'"
    return found


def _differ(values: Block) -> bool:
    """Whether these are whole numbers, each of them once."""
    return bool((values == np.trunc(values)).all()) and len(np.unique(values)) == len(values)


def untouched(rows: int, columns: int, kind: type[np.floating[Any]]) -> npt.NDArray[Any]:
    """Memory of its own, [rows, columns], that takes none until it is written to, and then in small pages.

    Many places of it may be written to at a time. Large pages would be filled with zeros at the first of them.
    """
    size = max(1, np.dtype(kind).itemsize * columns * rows)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # where there are no large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, kind, columns * rows).reshape(rows, columns)


@dataclass
class RawTable:
    """A table of features, in order."""

    order: Order
    chunks: Chunks  # of the file's rows, as are labels and ids
    columns: list[str]
    texts: list[list[str] | None]  # by column: the text of each index; None for numbers, empty if it has no value
    y: Codes  # [n, L]
    ids: Callable[[Whole], Sequence[str]]
    about: dict[str, Any]  # the other fields of a preparation
    rare: int
    known: Mapping[str, np.ndarray]  # other columns of `Examples`, of the file's rows

    def summary(self, site: int) -> Summary:
        """What a site tells of its training rows."""
        return summarize(self.blocks(site, TRAIN), self.columns, self.texts, self.rare, self.about)

    def blocks(self, site: int, split: int) -> Iterator[Block]:
        """A site's rows of a split."""
        rows = self.order.rows[self.order.part(site, split)]
        return (self.chunks.take(rows[start : start + BLOCK]) for start in range(0, len(rows), BLOCK))

    def fitted(self) -> Preparation:
        """As a server would fit it: each site tells its summary, and they are merged in the order of the sites."""
        self.order.require_trained()
        told = [*map(self.summary, range(len(self.order.names)))]
        return fit(merge(dict(zip(self.order.names, told, strict=True))))

    def splits(self, made: Preparation) -> Splits:
        """The rows as a network's inputs. The table is empty afterwards."""
        return all_splits(self.order, made, self._inputs(made), self.y, self.ids, self.known)

    def held_back(self, made: Preparation) -> dict[str, Examples]:
        """The rows that are not trained on. The table is empty afterwards."""
        columns = self._inputs(made), self.y, self.ids, self.known
        found = {SPLITS[split]: assemble(self.order, split, *columns) for split in (VALIDATION, TEST)}
        return {name: each for name, each in found.items() if each is not None}

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
