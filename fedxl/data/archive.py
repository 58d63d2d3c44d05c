"""Reads files of NumPy arrays. Checks the headers of an archive before it allocates memory for its arrays."""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedxl.errors import UserError, require

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
HEADER = 2**16  # bytes that may hold an array's type and shape
DIMENSIONS = 16
PLAIN = "biufcSU"  # kinds of dtypes: numbers and strings
DEFLATED = 1032  # the most that deflate can expand a file


class _Array(NamedTuple):
    """The type and shape of an array in an archive, from its header."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def needs(self) -> int:
        """Bytes of memory for the array, and for its conversion to floats."""
        count = math.prod(self.shape)
        return count * self.dtype.itemsize + (0 if self.dtype == np.uint8 else 4 * count)


def read(path: Path, absent: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz file: numbers and strings only. `absent` is the error if there is no such file."""
    try:
        # A device or a pipe may never end.
        require(path.is_file() or not path.exists(), f"{path} is not a file; it must be an .npz file")
        with zipfile.ZipFile(path) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers written by Python 2
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            require(len(members) == len(archive.infolist()), f"{path} holds two arrays of the same name")
            _require_room(path, {name: _header(archive, info) for name, info in members.items()})
            return {name: _array(archive, info) for name, info in members.items()}
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(absent) from None
    except Exception as error:  # a damaged archive may raise anything
        raise UserError(f"cannot read {path} as an .npz file of plain arrays: {error or 'it is damaged'}") from None


def _require_room(path: Path, arrays: dict[str, _Array]) -> None:
    needs, room = sum(array.needs for array in arrays.values()), _room()
    gigabytes = f"{path} holds {needs / 2**30:,.1f} GB of arrays, but only {room / 2**30:,.1f} GB of memory are free"
    require(needs <= room, gigabytes)


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Array:
    """The header of a member. ValueError if it is not an array, or claims more than its bytes can hold."""
    if not info.filename.endswith(".npy"):
        raise ValueError(f"it holds '{info.filename}', which is not an array")
    times = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: DEFLATED}.get(info.compress_type, 0)
    with archive.open(info) as file:
        start = io.BytesIO(file.read(HEADER))
    version = np.lib.format.read_magic(start)
    if version not in HEADERS:
        raise ValueError(f"'{info.filename}' has the unknown format version {version}")
    shape, _, dtype = HEADERS[version](start)
    if dtype.kind not in PLAIN or dtype.hasobject:
        raise ValueError(f"'{info.filename}' holds {dtype}, which are neither numbers nor strings")
    size = math.prod(shape) * dtype.itemsize
    fits = start.tell() + size == info.file_size <= times * (info.compress_size + 1)
    if not fits or len(shape) > DIMENSIONS or min(shape, default=0) < 0:
        raise ValueError(f"'{info.filename}' does not match its header, {dtype} {list(shape)}")
    return _Array(shape, dtype)


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """An array in this machine's byte order."""
    with archive.open(info) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _room() -> int:
    """Bytes of memory that are available."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))  # a container's limit; "max" means none
    return min(found)
