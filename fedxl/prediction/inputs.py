"""New examples from files: by the preparation of the run, or as arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedxl.data.archive import read
from fedxl.data.arrays import floats, labels
from fedxl.data.label_columns import columns
from fedxl.data.preparation import Preparation, Rows
from fedxl.errors import UserError, require


def read_rows(path: Path, preparation: Preparation | None, several: int = 0) -> Rows:
    """The examples of a table, a folder of images, or an .npz file, with what identifies each.

    several: how many labels the model has, if they are several.
    """
    require(path.exists(), f"there is no file {path}")
    arrays = path.suffix == ".npz"
    if preparation is None:
        require(
            arrays,
            f"this model was trained on arrays and does not know how to prepare {path}; give it an .npz file with x",
        )
        return _arrays(path, several)
    require(not arrays, f"this model prepares {_kind(preparation)} itself; give it one of those instead of {path}")
    rows = preparation.read(path)
    require(len(rows.x) > 0, f"{path} holds no rows")
    return rows


def _kind(preparation: Preparation) -> str:
    if preparation.source == "folder":
        return "folders of images"
    return "tables (CSV or Parquet)"


def _arrays(path: Path, several: int) -> Rows:
    """x, and optionally y and rows, what identifies each example."""
    found = read(path, f"there is no file {path}")
    require("x" in found, f"{path} lacks the array x; it must hold x, and may hold y and rows")
    x, y, names = found["x"], found.get("y"), found.get("rows")
    require(
        x.dtype.kind in "biuf" and x.ndim >= 2, f"{path}: x must hold rows of numbers, not {x.dtype} {list(x.shape)}"
    )
    require(len(x) > 0, f"{path} holds no rows")
    right = names is None or names.shape == (len(x),)
    require(right, f"{path}: rows must name each of the {len(x)} examples")
    numbered = [str(number) for number in range(len(x))]
    given = _several(y, len(x), several, path) if several else _labels(y, len(x), path)
    return Rows(floats(x), numbered if names is None else [str(name) for name in names], given, None)


def _several(y: np.ndarray | None, count: int, several: int, path: Path) -> np.ndarray | None:
    if y is None:
        return None
    given = columns(y, several, f"{path}: y").numpy()
    require(len(given) == count, f"{path}: y must hold the labels of each of the {count} examples")
    return given


def _labels(y: np.ndarray | None, count: int, path: Path) -> np.ndarray | None:
    if y is None:
        return None
    if y.dtype.kind not in "biuf" or y.shape != (count,):
        raise UserError(f"{path}: y must hold one number for each of the {count} examples")
    given = labels(y).numpy()
    given = np.where(given == -1, 0, given)
    require(bool(np.isin(given, (0, 1)).all()), f"{path}: labels must be 0 or 1 (or -1 and 1)")
    return given.astype(np.int64)
