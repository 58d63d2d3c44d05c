"""Limits how many sites on one machine train at the same time, to as many as it has processors.

Each of them holds several copies of the network in memory while it trains.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

FOLDER = "FEDXL_TURNS"  # environment variable: the folder of slots; without it there is no limit
POLL = 0.05


def offered(folder: Path, count: int) -> dict[str, str]:
    """Create so many slots. Returns the environment variable for the processes that share them."""
    folder.mkdir(exist_ok=True, mode=0o700)
    for old in folder.iterdir():  # there may be too many, from a machine with more processors
        old.unlink()
    for number in range(count):
        (folder / str(number)).touch()
    return {FOLDER: str(folder.resolve())}


@contextmanager
def taken() -> Iterator[None]:
    """Hold a slot, if slots are in use. The system releases it even if this process is killed."""
    folder = os.environ.get(FOLDER)
    if not folder:
        yield
        return
    slots = [file.open("w") for file in sorted(Path(folder).iterdir())]
    try:
        while not any(map(_locked, slots)):
            time.sleep(POLL)
        yield
    finally:
        for slot in slots:
            slot.close()


def _locked(slot: IO[str]) -> bool:
    try:
        fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
