"""Rows of a CSV file without quotation marks, whose numbers arrow casts where they stand.

Arrow's CSV reader goes over a block character by character and makes columns of it, which would then be made rows
again. Here numpy finds where fields end, and arrow's cast of texts to numbers, which is as exact as its CSV reader,
makes rows at once. A block that is not as plain as that is left to the CSV reader.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl.sampling import Indices

Block = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
FIRST, LAST = b"-9"  # what numbers begin with is between them, as are . and /, which arrow refuses
LINE, RETURN, QUOTE = b'\n\r"'


class Rows(NamedTuple):
    """What a block holds in the columns that are wanted."""

    numbers: Block  # [rows, columns of numbers], NaN where one is missing
    texts: list[Any]  # arrow's, a column each


class Fields(NamedTuple):
    """Where the fields of a block are."""

    data: npt.NDArray[np.uint8]
    bounds: npt.NDArray[np.int32]  # [rows, width, 2]: begin and end of each
    texts: Any  # arrow's: every other one is a field, those between them are what separates fields


class PlainRows:
    """Reads blocks of whole rows, of which none is the line of names."""

    def __init__(
        self, delimiter: str, width: int, numbers: Sequence[int], texts: Sequence[int], missing: Sequence[str]
    ) -> None:
        """width: columns of the file; numbers, texts: the wanted ones; missing: words for a missing value."""
        import pyarrow as pa

        self.delimiter, self.width = ord(delimiter), width
        self.numbers, self.texts = _range(numbers), list(texts)
        self.missing = pa.array(missing, pa.string())
        self.wanted = np.zeros((width, 2), np.bool_)  # of arrow's texts of a row, those that are numbers
        self.wanted[self.numbers, 0] = True
        # What one block of a file is like, others are, too. These spare attempts in vain; no result depends on them.
        self.plain, self.gaps = not FIRST <= self.delimiter <= LAST, 0  # which way of finding gaps is enough

    def __call__(self, block: Any) -> Rows | None:
        """The rows of arrow's buffer; None if they are not plain."""
        import pyarrow as pa

        if not self.plain:
            return None
        fields = self._fields(block)
        try:
            numbers = None if fields is None else self._numbers(fields)
            if fields is not None and numbers is not None:
                return Rows(numbers, [self._text(fields, at) for at in self.texts])
        except pa.ArrowInvalid:
            pass
        self.plain = False
        return None

    def _fields(self, block: Any) -> Fields | None:
        """Where fields are; None unless all rows are alike and have no quotation marks."""
        import pyarrow as pa

        data = np.frombuffer(block, np.uint8)
        one, other = (_scratch(len(data), np.bool_) for _ in range(2))
        marked = data[: len(BOM_UTF8)].tobytes() == BOM_UTF8  # as behind files that were joined; arrow leaves it out
        if not len(data) or data[-1] != LINE or marked or np.equal(data, QUOTE, out=one).any():
            return None
        lines = np.equal(data, LINE, out=one)
        rows = np.count_nonzero(lines)
        signs = np.equal(data, self.delimiter, out=other)
        signs |= lines
        ends = np.flatnonzero(signs)
        if len(ends) != rows * self.width or not lines[ends[self.width - 1 :: self.width]].all():
            return None
        bounds = _scratch(2 * len(ends) + 1, np.int32)
        bounds[0], bounds[1::2] = 0, ends
        np.add(ends, 1, out=bounds[2::2], casting="unsafe")
        places = bounds[:-1].reshape(rows, self.width, 2)
        returns = np.equal(data, RETURN, out=one)
        if returns.any():
            last = places[:, -1, 1]
            last -= returns[last - 1]
            if np.count_nonzero(returns) != np.count_nonzero(returns[last]):
                return None  # some are lines' ends by themselves, or part of a text
        if self.width == 1 and (places[..., 0] == places[..., 1]).any():
            return None  # empty lines are no rows
        return Fields(data, places, pa.StringArray.from_buffers(places.size, pa.py_buffer(bounds), block))

    def _numbers(self, fields: Fields) -> Block | None:
        """The columns of numbers; None if a field holds another thing."""
        import pyarrow as pa

        for way, missing in enumerate((_nowhere, _empty, _no_number)):
            if way >= self.gaps:
                self.gaps = way
                with suppress(pa.ArrowInvalid):
                    return self._cast(fields, missing(fields, self.numbers))
        return None

    def _cast(self, fields: Fields, gone: Mask | None) -> Block | None:
        """gone: the fields that are missing; None if one of them has a word that does not say so."""
        import pyarrow as pa

        if gone is not None and not self._missing(fields, gone):
            return None
        wanted = np.broadcast_to(self.wanted, fields.bounds.shape)
        if gone is not None:
            wanted = wanted.copy()
            wanted[:, self.numbers, 0] = ~gone
        mask = pa.py_buffer(np.packbits(wanted, bitorder="little"))
        _, offsets, data = fields.texts.buffers()
        floats = pa.StringArray.from_buffers(wanted.size, offsets, data, mask).cast(pa.float64())
        values = np.frombuffer(floats.buffers()[1], np.float64, wanted.size).reshape(wanted.shape)
        found = values[:, self.numbers, 0]
        if gone is None:
            return found
        if not found.flags.writeable:
            found = found.copy()
        np.copyto(found, np.nan, where=gone)
        return found

    def _missing(self, fields: Fields, gone: Mask) -> bool:
        import pyarrow as pa
        from pyarrow import compute

        places = np.arange(0, fields.bounds.size, 2).reshape(fields.bounds.shape[:2])[:, self.numbers]
        words = fields.texts.take(pa.array(places[gone]))
        return bool(compute.all(compute.is_in(words, self.missing), min_count=0).as_py())

    def _text(self, fields: Fields, column: int) -> Any:
        """A column of texts with its gaps; an error of arrow's if it is not encoded as UTF-8."""
        import pyarrow as pa
        from pyarrow import compute

        found = fields.texts.take(pa.array(np.arange(2 * column, fields.bounds.size, 2 * self.width)))
        found.validate(full=True)
        return compute.if_else(compute.is_in(found, self.missing), pa.scalar(None, pa.string()), found)


# Which of the columns' fields hold no number, [rows, columns]: the first two are quick, and mostly enough.


def _nowhere(fields: Fields, columns: slice | Indices) -> None:
    return None


def _empty(fields: Fields, columns: slice | Indices) -> Mask:
    return np.equal(fields.bounds[:, columns, 0], fields.bounds[:, columns, 1])


def _no_number(fields: Fields, columns: slice | Indices) -> Mask:
    begin = fields.data.take(fields.bounds[:, columns, 0])
    return np.asarray((begin < FIRST) | (begin > LAST))


def _scratch(count: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """Memory of arrow's, which it keeps for the next block: the system's would be cleared each time."""
    import pyarrow as pa

    return np.frombuffer(pa.allocate_buffer(count * np.dtype(kind).itemsize), kind, count)


def _range(places: Sequence[int]) -> slice | Indices:
    """Columns that lie side by side as a slice, of which numpy makes no copy."""
    if places and list(places) == list(range(places[0], places[0] + len(places))):
        return slice(places[0], places[0] + len(places))
    return np.array(places, np.int64)
