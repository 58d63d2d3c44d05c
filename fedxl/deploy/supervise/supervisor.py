"""Keeps processes running: whatever dies is started again, after a pause that grows while it keeps dying.

A process that ends with code 2 has said what is wrong, in its last line: the user's mistake, which a restart would
repeat. It ends the whole. Code 0 of the main process is the end of the work.
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

from fedxl.deploy.supervise.children import die_with_parent
from fedxl.errors import UserError

Say = Callable[[str], None]
POLL = 0.2
PAUSE = (0.5, 30.0)  # seconds before a restart: the first, and the longest
CALM = 60.0  # seconds after which a process counts as well: earlier deaths are forgotten
USER_ERROR = 2
REMINDER = 12 * 3600.0  # seconds


@dataclass
class Child:
    """A process that should be running."""

    name: str  # what to call it in a line for people
    command: Sequence[str]
    folder: Path  # where it works, and where its log is
    needs: str = ""  # the child whose death it cannot survive
    main: bool = False  # whose end is the end of the work
    shown: bool = False  # whether its lines are for people, too
    process: subprocess.Popen[bytes] | None = None
    deaths: int = 0  # since it was last well
    begun: float = 0.0
    due: float = 0.0  # when to start it again
    read: int = 0  # bytes of its log that have been shown

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
        self.begun = time.monotonic()
        return self.process

    def new_lines(self) -> list[str]:
        """Whole lines of its log that have not been shown."""
        if not self.shown or not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(self.read)
            whole, newline, _ = log.read().rpartition(b"\n")
        self.read += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()

    def last_words(self) -> str:
        """The last line of its log."""
        said = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return said[-1].removeprefix("fedxl: ") if said else "it says nothing"


@dataclass
class Supervisor:
    children: Sequence[Child]
    environment: Mapping[str, str]
    say: Say
    progress: Callable[[], object] = lambda: None  # what changes when the work gets on
    remind: Callable[[], Iterable[str]] = tuple  # lines to say at the beginning, and twice a day
    most_deaths: int = 0  # of the main process without any progress, then it is given up; 0: never
    _seen: object = field(default=None, init=False)

    def run(self, started: list[subprocess.Popen[bytes]]) -> None:
        """Until the main process has ended well. `started` is told of every process, for whoever cleans up."""
        self._seen, reminded = self.progress(), -math.inf
        for child in self.children:
            child.read = child.log.stat().st_size if child.log.exists() else 0
        while True:
            if time.monotonic() - reminded > REMINDER:
                reminded = time.monotonic()
                for line in self.remind():
                    self.say(line)
            for child in self.children:
                if child.process is None and time.monotonic() >= child.due:
                    started.append(child.start(self.environment))
                    continue
                ended = child.process is not None and not child.alive
                for line in child.new_lines():
                    self.say(line)
                if ended:
                    assert child.process
                    started.remove(child.process)
                    if self._ended(child):
                        return
            time.sleep(POLL)

    def _ended(self, child: Child) -> bool:
        """Whether the work is done; otherwise the child, and who needs it, will be started again."""
        assert child.process
        code, child.process = child.process.returncode, None
        if child.main and code == 0:
            return True
        if code == USER_ERROR:
            raise UserError(child.last_words())
        now = time.monotonic()
        seen = self.progress()
        calm = now - child.begun > CALM or seen != self._seen
        self._seen = seen
        child.deaths = 1 if calm else child.deaths + 1
        if child.main and self.most_deaths and child.deaths > self.most_deaths:
            raise UserError(f"the {child.name} has died {child.deaths} times without any progress; see {child.log}")
        pause = min(PAUSE[0] * 2 ** (child.deaths - 1), PAUSE[1])
        child.due = now + pause
        self.say(f"the {child.name} has died (code {code}); starting it again in {pause:g} s")
        for other in self.children:
            if other.needs == child.name and other.alive:
                assert other.process
                other.process.kill()
        return False


def command(role: str, folder: Path, *more: str) -> list[str]:
    """A process of ours: `python -m fedxl.deploy ROLE FOLDER ...`."""
    return [sys.executable, "-m", "fedxl.deploy", role, str(folder), *more]


def environment(home: Path, name: str) -> dict[str, str]:
    """Without any of Flower's own settings, which could open ports or send reports; with a mark to find us by."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    return {**clean, name: str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
