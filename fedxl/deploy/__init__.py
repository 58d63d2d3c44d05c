"""The same algorithms over a network: sites that keep their data, a server that averages, a transport in between."""

import logging
import time
from collections.abc import Callable

Say = Callable[[str], None]  # prints one line


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def clock(ahead: float = 0.0) -> str:
    """The time of day in so many seconds."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + ahead))


def say(line: str) -> None:
    """Print a line with the time."""
    print(f"{now()} {line}", flush=True)


def named(name: str, say: Say = say) -> Say:
    """Lines with the time and the name of a party; what this process logs gets the same form."""

    def saying(line: str) -> None:
        say(f"{name}: {line}")

    logging.getLogger("fedxl").handlers = [_Lines(saying)]
    return saying


class _Lines(logging.Handler):
    def __init__(self, say: Say) -> None:
        super().__init__()
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(self.format(record))


class Throttle:
    """Says each line at most once per minute, and at most 100 lines per minute: nobody else may fill our disk."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.said: dict[str, float] = {}  # lines, and when

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        self.said = {each: since for each, since in self.said.items() if now - since < 60.0}
        if line not in self.said and len(self.said) < 100:
            self.said[line] = now
            self.say(line)
