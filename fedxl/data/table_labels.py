"""Several label columns of a table: one pair of values for all of them, and an empty cell where one is not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedxl.data.columns import LONGEST, File, open_table, require_column
from fedxl.data.features import Features
from fedxl.data.holdout import Codes
from fedxl.data.label_columns import UNKNOWN
from fedxl.data.labels import Value, canonical, two_values
from fedxl.data.preparation import Category, Preparation, Rows
from fedxl.data.resized import decoded, within
from fedxl.errors import UserError, printable, require
from fedxl.sampling import Indices

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


Inputs = npt.NDArray[np.float32]


def read(made: Preparation, path: Path) -> Rows:
    """The examples of a new file, or of a folder of images."""
    if made.source == "folder":
        return _folder(made, path)
    file = open_table(path, made.delimiter)
    image = [made.image.column] if made.image else []
    names = [column.name for column in made.columns]
    for name in (*names, *image):
        require_column(file, name, "which the model reads")
    others = [name for name in dict.fromkeys((made.label, *made.labels, made.site, made.id)) if name in file.columns]
    blocks, texts = _content(made, file, list(dict.fromkeys((*others, *image))))
    x = torch.from_numpy(np.concatenate(blocks)) if made.columns else _pixels(made, file, texts[image[0]])
    ids = texts[made.id] if made.id in texts else [str(number) for number in range(1, len(x) + 1)]
    sites = [_text(site) for site in texts[made.site]] if made.site in texts else None
    labels = _several(made, texts, path) if made.labels else _one(made, texts, path)
    return Rows(x, [_text(row) for row in ids], labels, sites)


def _folder(made: Preparation, root: Path) -> Rows:
    """All images below a folder. Their labels are those of their folders, if all are called as the classes were."""
    from fedxl.data.folder import images_in

    files = images_in(root)
    classes = {made.positive: 1, made.negative: 0}
    labels = [classes.get(canonical(Path(file).parent.name)) for file in files]
    known = None if None in labels else np.array(labels, np.int64)
    return Rows(_squares(made, root, files), files, known, None)


def _content(
    made: Preparation, file: File, others: Sequence[str]
) -> tuple[list[Inputs], dict[str, list[str | None]]]:
    """The features as a network reads them, and other columns as texts."""
    known = {column.name: list(column.values) if isinstance(column, Category) else None for column in made.columns}
    features = Features([file], list(known), (), known)
    blocks: list[Inputs] = []
    texts: dict[str, list[str | None]] = {name: [] for name in others}
    count = 0
    for _, block, batch in features.blocks(others):
        count += len(block)
        blocks.append(made.apply(block))
        for name, column in batch.items():
            texts[name] += column.to_pylist()
    require(count > 0, f"{file.path} holds no rows, only the names of its columns")
    return blocks, texts


def _text(value: str | None) -> str:
    return "" if value is None else value


def _pixels(made: Preparation, file: File, paths: Sequence[str | None]) -> torch.Tensor:
    assert made.image is not None
    where = f"{file.path}: column '{printable(made.image.column)}'"
    return _squares(made, file.path.resolve().parent, [within(path, where) for path in paths])


def _squares(made: Preparation, folder: Path, paths: Sequence[str]) -> torch.Tensor:
    assert made.image is not None
    x = decoded(folder, paths, made.image.size, made.image.channels)
    return torch.from_numpy(x.reshape(len(x), made.image.channels, made.image.size, made.image.size))


def _several(made: Preparation, columns: Mapping[str, Sequence[str | None]], path: Path) -> Indices | None:
    """Labels [n, L], -1 where one is not known; None if none is."""
    here = [name for name in made.labels if name in columns]
    if not here:
        return None
    found = np.full((len(columns[here[0]]), len(made.labels)), UNKNOWN, np.int64)
    for name in here:
        where = f"{path}: column '{printable(name)}'"
        found[:, made.labels.index(name)] = cells_of(columns[name], made.positive, made.negative, where)
    return found if (found != UNKNOWN).any() else None


def _one(made: Preparation, columns: Mapping[str, Sequence[str | None]], path: Path) -> Indices | None:
    """0 and 1; None if the column is not there, or empty, as in data whose outcome is not known yet."""
    texts = columns.get(made.label, ())
    if all(text is None for text in texts):
        return None
    values = {made.positive: 1, made.negative: 0}
    words = [None if text is None else canonical(text) for text in texts]
    strange = next((word for word in words if word not in values), "")
    if strange is None:
        raise UserError(f"{path}: column '{printable(made.label)}' is empty in some rows; fill it, or leave it out")
    told = f"{path}: column '{printable(made.label)}' holds '{printable(strange, 40)}'"
    require(strange == "", f"{told}; the model knows {made.positive!r} and {made.negative!r}")
    return np.array([values[word] for word in words if word is not None], np.int64)
