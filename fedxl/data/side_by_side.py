"""Work on the items of a stream in a few threads, with results in the items' order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
THREADS = min(8, os.cpu_count() or 1)  # they take turns at the stream: more would wait


def side_by_side(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What `work` makes of each item. A few items are held at a time, however many there are.

    The threads read the stream, too, so that the caller's thread has little to do: on as many cores as threads, one
    more that works would take a core from a thread on which the others wait. The first error in the items' order is
    raised, whichever thread comes upon one first.

    >>> list(side_by_side(abs, [-3, -1, 2]))
    [3, 1, 2]
    """
    stream = iter(items)

    def next_done(mine: Event, after: Event) -> tuple[R] | None:
        mine.wait()
        try:
            item = next(stream)
        except StopIteration:
            return None
        finally:
            after.set()
        return (work(item),)

    with ThreadPoolExecutor(THREADS) as workers:
        ahead: deque[Future[tuple[R] | None]] = deque()
        turn = Event()
        turn.set()
        while True:
            while len(ahead) < THREADS + 2:
                following = Event()
                ahead.append(workers.submit(next_done, turn, following))
                turn = following
            done = ahead.popleft().result()
            if done is None:
                return
            yield done[0]
