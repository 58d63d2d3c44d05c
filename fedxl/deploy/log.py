"""How a process of a deployment reports to people: one line at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

Say = Callable[[str], None]  # prints one line


def say(line: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)
