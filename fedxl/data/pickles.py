"""Published pickles, read without running them: arrays of numbers and plain containers, and nothing else.

A pickle is a program; it may call whatever it can name. Here it can name three things, and each of them is a stand-in
of ours that does no more than note what an array is made of. NumPy's own constructors are not within its reach: they
trust their arguments more than a stranger's file deserves.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np

from fedxl.errors import UserError

TYPES = ("u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f4", "f8")


class _Dtype:
    """Stands in for numpy.dtype."""

    def __init__(self, code: Any) -> None:
        self.code, self.order = _text(code), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = _text(state[1])  # (version, byte order, ...); the rest is for types with fields

    def numpy(self) -> np.dtype[Any]:
        if self.code not in TYPES or self.order not in ("|", "<", ">", "="):
            raise pickle.UnpicklingError(f"it holds an array of type {self.code!r}, which is no number")
        return np.dtype(self.order + self.code)


class _Array:
    """Stands in for an array that is about to be told its content."""

    content: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("it holds an array that is not plain numbers")
        kind, sizes = dtype.numpy(), tuple(int(size) for size in shape)
        if min(sizes, default=0) < 0 or math.prod(sizes) * kind.itemsize != len(data):
            raise pickle.UnpicklingError(f"it holds an array of shape {sizes} in {len(data)} bytes")
        self.content = np.frombuffer(data, kind).reshape(sizes, order="F" if fortran else "C")


class _Name:
    """What a pickle gets for a name. It has no attributes of its own, so that none can be set."""

    __slots__ = ()


class _DtypeName(_Name):
    def __call__(self, code: Any, *ignored: Any) -> _Dtype:
        return _Dtype(code)


class _ReconstructName(_Name):
    def __call__(self, *ignored: Any) -> _Array:
        return _Array()


NAMES: dict[tuple[str, str], type[_Name]] = {
    ("numpy", "dtype"): _DtypeName,
    ("numpy", "ndarray"): _Name,  # only ever an argument of _reconstruct
    ("numpy.core.multiarray", "_reconstruct"): _ReconstructName,
    ("numpy._core.multiarray", "_reconstruct"): _ReconstructName,  # as NumPy 2 writes it
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array of numbers")
        return NAMES[module, name]()


def loads(data: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle, one line if there is anything but plain data; Python 2's texts come as bytes."""
    try:
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise anything at all
        line = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{where} was not read: {line}") from None
    if not isinstance(content, dict):
        raise UserError(f"{where} was not read: it holds a {type(content).__name__}, not a dictionary")
    return {_text(key): value.content if isinstance(value, _Array) else value for key, value in content.items()}


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
