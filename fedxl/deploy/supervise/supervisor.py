"""A process supervisor: it restarts processes that crash, after a pause that grows with each crash.

A process that exits with code 2 reports a user's mistake in its last line: the supervisor stops with that line. When
the main process exits with code 0, the work is done.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedxl.deploy import Say
from fedxl.deploy.supervise.children import die_with_parent
from fedxl.errors import UserError

POLL = 0.2
PAUSE = (0.5, 30.0)  # seconds before a restart: the first, and the longest
STABLE = 60.0  # seconds after which a process counts as stable: earlier crashes no longer count
USER_ERROR = 2
REMINDER = 12 * 3600.0  # seconds


@dataclass
class Child:
    """A process that should be running."""

    name: str
    command: Sequence[str]
    folder: Path  # its working directory, which also holds its log
    needs: str = ""  # the child without which it must be restarted
    main: bool = False  # the supervisor stops when this child finishes
    shown: bool = False  # whether to print the lines of its log
    process: subprocess.Popen[bytes] | None = None
    crashes: int = 0  # since it was last stable
    started: float = 0.0
    restart_at: float = 0.0
    printed: int = 0  # bytes of its log

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        self.started = time.monotonic()
        return self.process

    def new_lines(self) -> list[str]:
        """Complete lines of its log that have not been printed."""
        if not self.shown or not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(self.printed)
            whole, newline, _ = log.read().rpartition(b"\n")
        self.printed += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()


@dataclass
class Supervisor:
    children: Sequence[Child]
    environment: Mapping[str, str]
    say: Say
    progress: Callable[[], object] = lambda: None  # a value that changes when the work advances
    remind: Callable[[], Iterable[str]] = tuple  # lines to print at the start, and twice a day
    max_crashes: int = 0  # of the main process without progress, then the supervisor gives up; 0: no limit
    _last_progress: object = field(default=None, init=False)

    def run(self, started: list[subprocess.Popen[bytes]]) -> None:
        """Run until the main process finishes. Keeps the running processes in `started`, for cleanup."""
        self._last_progress, reminded = self.progress(), -math.inf
        for child in self.children:
            child.printed = child.log.stat().st_size if child.log.exists() else 0
        while True:
            if time.monotonic() - reminded > REMINDER:
                reminded = time.monotonic()
                for line in self.remind():
                    self.say(line)
            for child in self.children:
                if child.process is None and time.monotonic() >= child.restart_at:
                    started.append(child.start(self.environment))
                    continue
                ended = child.process is not None and not child.alive
                lines = child.new_lines()
                if ended and child.process and child.process.returncode == USER_ERROR:
                    lines = lines[:-1]  # the last one ends this process, which says it then
                for line in lines:
                    self.say(line)
                if ended:
                    assert child.process
                    started.remove(child.process)
                    if self._ended(child):
                        return
            time.sleep(POLL)

    def _ended(self, child: Child) -> bool:
        """Whether the work is done. If not, schedule a restart of the child and of those that need it."""
        assert child.process
        code, child.process = child.process.returncode, None
        if child.main and code == 0:
            return True
        if code == USER_ERROR:
            raise UserError(last_line(child.log))
        now = time.monotonic()
        progress = self.progress()
        stable = now - child.started > STABLE or progress != self._last_progress
        self._last_progress = progress
        child.crashes = 1 if stable else child.crashes + 1
        if child.main and self.max_crashes and child.crashes > self.max_crashes:
            raise UserError(f"the {child.name} crashed {child.crashes} times without progress; see {child.log}")
        pause = min(PAUSE[0] * 2 ** (child.crashes - 1), PAUSE[1])
        child.restart_at = now + pause
        self.say(f"the {child.name} crashed (code {code}); restarting it in {pause:g} s")
        for other in self.children:
            if other.needs == child.name and other.alive:
                assert other.process
                other.process.kill()
        return False


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].removeprefix("fedxl: ") if lines else "its log is empty"


def command(role: str, folder: Path, *more: str) -> list[str]:
    """The command of one of our processes: `python -m fedxl.deploy ROLE FOLDER ...`."""
    return [sys.executable, "-m", "fedxl.deploy", role, str(folder), *more]


def environment(home: Path, name: str) -> dict[str, str]:
    """Our environment with `name` set to `home`, and without Flower's settings, which could open ports."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    return {**clean, name: str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
