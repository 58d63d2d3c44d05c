"""Atomic writes, private files and folders, and one-line errors for disks that cannot be read."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO
from zipfile import BadZipFile

from fedxl.errors import UserError, first_line, kind_of, require

# What numpy and zipfile raise for a damaged .npy or .npz file; NotImplementedError is a RuntimeError.
DAMAGED = (
    OSError, ValueError, LookupError, EOFError, TypeError, RuntimeError, MemoryError,
    zlib.error, BadZipFile, TokenError,
)  # fmt: skip


def as_path(given: Any, name: str) -> Path:
    """What a user gave as the path of a folder."""
    such = repr(given) if isinstance(given, str) else kind_of(given)
    right = isinstance(given, (str, Path)) and bool(str(given)) and "\0" not in str(given)
    require(right, f"{name} must be a folder, such as 'runs/first', not {such}")
    return Path(given)


def private_folder(path: Path) -> None:
    """Create a folder and its missing parents, accessible to this user only. Existing folders keep their mode."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path) -> BinaryIO:
    """Open an empty file for writing that only this user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)  # the file may have existed with another mode
    return open(descriptor, "wb")


def write_atomically(path: Path, content: bytes, private: bool = False) -> None:
    """Write a file completely or not at all, even if the process or the machine stops at any moment."""
    with whole_file(path, private) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, private: bool = False, shared: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which gets its name once it is complete. shared: other processes may be writing it, too."""
    own = f".{os.getpid()}" if shared else ""
    partial = path.with_name(f".{path.name}{own}.partial")
    try:
        with open_private(partial) if private else partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()  # on a full disk it would take space that others need
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def writing(path: Path, otherwise: str = "") -> Iterator[None]:
    """Raises UserError if the disk refuses. otherwise: what the user can do."""
    try:
        yield
    except OSError as error:
        told = f"cannot write {path}: {error.strerror or error}"
        raise UserError(f"{told}; {otherwise}" if otherwise else told) from None


def read_bytes(path: Path) -> bytes:
    """The content of a file. FileNotFoundError if it does not exist; UserError if it exists and cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from error


def read_json(path: Path, most: int = 2**24) -> dict[str, Any]:
    """The table in a JSON file of another party: at most `most` bytes. FileNotFoundError if there is no such file."""
    if path.exists():  # a device or a pipe may never end
        require(path.is_file(), f"{path} is not a file")
        require(path.stat().st_size <= most, f"{path} has more than {most:,} bytes, which no file of ours has")
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a JSON file: {first_line(error)}") from None
    require(isinstance(content, dict), f"{path} must hold a JSON object, {{...}}")
    return content  # type: ignore[no-any-return]


def cannot_read(path: Path, error: OSError) -> UserError:
    """The error for a disk that cannot be read."""
    return UserError(f"cannot read {path}: {error.strerror or error}; nothing was changed, try again")


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON, with null for NaN and infinity."""
    write_atomically(path, (json.dumps(plain(content), indent=1) + "\n").encode())


def plain(value: Any) -> Any:
    """The same value with null for NaN and infinity, which JSON does not have.

    >>> plain({"auroc": float("nan"), "rates": (0.1, 0.3)})
    {'auroc': None, 'rates': [0.1, 0.3]}
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_templates(package: str) -> dict[str, str]:
    """The texts in a package's folder templates/, by their paths in it."""

    def read(folder: Traversable, place: str) -> dict[str, str]:
        found = dict[str, str]()
        for each in sorted(folder.iterdir(), key=lambda one: one.name):
            path = place + each.name
            found |= read(each, f"{path}/") if each.is_dir() else {path: each.read_text(encoding="utf-8")}
        return found

    return read(resources.files(package) / "templates", "")
