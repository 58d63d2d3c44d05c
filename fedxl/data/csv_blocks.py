"""CSV files in blocks of whole rows, so that threads can parse them side by side."""

from __future__ import annotations

import codecs
import mmap
import os
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise, product
from pathlib import Path
from threading import Event
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from fedxl.errors import UserError, printable, require
from fedxl.sampling import Indices

Bytes = npt.NDArray[np.uint8]
BLOCK = 2**21  # bytes parsed at a time: with fewer, threads wait for Python's lock; no row may be longer
# What stands for a missing value. None begins as a number does, or arrow would look twice at every number.
MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "Null", "None", "none", "<NA>", "#N/A", "?")
WORDY = min(max(word.encode()) for word in MISSING if word)  # each of these words has a character from here on
QUOTE = ord('"')

Whole = npt.NDArray[np.int32]  # half of what int64 takes, for millions of rows


def blocks(path: Path, delimiter: str) -> Generator[Any]:
    """A file's text as arrow's buffers of at most `BLOCK` bytes, each of whole rows.

    A line break within quotation marks is part of its value, wherever a block ends.
    """
    import pyarrow as pa

    packed = "gzip" if path.name.lower().endswith(".gz") else None
    with pa.input_stream(str(path), compression=packed) as stream:
        rest, more = np.frombuffer(_beginning(stream), np.uint8), True
        while more:
            buffer = pa.allocate_buffer(BLOCK)  # of arrow's memory, which is used again and again
            data = np.frombuffer(buffer, np.uint8)
            data = data[: _fill(data, rest, stream)]
            more = len(data) == BLOCK
            end = _row_end(data, delimiter, path) if more else _file_end(data, delimiter, path)
            if end:
                yield buffer.slice(0, end)
            rest = data[end:]


def _beginning(stream: Any) -> bytes:
    """Some of a file's text from its first row on: no byte order mark, and no empty lines, which are no rows."""
    text: bytes = stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n")
    while not text and (more := stream.read(min(BLOCK, 2**13))):
        text = more.lstrip(b"\r\n")
    return text


def _fill(data: Bytes, rest: Bytes, stream: Any) -> int:
    """Put the rest into data, and what a stream has behind it; how many bytes that is."""
    count = len(rest)
    data[:count] = rest
    while count < len(data) and (got := stream.readinto(data[count:].data)):
        count += got
    return count


class Parser:
    """Blocks of a file as tables of arrow's: the columns of `types` in their order, or all of them if it is empty."""

    def __init__(self, delimiter: str, types: Mapping[str, Any], names: Sequence[str] | None = None) -> None:
        """names: of all columns of the file; None: the first row of a block has them."""
        from pyarrow import csv

        # Arrow must not cut a block again: it would do so within quotation marks, too.
        self.reading = csv.ReadOptions(use_threads=False, block_size=BLOCK + 1, column_names=names)
        self.parsing = csv.ParseOptions(delimiter=delimiter)
        self.converting = [
            csv.ConvertOptions(
                column_types=dict(types), include_columns=list(types), null_values=words, strings_can_be_null=True
            )
            for words in ([""], list(MISSING))
        ]

    def __call__(self, block: Any) -> Any:
        import pyarrow as pa
        from pyarrow import csv

        # In a block of numbers alone, no word stands for a missing one: arrow need not look for any in every value.
        wordy = bool(np.frombuffer(block, np.uint8).max() >= WORDY)
        return csv.read_csv(pa.BufferReader(block), self.reading, self.parsing, self.converting[wordy])


def require_delimiter(delimiter: str) -> None:
    right = len(delimiter) == 1 and delimiter.isascii() and (delimiter.isprintable() or delimiter == "\t")
    require(right and delimiter != '"', "delimiter must be one character, such as ';'")


def _file_end(data: Bytes, delimiter: str, path: Path) -> int:
    """The end of a file's last rows; one line if a value of theirs has none."""
    marks = enclosing(data, delimiter)
    begins = printable(data[marks[-1] :][:30].tobytes().decode(errors="replace")) if len(marks) % 2 else ""
    require(not begins, f"{path}: the value that begins with {begins} never ends; is a quotation mark missing?")
    return len(data)


def _row_end(data: Bytes, delimiter: str, path: Path) -> int:
    """Where the last whole row ends. Rows are short, as a rule: the end of the data is looked at first."""
    marks = enclosing(data, delimiter)
    for size, sign in product((2**13, len(data)), b"\n\r"):
        ends = np.flatnonzero(data[-size:] == sign) + max(0, len(data) - size) + 1
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
    return _walked(data, marks.tolist(), {ord(delimiter), *b"\r\n"})


def _walked(data: Bytes, marks: list[int], apart: Container[int]) -> Indices:
    """The same mark by mark, for texts in which marks stand anywhere."""
    found, at = [], 0
    while at < len(marks):
        if marks[at] and data[marks[at] - 1] not in apart:
            at += 1
            continue
        found.append(marks[at])
        at += 1
        while at + 1 < len(marks) and marks[at + 1] == marks[at] + 1:  # doubled
            at += 2
        found += marks[at : at + 1]
        at += 1
    return np.array(found, np.int64)


class RowNumbers(Sequence[str]):
    """Rows' numbers in their files, from 1, as texts: made when they are asked for, since millions take long.

    ends: the number of rows up to the end of each file; names: of the files, if there are several.

    >>> list(RowNumbers(np.array([3, 5]), ["a", "b"], np.array([0, 4], np.int32)))
    ['a:1', 'b:2']
    """

    def __init__(self, ends: Indices, names: Sequence[str], rows: Whole) -> None:
        self.ends, self.names, self.rows = ends, names, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[str]:
        files = np.searchsorted(self.ends, self.rows, side="right")
        numbers = (self.rows - np.concatenate([[0], self.ends])[files] + 1).tolist()
        if len(self.names) == 1:
            return map(str, numbers)
        return (f"{self.names[file]}:{number}" for file, number in zip(files.tolist(), numbers, strict=True))

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> RowNumbers: ...
    def __getitem__(self, at: int | slice) -> str | RowNumbers:
        some = self.rows[at]
        found = RowNumbers(self.ends, self.names, np.atleast_1d(some))
        return found if isinstance(at, slice) else next(iter(found))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


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


T = TypeVar("T")
R = TypeVar("R")
THREADS = min(8, os.cpu_count() or 1)  # they take turns at the stream: more would wait


def side_by_side(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What `work` makes of each item. A few items are held at a time, however many there are.

    The threads read the stream, too, so that the caller's thread has little to do: on as many cores as threads, one
    more that works would take a core from a thread on which the others wait. The first error in the items' order is
    raised, whichever thread comes upon one first.

    >>> list(side_by_side(abs, [-3, -1, 2]))
    [3, 1, 2]
    """
    stream = iter(items)

    def next_done(mine: Event, after: Event) -> tuple[R] | None:
        mine.wait()
        try:
            item = next(stream)
        except StopIteration:
            return None
        finally:
            after.set()
        return (work(item),)

    with ThreadPoolExecutor(THREADS) as workers:
        ahead: deque[Future[tuple[R] | None]] = deque()
        turn = Event()
        turn.set()
        while True:
            while len(ahead) < THREADS + 2:
                following = Event()
                ahead.append(workers.submit(next_done, turn, following))
                turn = following
            done = ahead.popleft().result()
            if done is None:
                return
            yield done[0]
