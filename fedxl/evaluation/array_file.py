"""Arrays by split in one .npz file: how results of an evaluation are kept, whatever they consist of."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fedxl.errors import UserError
from fedxl.files import DAMAGED, read_bytes, write_atomically

T = TypeVar("T")


def save_arrays(path: Path, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Write arrays, each named by its split and what it holds: `test_scores`."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(path, buffer.getvalue())


def load_splits(path: Path, mark: str, read: Callable[[np.lib.npyio.NpzFile, str], T], what: str) -> dict[str, T]:
    """`read(arrays, split)` for each split that has an array called `split_mark`; nothing if there is no file."""
    try:
        # From memory: of a damaged file, np.load would leave the handle open.
        with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as arrays:
            splits = [name.removesuffix(f"_{mark}") for name in arrays.files if name.endswith(f"_{mark}")]
            return {split: read(arrays, split) for split in splits}
    except FileNotFoundError:
        return {}
    except DAMAGED as error:
        raise UserError(f"cannot read {path}: {error}; remove it to do without its {what}") from None
