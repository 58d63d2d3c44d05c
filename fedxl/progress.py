"""Progress of long work on standard error: a bar on a terminal, a line from time to time in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

LINE_EVERY = 30.0  # seconds, in a log


@contextmanager
def progress(what: str, total: int | None, bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of items just done."""
    # Imported when something is shown: `import fedxl` must be quick.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what, total, bytes, partial(console.print, markup=False, highlight=False, soft_wrap=True))
        return
    done = DownloadColumn() if bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), done, TimeRemainingColumn())
    # Items may be large: estimate the time left from the last ten minutes.
    with Progress(*columns, console=console, speed_estimate_period=600) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _lines(what: str, total: int | None, bytes: bool, say: Callable[[str], None]) -> Callable[[int], None]:
    """Writes lines instead of a bar where there is no terminal."""
    done, began, pace = 0, time.monotonic(), Pace()

    def number(count: int) -> str:
        return f"{count / 1e6:.1f} MB" if bytes else f"{count:,}"

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if done != total and pace.due():
            left = ", " + time_left(time.monotonic() - began, done, total) if total is not None and done else ""
            say(f"{what}: {number(done)}" + (f" of {number(total)}" if total is not None else "") + left)

    return advance


class Pace:
    """When to write the next line to a log: every `LINE_EVERY` seconds."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def due(self) -> bool:
        now = time.monotonic()
        if now - self.last < LINE_EVERY:
            return False
        self.last = now
        return True


def time_left(seconds: float, done: int, total: int) -> str:
    """The time left, in words, at the pace so far.

    >>> time_left(60, 2, 5), time_left(600, 1, 3), time_left(7200, 1, 4)
    ('about 90 s left', 'about 20 min left', 'about 6.0 h left')
    """
    left = seconds / done * (total - done)
    for unit, length, digits in (("h", 3600, 1), ("min", 60, 0)):
        if left >= 2 * length:
            return f"about {left / length:.{digits}f} {unit} left"
    return f"about {left:.0f} s left"
