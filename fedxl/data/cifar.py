"""CIFAR-10 and CIFAR-100 as imbalanced binary tasks. Krizhevsky, Learning Multiple Layers of Features (2009)."""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedxl.data.federation import Split, Splits
from fedxl.data.holdout import Stream
from fedxl.data.published import FILES, how_to_get
from fedxl.data.sites import Sites, hold_back, imbalance
from fedxl.errors import UserError, require
from fedxl.sampling import Indices, Purpose, generator

LARGEST = 2**28  # bytes of a published file; the largest, CIFAR-100's train, has 155 million


class _Release(NamedTuple):
    """The files of the published archive."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str
    classes: int


CIFAR10 = _Release(
    "cifar10", "cifar-10-batches-py", tuple(f"data_batch_{n}" for n in range(1, 6)), ("test_batch",), "labels", 10
)
CIFAR100 = _Release("cifar100", "cifar-100-python", ("train",), ("test",), "fine_labels", 100)


def cifar10(
    root: str = "data",
    positive: tuple[int, ...] = tuple(range(5, 10)),
    ratio: float = 0.2,
    validation: int = 10_000,
    sites: Sites = Sites(site_noise=0.04),  # noqa: B008 (frozen)
) -> Splits:
    """CIFAR-10, five classes against five, imbalanced as in the FeDXL paper; 32 x 32 colour photographs.

    root: where cifar-10-batches-py is, or what is in it, or cifar-10-python.tar.gz;
    positive: the classes that count as positive; validation: how many of the 50,000 training images are held back,
    drawn by the seed, as balanced as these are; ratio: positives to negatives in the rest, images of the class that
    is too many being left out (0: all stay). With the defaults 4,000 positives and 20,000 negatives are trained on,
    and 10,000 images each validate and test. For the other settings see `Sites`.
    """
    return _binary(CIFAR10, root, positive, ratio, validation, sites)


def cifar100(
    root: str = "data",
    positive: tuple[int, ...] = tuple(range(50, 100)),
    ratio: float = 0.2,
    validation: int = 10_000,
    sites: Sites = Sites(site_noise=0.04),  # noqa: B008 (frozen)
) -> Splits:
    """CIFAR-100, fifty classes against fifty, imbalanced as in the FeDXL paper; 32 x 32 colour photographs.

    root: where cifar-100-python is, or what is in it, or cifar-100-python.tar.gz; the rest as for CIFAR-10.
    """
    return _binary(CIFAR100, root, positive, ratio, validation, sites)


def _binary(
    release: _Release, root: str, positive: tuple[int, ...], ratio: float, validation: int, sites: Sites
) -> Splits:
    known = positive and set(positive) <= set(range(release.classes))
    require(bool(known), f"positive must name classes 0 to {release.classes - 1}, got {list(positive)}")
    require(ratio >= 0, f"ratio must not be negative, got {ratio}")
    batches = _batches(release, Path(root))
    (images, classes), test = (_join(release, batches, names) for names in (release.train, release.test))

    def split(x: np.ndarray, y: Indices) -> Split:
        return Split(torch.from_numpy(x), torch.from_numpy(np.isin(y, positive).astype(np.int64)))

    labels = np.isin(classes, positive).astype(np.int64)
    rest, held = hold_back(labels, validation, generator(sites.seed, Purpose.DATA, 0, Stream.HOLD_BACK))
    kept = imbalance(rest, labels, ratio, generator(sites.seed, Purpose.DATA, 0, Stream.IMBALANCE))
    held_back = split(images[held], classes[held]) if validation else None
    return sites.share_out(split(images[kept], classes[kept]), held_back, split(*test))


def _join(release: _Release, batches: dict[str, bytes], names: tuple[str, ...]) -> tuple[np.ndarray, Indices]:
    """(images [n, 3, 32, 32], classes [n]) of these batches."""
    parts = [_checked(loads(batches[name], name), release, name) for name in names]
    images, classes = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return images.reshape(-1, 3, 32, 32), classes


def _checked(content: dict[str, Any], release: _Release, name: str) -> tuple[np.ndarray, Indices]:
    images, labels = content.get("data"), content.get(release.labels)
    pixels = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape[1:] == (3072,)
    require(pixels, f"{name} is not a batch of {release.name}: its data are not rows of 3072 bytes")
    assert isinstance(images, np.ndarray)
    plain = isinstance(labels, list) and all(type(label) is int and 0 <= label < release.classes for label in labels)
    require(
        plain and len(labels or ()) == len(images),
        f"{name} is not a batch of {release.name}: {release.labels} must hold one of {release.classes} classes each",
    )
    return images, np.array(labels, np.int64)


def _batches(release: _Release, root: Path) -> dict[str, bytes]:
    """The content of the published files: unpacked in or above `root`, or still in the archive."""
    wanted = {*release.train, *release.test}
    advice = how_to_get(release.name, root)
    archive = root / FILES[release.name].file
    for folder in (root / release.folder, root):
        found = {name for name in wanted if (folder / name).is_file()}
        if found == wanted:
            for name in wanted:
                require((folder / name).stat().st_size <= LARGEST, f"{folder / name} is too large to be {name}")
            try:
                return {name: (folder / name).read_bytes() for name in wanted}
            except OSError as error:
                raise UserError(f"cannot read {folder}: {error}") from None
        lacking = ", ".join(sorted(wanted - found))
        # CIFAR-100's file names are common: a few of them in a folder of another name prove nothing.
        require(folder.name != release.folder or not folder.is_dir(), f"{folder} lacks {lacking}; {advice}")
    require(archive.is_file(), f"there is no {release.folder} in {root}; {advice}")
    found_in = dict(_members(archive, {f"{release.folder}/{name}": name for name in wanted}))
    require(found_in.keys() == wanted, f"{archive} does not hold all of {release.folder}; {advice}")
    return found_in


def _members(archive: Path, wanted: dict[str, str]) -> Iterator[tuple[str, bytes]]:
    """(short name, content) of the wanted files of an archive, read in one pass without unpacking."""
    try:
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if name in wanted and member.isfile() and (file := tar.extractfile(member)):
                    require(member.size <= LARGEST, f"{archive}: {name} is too large to be what was published")
                    yield wanted[name], file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {archive}: {error}; remove it and fetch it again") from None


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


class _Name(NamedTuple):
    """What a pickle gets for a name. It is a tuple, so that a pickle can set no attributes."""

    make: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.make(*arguments)


NAMES = {
    ("numpy", "dtype"): _Name(lambda code, *ignored: _Dtype(code)),
    ("numpy", "ndarray"): None,  # only ever an argument of _reconstruct
    ("numpy.core.multiarray", "_reconstruct"): _Name(lambda *ignored: _Array()),
    ("numpy._core.multiarray", "_reconstruct"): _Name(lambda *ignored: _Array()),  # as NumPy 2 writes it
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        _require((module, name) in NAMES, f"it asks for {module}.{name}, which is not an array of numbers")
        return NAMES[module, name]


def loads(data: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle. Raises UserError for anything but plain data. Strings of Python 2 become bytes."""
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
