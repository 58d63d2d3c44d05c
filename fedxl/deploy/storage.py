"""What processes of a party share on its disk: locks, turns to train, secret seeds, tables that survive a crash."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fedxl.errors import UserError, require
from fedxl.files import open_private, private_folder, read_bytes, read_json, write_atomically

SEED_FILE = "private.seed"  # in the folder of a run
SEED_BYTES, SEED_BITS = 32, 128
TURNS = "FEDXL_TURNS"  # environment variable: the folder of turns; without it there is no limit
POLL = 0.05


@contextmanager
def locked(folder: Path, name: str = ".lock") -> Iterator[Path]:
    """Hold a lock on a folder, created if missing: several processes of a party may use it."""
    with writing_to(folder):
        private_folder(folder)
        lock = open_private(folder / name)
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def remember(path: Path, content: Mapping[str, Any]) -> None:
    """Write what this site must not forget."""
    with writing_to(path.parent):
        write_atomically(path, json.dumps(content).encode(), private=True)


def recall(path: Path, most: int = 2**24) -> dict[str, Any]:
    """What `remember` wrote; empty if there is no such file."""
    try:
        return read_json(path, most)
    except FileNotFoundError:
        return {}
    except UserError as error:
        raise UserError(f"{error}; if it is damaged, its owner must correct or remove it") from None


@contextmanager
def updating(path: Path, most: int = 2**24) -> Iterator[dict[str, Any]]:
    """What `remember` wrote. What the block changes in it is on the disk when the block ends without an error."""
    content = recall(path, most)
    before = json.dumps(content)
    yield content
    if json.dumps(content) != before:
        remember(path, content)


def kept_seed(path: Path) -> int:
    """The secret seed in this file, made once and never sent: below 2**128, its highest bit set (see `sampling`)."""
    with suppress(FileNotFoundError):
        return _seed(path)
    with locked(path.parent, f".{path.name}.lock"):
        if not path.exists():  # another process may have made it meanwhile
            with writing_to(path.parent):
                write_atomically(path, os.urandom(SEED_BYTES), private=True)
    return _seed(path)


def _seed(path: Path) -> int:
    content, size = read_bytes(path), SEED_BYTES
    right = len(content) == size
    require(right, f"{path} holds {len(content)} bytes, not the {size} of a secret seed; its owner must remove it")
    return int.from_bytes(content, "big") >> (8 * size - SEED_BITS) | 1 << (SEED_BITS - 1)


@contextmanager
def writing_to(folder: Path, otherwise: str = "earlier states are intact") -> Iterator[None]:
    """Turn an error of the disk into the user's."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; {otherwise}") from None


def offer_turns(folder: Path, count: int) -> dict[str, str]:
    """Let so many sites on this machine train at once, to save memory. Returns the environment of their processes."""
    folder.mkdir(exist_ok=True, mode=0o700)
    for old in folder.iterdir():  # there may be too many, from a machine with more processors
        old.unlink()
    for number in range(count):
        (folder / str(number)).touch()
    return {TURNS: str(folder.resolve())}


@contextmanager
def turn() -> Iterator[None]:
    """Hold a turn, if turns are in use. The system releases it even if this process is killed."""
    folder = os.environ.get(TURNS)
    turns = [file.open("w") for file in sorted(Path(folder).iterdir())] if folder else []
    try:
        while turns and not any(map(take_lock, turns)):
            time.sleep(POLL)
        yield
    finally:
        for each in turns:
            each.close()


def take_lock(file: IO[str]) -> bool:
    """Lock a file, unless another process has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
