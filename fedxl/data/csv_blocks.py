"""CSV files in blocks of whole rows, so that threads can parse them side by side."""

from __future__ import annotations

import codecs
import mmap
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedxl.errors import UserError, printable, require
from fedxl.sampling import Indices

Bytes = npt.NDArray[np.uint8]
BLOCK = 2**21  # bytes parsed at a time: with fewer, threads wait for Python's lock; no row may be longer
# What stands for a missing value. None begins as a number does, or arrow would look twice at every number.
MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "Null", "None", "none", "<NA>", "#N/A", "?")
QUOTE = ord('"')

Whole = npt.NDArray[np.int32]  # half of what int64 takes, for millions of rows


def blocks(path: Path, delimiter: str) -> Generator[Any]:
    """A file's text as arrow's buffers of at most `BLOCK` bytes, each of whole rows.

    A line break within quotation marks is part of its value, wherever a block ends.
    """
    import pyarrow as pa

    packed = "gzip" if path.name.lower().endswith(".gz") else None
    with pa.input_stream(str(path), compression=packed) as stream:
        # No byte order mark, and no empty lines before the first row.
        text = stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n")
        while not text and (more := stream.read(min(BLOCK, 2**13))):
            text = more.lstrip(b"\r\n")
        rest, count = np.frombuffer(text, np.uint8), BLOCK
        while count == BLOCK:
            buffer = pa.allocate_buffer(BLOCK)  # of arrow's memory, which is used again and again
            data, count = np.frombuffer(buffer, np.uint8), len(rest)
            data[:count] = rest
            while count < BLOCK and (got := stream.readinto(data[count:].data)):
                count += got
            end = _row_end(data[:count], delimiter, path)
            if end:
                yield buffer.slice(0, end)
            rest = data[end:count]


def parser(delimiter: str, types: Mapping[str, Any], names: Sequence[str] | None = None) -> Callable[[Any], Any]:
    """A function that makes a table of arrow's of a block: columns of `types` in their order; all if it is empty.

    names: of all columns of the file; None: the first row of a block has them.
    """
    import pyarrow as pa
    from pyarrow import csv

    # Arrow must not cut a block again: it would do so within quotation marks, too.
    reading = csv.ReadOptions(use_threads=False, block_size=BLOCK + 1, column_names=names)
    parsing = csv.ParseOptions(delimiter=delimiter)
    converting = csv.ConvertOptions(
        column_types=dict(types), include_columns=list(types), null_values=list(MISSING), strings_can_be_null=True
    )
    return lambda block: csv.read_csv(pa.BufferReader(block), reading, parsing, converting)


def require_delimiter(delimiter: str) -> None:
    right = len(delimiter) == 1 and delimiter.isascii() and (delimiter.isprintable() or delimiter == "\t")
    require(right and delimiter != '"', "delimiter must be one character, such as ';'")


def _row_end(data: Bytes, delimiter: str, path: Path) -> int:
    """Where the last whole row ends: the end of the data, if they are the file's last."""
    marks = enclosing(data, delimiter)
    if len(data) < BLOCK:
        begins = printable(data[marks[-1] :][:30].tobytes().decode(errors="replace")) if len(marks) % 2 else ""
        require(not begins, f"{path}: the value that begins with {begins} never ends; is a quotation mark missing?")
        return len(data)
    for size, sign in product((2**13, BLOCK), b"\n\r"):  # rows are short, as a rule: look at the end first
        ends = np.flatnonzero(data[-size:] == sign) + max(0, BLOCK - size) + 1
        outside = ends[np.searchsorted(marks, ends) % 2 == 0]  # the others are within values
        if len(outside):
            return int(outside[-1])
    raise UserError(f"{path} holds a row of more than {BLOCK // 1000} kB; is a quotation mark missing?")


def enclosing(data: Bytes, delimiter: str) -> Indices:
    """Where quotation marks are that open and close values, in turn; data begin with a row.

    One opens a value where it is the value's first character, and is a text's own character elsewhere. A doubled one
    within a value is its own character, too, which does not change whether others open or close.
    """
    marks = np.flatnonzero(data == QUOTE)
    if not len(marks):
        return marks
    apart = np.zeros(256, bool)
    apart[[QUOTE, ord(delimiter), *b"\r\n"]] = True
    opening, closing = marks[::2], marks[1::2]
    before, after = data[opening[opening > 0] - 1], data[closing[closing < len(data) - 1] + 1]
    # So it is in nearly all files: each mark stands beside a delimiter, a line break or another mark.
    if apart[before].all() and apart[after].all():
        return marks
    value = rb"(?:(?<=[\r\n" + re.escape(delimiter.encode()) + rb'])|\A)"(?:[^"]++|"")*+("?)'
    quoted = [(each.start(), each.end() - 1)[: 1 + len(each[1])] for each in re.finditer(value, data.tobytes())]
    return np.array([at for each in quoted for at in each], np.int64)


def row_numbers(ends: Indices, names: Sequence[str], rows: Whole) -> list[str]:
    """Rows' numbers in their files, from 1, as texts. ends: the number of rows up to the end of each file.

    >>> row_numbers(np.array([3, 5]), ["a", "b"], np.array([0, 4], np.int32))
    ['a:1', 'b:2']
    """
    files = np.searchsorted(ends, rows, side="right")
    numbers = (rows - np.concatenate([[0], ends])[files] + 1).tolist()
    if len(names) == 1:
        return list(map(str, numbers))
    return [f"{names[file]}:{number}" for file, number in zip(files.tolist(), numbers, strict=True)]


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
    size = max(1, np.dtype(kind).itemsize * columns * rows)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # where there are no large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, kind, columns * rows).reshape(rows, columns)


T = TypeVar("T")
R = TypeVar("R")
THREADS = min(8, os.cpu_count() or 1)


def map_in_threads(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What `work` makes of each item, in order. A few items are held at a time, however many there are.

    The first error in the items' order is raised, whichever thread comes upon one first.

    >>> list(map_in_threads(abs, [-3, -1, 2]))
    [3, 1, 2]
    """

    def submitted() -> Iterator[Future[R]]:
        try:
            for item in items:
                yield workers.submit(work, item)
        except Exception as error:
            failed: Future[R] = Future()
            failed.set_exception(error)
            yield failed

    ahead: deque[Future[R]] = deque()
    with ThreadPoolExecutor(THREADS) as workers:
        for future in submitted():
            ahead.append(future)
            if len(ahead) > THREADS + 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
