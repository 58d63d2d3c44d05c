"""The state of a server's run, in a file that its supervisor and operators can read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from fedxl.files import write_atomically

RUNNING, FINISHED, FAILED = "running", "finished", "failed"
FILE = "status.json"


class Status(NamedTuple):
    state: str
    pid: int
    message: str

    @property
    def alive(self) -> bool:
        """Whether the process that wrote it still runs. A zombie does not count."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False


def write(folder: Path, state: str, message: str = "") -> None:
    write_atomically(folder / FILE, json.dumps([state, os.getpid(), message]).encode())


def read(folder: Path) -> Status | None:
    try:
        return Status(*json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def forget(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)
