"""A table's columns as one block of numbers: categories as indices of texts, NaN where a value is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from fedxl.data.columns import LONGEST, Batch, File, Kind
from fedxl.data.csv_blocks import untouched
from fedxl.data.keys import as_number, canonical
from fedxl.data.summary import LARGEST
from fedxl.errors import UserError, printable, require
from fedxl.sampling import Indices

Block = npt.NDArray[np.float64]
PLURAL = {"number": "numbers", "category": "texts"}
MOST_TEXTS = 10_000  # different texts in one column; more are names or remarks, and no categories


class Features:
    """Reads some columns of files that agree in them. `texts` grow as they are met, unless they are given."""

    def __init__(
        self, files: Sequence[File], names: Sequence[str], categorical: Sequence[str], known: Mapping[str, Any] | None
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
                require(right, told)
        given = {name: texts for name, texts in (known or {}).items() if texts is not None}
        self.index = {name: {text: at for at, text in enumerate(given.get(name, ()))} for name in names}

    @property
    def texts(self) -> list[list[str] | None]:
        """By column: the text of each index, None for numbers; of a column without any value there is none."""
        return [None if self.kinds[name] == "number" else list(self.index[name]) for name in self.names]

    def among_numbers(self) -> dict[str, str]:
        """By column, a text that makes what else holds numbers one of categories."""
        found = {name: _among_numbers(list(self.index[name])) for name in self.names}
        return {name: text for name, text in found.items() if text}

    def blocks(self, more: Sequence[str] = ()) -> Iterator[tuple[int, Block, dict[str, Any]]]:
        """The rows of all files in batches: the file's number, the features, and these other columns as texts."""
        for number, file in enumerate(self.files):
            numbers = [n for n in self.names if self.kinds[n] == "number" and file.columns[n].kind == "number"]
            rest = [name for name in self.names if name not in numbers]
            wanted = [*dict.fromkeys([*rest, *more])]
            for block, texts in file.batches(wanted, numbers, partial(self._block, numbers, file)):
                for name in rest:
                    block[:, self.names.index(name)] = self._values(texts[name], name, file)
                yield number, block, {name: texts[name] for name in more}

    def _block(self, numbers: Sequence[str], file: File, batch: Batch) -> tuple[Block, dict[str, Any]]:
        """Room for all columns of some rows, [rows, columns], with those of numbers filled in, and the texts."""
        block = untouched(len(batch.numbers), len(self.names), np.float64)
        if len(numbers) == len(self.names):
            block[:] = batch.numbers
            _require_below_largest(block, numbers, file)  # where they lie side by side now
        else:
            block[:, [self.names.index(name) for name in numbers]] = batch.numbers
            _require_below_largest(batch.numbers, numbers, file)
        return block, batch.texts

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
        """Indices of texts. Each different text is looked at once a batch."""
        encoded, index = values.dictionary_encode(), self.index[name]
        places = np.full(len(encoded.dictionary) + 1, np.nan)  # the last one is for missing values
        for at, text in enumerate(encoded.dictionary.to_pylist()):
            word = canonical(text)
            if word not in index and not self.fixed:
                where = f"{file.path}: column '{printable(name)}' holds"
                long = (
                    f"{where} a text of {len(word):,} characters; categories have at most {LONGEST}: name it in drop"
                )
                require(len(word) <= LONGEST, long)
                odd = _among_numbers([*index, word]) if len(index) >= MOST_TEXTS else ""
                require(not odd, f"{where} numbers, but also '{printable(odd, 40)}'; correct it, or name it in drop")
                many = f"{where} more than {MOST_TEXTS:,} different texts, no categories; name it in drop"
                require(len(index) < MOST_TEXTS, many)
                index[word] = len(index)
            places[at] = index.get(word, np.nan)
        codes: Indices = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
        return places[codes]


def _require_below_largest(values: Block, names: Sequence[str], file: File) -> None:
    """Raises UserError if a number among [rows, columns] is larger than any that was measured."""
    # Of NaN and a number, these are the number.
    largest = max(np.fmax.reduce(values, None, initial=0), -np.fmin.reduce(values, None, initial=0))
    if largest > LARGEST:
        bad = names[int(np.flatnonzero((np.abs(values) > LARGEST).any(0))[0])]
        raise UserError(
            f"{file.path}: column '{printable(bad)}' holds numbers beyond {LARGEST:g}; correct or drop it"
        )


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
        require(kind != "other", f"{where} is of arrow's type {file.columns[name].type}; name it in drop")
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


def _among_numbers(texts: Sequence[str]) -> str:
    """The first text that is no number, if most are numbers."""
    odd = [text for text in texts if canonical(as_number(text)) != text]
    return odd[0] if 0 < len(odd) < len(texts) / 2 else ""
