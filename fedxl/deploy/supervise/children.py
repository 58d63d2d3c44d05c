"""Processes that we start, and those that they start: none may outlive us."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

PATIENCE = 20.0  # seconds that processes have to end by themselves
HOME = "FLWR_HOME"  # in the environment of all of Flower's processes: where a party's own files of it are


@contextmanager
def stopping_all(homes: Sequence[Path] = ()) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Whatever happens, nothing that was started stays behind: neither these processes nor theirs.

    homes: of Flower's parties; whatever has one of them in its environment was started by us, or by who we started.
    """
    started: list[subprocess.Popen[bytes]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield started
    finally:
        # Whoever asks a second time must not stop us from stopping the others.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _terminate(started)
        sweep(homes)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)


def die_with_parent() -> None:
    """In a child, before it becomes another program: SIGTERM when this process is gone, even by kill -9 (Linux)."""
    set_parent_death_signal = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _terminate(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all of them, wait a while, then kill; and kill their descendants, who may not have been asked."""
    relatives = [pid for process in processes for pid in descendants(process.pid)]
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid in relatives:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def sweep(homes: Sequence[Path]) -> None:
    """Kill what lives on at these homes: children of whoever died before they were seen."""
    quiet = 0
    while homes and quiet < 2:  # one that was just being started is seen the second time
        left = living_at(homes)
        quiet = 0 if left else quiet + 1
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def living_at(homes: Sequence[Path]) -> list[int]:
    """Processes of Flower's parties with these homes. Not we, nor who started us: they may have set it themselves."""
    marks, us = {f"{HOME}={home}".encode() for home in homes}, _ancestors(os.getpid())
    return [pid for pid in _pids() if pid not in us and marks & _environ(pid)]


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
    except OSError:  # it is gone, or not ours to look at
        return set()


def _parents() -> dict[int, int]:
    """Whose child each process is, by what /proc says."""
    found = {}
    for pid in _pids():
        with suppress(OSError, ValueError, IndexError):
            found[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def descendants(pid: int) -> list[int]:
    """Children and their children."""
    parents, found = _parents(), [pid]
    for each in found:  # which grows on the way
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]
