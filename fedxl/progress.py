"""Progress of long work: a bar in a notebook or on a terminal, a line from time to time in a log."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

LINE_EVERY = 30.0  # seconds, in a log
UPDATE_EVERY = 0.2  # in a notebook
Update = Callable[[int, str], None]  # how many items are done, and what else to say


@contextmanager
def progress(what: str, total: int | None, bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of items just done."""
    done = 0
    with display(what, total, bytes) as update:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            update(done, "")

        yield advance


@contextmanager
def rounds(console: Console | None = None, log: bool = True) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function of the round, of how many, and a note. What it shows begins with its first call."""
    with ExitStack() as stack:
        update: Update | None = None

        def tell(done: int, total: int, note: str) -> None:
            nonlocal update
            update = update or stack.enter_context(display("round", total, console=console, log=log, start=done))
            update(done, note)

        yield tell


@contextmanager
def display(
    what: str,
    total: int | None,
    bytes: bool = False,
    console: Console | None = None,
    log: bool = True,
    start: int = 0,
) -> Iterator[Update]:
    """Yields a function that shows how much is done.

    console: standard error by default. log: whether a log gets lines. start: how much was done before.
    """
    # Imported when something is shown: `import fedxl` must be quick.
    from rich.console import Console

    console, now = console or Console(stderr=True), State(what, total, bytes, start)
    if console.is_terminal and not in_notebook():
        with _bar(now, console) as update:
            yield update
        return
    show = _cell(now) if in_notebook() else _lines(now, console) if log else lambda last: None

    def tell(done: int, note: str) -> None:
        now.done, now.note = done, note
        show(False)

    yield tell
    show(True)


def say(line: str) -> None:
    """A line beside the results: on standard error; in a notebook, which paints that red, with its output."""
    print(line, file=sys.stdout if in_notebook() else sys.stderr)


def in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this."""
    found = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(found, "kernel")


@dataclass
class State:
    """How far some work is."""

    what: str
    total: int | None
    bytes: bool = False
    start: int = 0  # how much was done before it was first shown
    done: int = 0
    note: str = ""
    began: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        spent, of, then = time.monotonic() - self.began, "", ""
        if self.total is not None:
            of = f" of {self._number(self.total)}"
            fresh = self.done - self.start
            then = time_left(spent, fresh, self.total - self.start) if 0 < fresh < self.total - self.start else ""
            then = f"{spent:.1f} s" if self.done == self.total else then
        return ", ".join(filter(None, [f"{self.what} {self._number(self.done)}{of}", self.note, then]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        share = f' value="{self.done}" max="{self.total}"' if self.total else ""
        return f"<div><progress{share}></progress> {html.escape(str(self))}</div>"

    def _number(self, count: int) -> str:
        return f"{count / 1e6:.1f} MB" if self.bytes else f"{count:,}"


@contextmanager
def _bar(now: State, console: Console) -> Iterator[Update]:
    from rich.errors import LiveError
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    done = DownloadColumn() if now.bytes else MofNCompleteColumn()
    columns = TextColumn("{task.description}", markup=False), BarColumn(), done
    ends = TextColumn("{task.fields[note]}", markup=False), TimeRemainingColumn()
    # Items may be large: estimate the time left from the last ten minutes.
    bar = Progress(*columns, *ends, console=console, speed_estimate_period=600)
    task = bar.add_task(now.what, total=now.total, note="")
    with suppress(LiveError):  # before version 14.1 of rich, a terminal has one display: leave it to who has it
        bar.start()
    try:
        yield lambda count, note: bar.update(task, completed=count, note=note)
    finally:
        bar.stop()


def _cell(now: State) -> Callable[[bool], None]:
    """An output of a notebook that changes; none of work that is done at once."""
    from IPython.display import display as show  # there, where a notebook is

    handle: Any = None
    pace = Pace(UPDATE_EVERY)

    def update(last: bool) -> None:
        nonlocal handle
        due = pace.due()
        if handle is not None and (due or last):
            handle.update(now)
        elif due and not last:
            handle = show(now, display_id=True)

    return update


def _lines(now: State, console: Console) -> Callable[[bool], None]:
    """Lines where there is no terminal."""
    pace = Pace(LINE_EVERY)

    def update(last: bool) -> None:
        if not last and 0 < now.done != now.total and pace.due():
            console.print(str(now), markup=False, highlight=False, soft_wrap=True)

    return update


class Pace:
    """When to show something again: not before so many seconds have passed."""

    def __init__(self, every: float) -> None:
        self.every, self.last = every, time.monotonic()

    def due(self) -> bool:
        now = time.monotonic()
        if now - self.last < self.every:
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
