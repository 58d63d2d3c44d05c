"""Your own data from a NumPy .npz file, whose headers are checked before memory is taken for its arrays."""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from fedxl.data.federation import Federation, Split, Splits
from fedxl.data.forms import Columns
from fedxl.data.source import TensorSource, checked
from fedxl.errors import UserError, require, unknown

ARRAYS = ("x", "y", "client", "x_validation", "y_validation", "x_test", "y_test")
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
HEADER = 2**16  # bytes that may hold an array's type and shape
DIMENSIONS = 16
PLAIN = "biufcSU"  # kinds of dtypes: numbers and strings
DEFLATED = 1032  # the most that deflate can expand a file


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


def read(path: Path, absent: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz file: numbers and strings only. `absent` is the error if there is no such file."""
    try:
        # A device or a pipe may never end.
        require(path.is_file() or not path.exists(), f"{path} is not a file; it must be an .npz file")
        with zipfile.ZipFile(path) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers written by Python 2
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            require(len(members) == len(archive.infolist()), f"{path} holds two arrays of the same name")
            needs, room = sum(_size(archive, info) for info in members.values()), _room()
            free = f"but only {room / 2**30:,.1f} GB of memory are free"
            require(needs <= room, f"{path} holds {needs / 2**30:,.1f} GB of arrays, {free}")
            return {name: _array(archive, info) for name, info in members.items()}
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(absent) from None
    except Exception as error:  # a damaged archive may raise anything
        raise UserError(f"cannot read {path} as an .npz file of plain arrays: {error or 'it is damaged'}") from None


def _size(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """Bytes of memory for an array, and for its conversion to floats, by its header.

    Raises ValueError if it is not an array, or claims more than its bytes can hold.
    """
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
    return size + (0 if dtype == np.uint8 else 4 * math.prod(shape))


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
