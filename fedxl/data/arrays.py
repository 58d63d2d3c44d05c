"""Your own data from a NumPy .npz file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from fedxl.data.federation import Federation, Split, Splits
from fedxl.data.source import TensorSource, checked
from fedxl.errors import UserError, require, unknown

ARRAYS = ("x", "y", "client", "x_validation", "y_validation", "x_test", "y_test")


def npz(path: str) -> Splits:
    """Arrays x, y and client, one row an example; optionally x_validation, y_validation, x_test and y_test."""
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
        f"{path}: client must be one whole number for each of the {len(source)} examples",
    )
    # Whatever numbers were given, clients are counted from 0 in their order.
    parts = [np.flatnonzero(client == number) for number in np.unique(client)]
    return Splits(Federation(source, parts), *(_split(arrays, name, path) for name in ("validation", "test")))


def read(path: Path, absent: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, numbers and texts only; `absent` is said if there is no such file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UserError(absent) from None
    except (ValueError, OSError, zipfile.BadZipFile, AttributeError) as error:
        raise UserError(f"cannot read {path} as an .npz file of plain arrays: {error}") from None


def _split(arrays: dict[str, np.ndarray], name: str, path: str) -> Split | None:
    if f"x_{name}" not in arrays:
        require(f"y_{name}" not in arrays, f"{path} holds y_{name} but no x_{name}")
        return None
    require(f"y_{name}" in arrays, f"{path} holds x_{name} but no y_{name}")
    part = _checked(arrays, f"x_{name}", f"y_{name}", path)
    return Split(part.x, part.labels)


def _checked(arrays: dict[str, np.ndarray], x: str, y: str, path: str) -> TensorSource:
    for name in (x, y):
        numbers = np.issubdtype(arrays[name].dtype, np.number) or arrays[name].dtype == bool
        require(numbers, f"{path}: {name} must hold numbers, not {arrays[name].dtype}")
    return checked(_tensor(arrays[x]), torch.from_numpy(arrays[y]), f"{path}: {x}")


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array if array.dtype == np.uint8 else array.astype(np.float32))
