"""How many threads of a CPU a run gets: as many as its steps occupy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# Operations of a step's forward pass for each thread. With fewer, a second one gains nothing on an idle machine, and
# beside another busy process all threads wait for the one that it delays (docs/benchmarks.md).
EACH = 2**25
CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # set by whoever knows better


@contextmanager
def threads_for(operations: float, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, torch uses as many threads as a step of so many operations occupies; it says so if they are fewer.

    A number that the user has chosen stays.
    """
    before = torch.get_num_threads()
    wanted = max(1, min(before, int(operations / EACH)))
    if wanted == before or before != _default() or any(name in os.environ for name in CHOSEN):
        yield
        return
    say(f"threads: {wanted} of {before}, as many as steps of this size occupy (OMP_NUM_THREADS sets another number)")
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _default() -> int:
    """The number that torch begins with: one for each core."""
    smt = Path("/sys/devices/system/cpu/smt/active")
    both = smt.exists() and smt.read_text().strip() == "1"
    logical = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return logical // 2 if both else logical
