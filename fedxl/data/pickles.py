"""Reads published pickles without executing them: arrays of numbers and plain containers, and nothing else.

A pickle is a program; it may call whatever it can name. Here it can name three things, and each of them is a stand-in
of ours that does no more than note what an array is made of. NumPy's own constructors are not within its reach: they
trust their arguments more than a stranger's file deserves.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np

from fedxl.errors import UserError

# The opcodes of plain data. Others, such as DUP and LONG4, expand a few bytes to many, or run code.
OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK",
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND", "APPENDS",
    "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS",
    "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
}  # fmt: skip
NESTING = {name for name in OPCODES if name.endswith(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST", "DICT"))}
NESTING |= {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"}  # these also leave a container on top
TUPLES = 1000  # a published file has a few; nested ones use up the stack
DIMENSIONS, LONGEST = 32, 2**40  # of an array

TYPES = ("u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f4", "f8")


class _Dtype:
    """Stands in for numpy.dtype."""

    def __init__(self, code: Any) -> None:
        self.code, self.order = _text(code), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = _text(state[1])  # (version, byte order, ...); the rest is for types with fields

    def numpy(self) -> np.dtype[Any]:
        known = self.code in TYPES and self.order in ("|", "<", ">", "=")
        _require(known, f"it holds an array of type {self.code!r}, which is not a number")
        return np.dtype(self.order + self.code)


class _Array:
    """Stands in for an array that has not received its content yet."""

    content: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        _require(isinstance(dtype, _Dtype) and isinstance(data, bytes), "it holds an array that is not plain numbers")
        kind, sizes = dtype.numpy(), tuple(shape[:DIMENSIONS])
        small = len(sizes) == len(shape) and all(type(size) is int and 0 <= size <= LONGEST for size in sizes)
        whole = small and math.prod(sizes) * kind.itemsize == len(data)
        _require(whole, f"it holds an array whose {len(data)} bytes do not match its shape")
        self.content = np.frombuffer(data, kind).reshape(sizes, order="F" if fortran else "C")


class _Name:
    """What a pickle gets for a name. It has no attributes, so that a pickle can set none."""

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
        _require((module, name) in NAMES, f"it asks for {module}.{name}, which is not an array of numbers")
        return NAMES[module, name]()


def loads(data: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle. Anything but plain data is a one-line error. Strings of Python 2 become bytes."""
    try:
        _require_plain(data)
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise anything
        line = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{where} was not read: {line}") from None
    if not isinstance(content, dict):
        raise UserError(f"{where} was not read: it holds a {type(content).__name__}, not a dictionary")
    if not all(isinstance(key, (bytes, str)) for key in content):
        raise UserError(f"{where} was not read: its keys are not strings")
    return {_text(key): value.content if isinstance(value, _Array) else value for key, value in content.items()}


def _require_plain(data: bytes) -> None:
    """Inspect every operation of a pickle, and refuse those that can use more memory than its length justifies.

    No list, tuple or dictionary is used twice: where one holds another twice, and that a third twice, a hundred bytes
    are a tree too large to be walked. No place in the memo has a number above that of the bytes: the memo is made so
    long.
    """
    nested: dict[int, bool] = {}  # by index in the memo
    before, tuples = "", 0
    for opcode, argument, _ in pickletools.genops(data):
        name, place = opcode.name, len(nested) if argument is None else argument
        tuples += "TUPLE" in name
        _require(name in OPCODES, f"it holds {name}, which plain data do not use")
        _require(tuples <= TUPLES, "it holds too many tuples")
        if name.endswith("GET"):
            _require(not nested.get(place), "it uses a list, tuple or dictionary twice")
        if name.endswith("PUT") or name == "MEMOIZE":
            _require(place <= len(data), "its memo has an index beyond its length")
            nested[place] = before in NESTING
        elif name != "FRAME":  # FRAME does not change the stack
            before = name


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise pickle.UnpicklingError(message)


def _text(value: Any) -> str:
    _require(isinstance(value, (bytes, str)), "it holds another type where a string is expected")
    return value.decode("latin1") if isinstance(value, bytes) else value
