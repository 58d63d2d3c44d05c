"""Locks on a site's folders: one process at a time, for one whose Flower node has died may live on for a while."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedxl.errors import UserError
from fedxl.files import open_private, private_folder


@contextmanager
def locked(folder: Path, name: str = ".lock") -> Iterator[Path]:
    """Create the folder, if there is none, and hold a lock on it."""
    try:
        private_folder(folder)
        lock = open_private(folder / name)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; earlier states are intact") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
