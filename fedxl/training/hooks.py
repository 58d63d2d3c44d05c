"""What a run calls while it goes on, and when it stops."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Progress(NamedTuple):
    """What `on_progress` receives after every round."""

    round: int
    rounds: int
    seconds: float
    record: dict[str, Any] | None  # the latest evaluation


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True)
class Hooks:
    """Functions that a run calls, and when it stops."""

    on_progress: Callable[[Progress], None] = lambda progress: None  # after every round
    say: Callable[[str], None] = _to_stderr  # one line, for example which executor was chosen and why
    should_stop: Callable[[], bool] = lambda: False  # after every round; if true, the run saves and stops
    stop_collapsed: bool = False  # whether a run stops, too, at an evaluation that finds its scores collapsed
