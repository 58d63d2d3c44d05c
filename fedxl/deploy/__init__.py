"""The same algorithms over a network: sites that keep their data, a server that averages, Flower in between."""

import time
from collections.abc import Callable

Say = Callable[[str], None]  # prints one line


def say(line: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)
