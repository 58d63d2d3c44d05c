"""New files, read as the training data were: for predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedxl.data.columns import File, open_table, require_column
from fedxl.data.features import Features
from fedxl.data.label_columns import UNKNOWN
from fedxl.data.labels import canonical
from fedxl.data.preparation import Category, Preparation, Rows
from fedxl.data.resized import decoded, within
from fedxl.data.table_labels import cells_of
from fedxl.errors import UserError, printable, require
from fedxl.sampling import Indices

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
