"""Sites that share one machine take turns, so that no more work at a time than the machine has processors for.

Each would otherwise hold the network several times over, all of them at once.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

FOLDER = "FEDXL_TURNS"  # the environment's word for where the turns are; without it nobody waits
POLL = 0.05


def offered(folder: Path, count: int) -> dict[str, str]:
    """Make so many turns; what to add to the environment of those who shall take them."""
    folder.mkdir(exist_ok=True, mode=0o700)
    for old in folder.iterdir():  # of a machine with more processors, perhaps
        old.unlink()
    for number in range(count):
        (folder / str(number)).touch()
    return {FOLDER: str(folder.resolve())}


@contextmanager
def taken() -> Iterator[None]:
    """Wait for a turn, if turns are to be taken, and give it back, even by dying."""
    folder = os.environ.get(FOLDER)
    if not folder:
        yield
        return
    turns = [file.open("w") for file in sorted(Path(folder).iterdir())]
    try:
        while not any(map(_locked, turns)):
            time.sleep(POLL)
        yield
    finally:
        for turn in turns:
            turn.close()


def _locked(turn: IO[str]) -> bool:
    try:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
