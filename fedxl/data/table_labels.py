"""Several label columns of a table: one pair of values for all of them, and an empty cell where one is not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedxl.data.columns import LONGEST
from fedxl.data.holdout import Codes
from fedxl.data.label_columns import UNKNOWN
from fedxl.data.labels import Value, canonical, two_values
from fedxl.errors import UserError, printable, require

FEW = 3  # names that a message lists
MOST_VALUES = 1000  # different cells of a column, before it is taken for something else than a label


def label_cells(
    texts: Mapping[str, Any], names: Sequence[str], positive: Value | None, where: str
) -> tuple[Codes, str, str]:
    """Labels [n, L] of 1, 0 and -1 (not known), and what counts as positive and as negative in all columns.

    texts: arrow's texts, by column.
    """
    each = [_words(texts[name], f"{where}: column '{printable(name, 40)}'") for name in names]
    found = list(dict.fromkeys(word for _, words in each for word in words))
    columns = f"{where}: columns {listed(names)}"
    require(
        positive is not None or "-1" not in found,
        f"{columns} hold '-1'; leave a label's cell empty if it is not known, or set positive = 1 if -1 is negative",
    )
    one, other = two_values(found, positive, columns)
    value = {one: 1, other: 0}
    labels = [np.array([*(value[word] for word in words), UNKNOWN], np.int8)[codes] for codes, words in each]
    return np.stack(labels, 1), one, other


def _words(column: Any, where: str) -> tuple[np.ndarray, list[str]]:
    """The index of each cell's word among those of the column; of an empty one, their number."""
    encoded = column.combine_chunks().dictionary_encode()
    words = encoded.dictionary.to_pylist()
    require(len(words) <= MOST_VALUES, f"{where} has {len(words):,} different values; a label has two")
    require(all(len(word) <= LONGEST for word in words), f"{where} holds a text of more than {LONGEST} characters")
    codes: np.ndarray = encoded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
    return codes, [canonical(word) for word in words]


def cells_of(texts: Sequence[str | None], positive: str, negative: str, where: str) -> Codes:
    """A label's cells in new data: 1, 0, and -1 where they are empty."""
    values = {positive: 1, negative: 0}
    words = [None if text is None else canonical(text) for text in texts]
    strange = next((word for word in words if word is not None and word not in values), None)
    if strange is not None:
        told = f"{where} holds '{printable(strange, 40)}'"
        raise UserError(f"{told}; the model knows {positive!r} and {negative!r}, and empty cells")
    return np.array([UNKNOWN if word is None else values[word] for word in words], np.int8)


def positive_rows(labels: Codes) -> Codes:
    """1 for rows that are positive: for any of several labels; of grades, those above 0."""
    return (labels == 1).any(1).astype(np.int8) if labels.ndim == 2 else np.minimum(labels, 1)


def listed(names: Sequence[str]) -> str:
    """A few names, for a message.

    >>> listed(["mass", "nodule", "edema", "hernia"])
    "'mass', 'nodule', 'edema' and 1 more"
    """
    few = ", ".join(f"'{printable(name, 40)}'" for name in names[:FEW])
    return few + (f" and {len(names) - FEW} more" if len(names) > FEW else "")
