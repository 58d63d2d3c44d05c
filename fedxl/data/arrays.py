"""Your own data from a NumPy .npz file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedxl.data.archive import read
from fedxl.data.federation import Federation, Split, Splits
from fedxl.data.label_columns import Columns
from fedxl.data.source import TensorSource, checked
from fedxl.errors import require, unknown

ARRAYS = ("x", "y", "client", "x_validation", "y_validation", "x_test", "y_test")


def npz(path: str) -> Splits:
    """Arrays x, y and client, one row per example; optionally x_validation, y_validation, x_test and y_test.

    y may have a column for each of several labels, with NaN or -1 where one is not known.
    """
    arrays = read(Path(path), f"there is no file {path}; data.path must name an .npz file")
    missing = [name for name in ("x", "y", "client") if name not in arrays]
    require(not missing, f"{path} lacks the array(s) {', '.join(missing)}; it must hold x, y and client")
    for name in arrays:
        if name not in ARRAYS:
            raise unknown(f"array in {path}", name, ARRAYS)
    source = _checked(arrays, "x", "y", path)
    client = arrays["client"]
    require(
        client.shape == (len(source),) and np.issubdtype(client.dtype, np.integer),
        f"{path}: client must hold one integer for each of the {len(source)} examples",
    )
    # Clients are renumbered from 0, in the order of the given numbers.
    order = np.argsort(client, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(client[order])) + 1)
    names = [str(client[part[0]]) for part in parts]
    return Splits(Federation(source, parts), _split(arrays, "validation", path), _split(arrays, "test", path), names)


def _split(arrays: dict[str, np.ndarray], name: str, path: str) -> Split | None:
    if f"x_{name}" not in arrays:
        require(f"y_{name}" not in arrays, f"{path} holds y_{name} but no x_{name}")
        return None
    require(f"y_{name}" in arrays, f"{path} holds x_{name} but no y_{name}")
    part = _checked(arrays, f"x_{name}", f"y_{name}", path)
    return Split(part.x, part.labels)


def _checked(arrays: dict[str, np.ndarray], x: str, y: str, path: str) -> TensorSource:
    for name in (x, y):
        require(arrays[name].dtype.kind in "biuf", f"{path}: {name} must hold numbers, not {arrays[name].dtype}")
    several = arrays[y].ndim == 2 and arrays[y].shape[1] > 1
    columns = Columns(arrays[y].shape[1]) if several else None
    return checked(floats(arrays[x]), labels(arrays[y]), f"{path}: {x}", columns)


def floats(array: np.ndarray) -> torch.Tensor:
    """Examples in single precision; bytes stay bytes."""
    if array.dtype == np.uint8:
        return torch.from_numpy(array)
    with np.errstate(over="ignore"):  # values that are too large become infinite, and are reported as such
        return torch.from_numpy(array.astype(np.float32))


def labels(array: np.ndarray) -> torch.Tensor:
    """Labels in types that torch has, without turning an invalid label into a valid one."""
    return torch.from_numpy(array.astype(np.int64 if np.can_cast(array.dtype, np.int64) else np.float64))
