"""Your own data from a NumPy .npz file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from fedxl.data.federation import Federation, Split, Splits
from fedxl.data.source import checked
from fedxl.errors import UserError, require


def npz(path: str) -> Splits:
    """Arrays x [n, ...], y [n], client [n] (0, 1, ...), and optionally x_validation, y_validation, x_test, y_test."""
    arrays = _read(Path(path))
    missing = [name for name in ("x", "y", "client") if name not in arrays]
    require(not missing, f"{path} lacks the array(s) {', '.join(missing)}; it must hold x, y and client")
    source = checked(_tensor(arrays["x"]), torch.from_numpy(arrays["y"]), f"{path}: x")
    client = arrays["client"]
    require(
        client.shape == (len(source),) and np.issubdtype(client.dtype, np.integer) and int(client.min()) >= 0,
        f"{path}: client must be one whole number from 0 for each of the {len(source)} examples",
    )
    order = np.argsort(client, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(client))[:-1])
    return Splits(Federation(source, parts), *(_split(arrays, name, path) for name in ("validation", "test")))


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; data.path must name an .npz file") from None
    except (ValueError, OSError, zipfile.BadZipFile, AttributeError) as error:
        raise UserError(f"cannot read {path} as an .npz file of plain arrays: {error}") from None


def _split(arrays: dict[str, np.ndarray], name: str, path: str) -> Split | None:
    if f"x_{name}" not in arrays:
        return None
    require(f"y_{name}" in arrays, f"{path} holds x_{name} but no y_{name}")
    part = checked(_tensor(arrays[f"x_{name}"]), torch.from_numpy(arrays[f"y_{name}"]), f"{path}: x_{name}")
    return Split(part.x, part.labels)


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array if array.dtype == np.uint8 else array.astype(np.float32))
