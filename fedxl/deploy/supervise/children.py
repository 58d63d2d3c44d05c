"""Stops the processes that we start, and their descendants: none may outlive us."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE = 20.0  # seconds from SIGTERM to SIGKILL
HOME = "FLWR_HOME"  # environment variable of all of Flower's processes: the party's folder for Flower


@contextmanager
def stopping_all(homes: Sequence[Path] = ()) -> Iterator[list[subprocess.Popen[bytes]]]:
    """On exit, stop all processes that are appended to the list, and all with one of `homes` in their environment."""
    started: list[subprocess.Popen[bytes]] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield started
    finally:
        # A second Ctrl-C must not interrupt the cleanup.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _terminate(started)
        kill_leftovers(homes)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)


def die_with_parent() -> None:
    """Called in a child before exec: it gets SIGTERM when its parent dies, even by kill -9 (Linux)."""
    set_parent_death_signal = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _terminate(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM, wait, then SIGKILL. Kill their descendants, which may not have received SIGTERM."""
    orphans = [pid for process in processes for pid in descendants(process.pid)]
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid in orphans:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_leftovers(homes: Sequence[Path]) -> None:
    """Kill processes of these homes whose parents died before we saw them."""
    quiet = 0
    while homes and quiet < 2:  # twice: a process that is just starting shows up the second time
        leftovers = processes_of(homes)
        quiet = 0 if leftovers else quiet + 1
        for pid in leftovers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def processes_of(homes: Sequence[Path]) -> list[int]:
    """Processes with these homes in their environment, except for ourselves and our ancestors, who may set it too."""
    marks, ours = {f"{HOME}={home}".encode() for home in homes}, _ancestors(os.getpid())
    return [pid for pid in _pids() if pid not in ours and marks & _environ(pid)]


def _ancestors(pid: int) -> set[int]:
    """A process, its parent, and so on."""
    parents, found = _parents(), set[int]()
    while pid and pid not in found:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def _environ(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:  # it has ended, or belongs to another user
        return set()


def _parents() -> dict[int, int]:
    """The parent of each process, from /proc."""
    found = {}
    for pid in _pids():
        with suppress(OSError, ValueError, IndexError):
            found[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def descendants(pid: int) -> list[int]:
    """A process's children, their children, and so on."""
    parents, found = _parents(), [pid]
    for each in found:  # the list grows during the loop
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]
