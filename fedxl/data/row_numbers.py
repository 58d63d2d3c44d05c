"""What identifies the rows of tables that have no column for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from fedxl.data.holdout import Whole
from fedxl.sampling import Indices


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
