"""Ctrl-C while a run trains."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import current_thread, main_thread
from types import FrameType

from fedxl.training.settings import Hooks


class Interrupts:
    """Inside, the first Ctrl-C asks for a stop after the round; a second one stops at once."""

    def __init__(self, say: Callable[[str], None], signals: Sequence[signal.Signals]) -> None:
        self.say, self.signals, self.asked = say, signals, False

    def stopping(self, hooks: Hooks) -> Hooks:
        """These hooks, which stop the run once a stop was asked for, too."""
        return replace(hooks, should_stop=lambda: self.asked or hooks.should_stop())

    def __enter__(self) -> Interrupts:
        self.previous = {number: signal.signal(number, self._ask) for number in self.signals}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.say("finishing the round, then stopping (again: stop at once) ...")

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def unhandled() -> Sequence[signal.Signals]:
    """SIGINT, where it would raise KeyboardInterrupt: not in other threads, nor where somebody else handles it."""
    free = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return (signal.SIGINT,) if free else ()
