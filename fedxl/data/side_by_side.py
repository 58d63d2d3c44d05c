"""Work on the items of a stream in a few threads, with results in the items' order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
THREADS = min(8, os.cpu_count() or 1)  # one thread feeds them: more would wait


def side_by_side(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What `work` makes of each item. A few items are held at a time, however many there are.

    The first error in the items' order is raised, whichever thread comes upon one first.

    >>> list(side_by_side(abs, [-3, -1, 2]))
    [3, 1, 2]
    """
    with ThreadPoolExecutor(THREADS) as workers:
        ahead: deque[Future[R]] = deque()
        for future in _submitted(work, items, workers):
            ahead.append(future)
            if len(ahead) > THREADS + 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _submitted(work: Callable[[T], R], items: Iterable[T], workers: ThreadPoolExecutor) -> Iterator[Future[R]]:
    """An error of the stream itself is the last of these: it comes after all that was read before it."""
    try:
        for item in items:
            yield workers.submit(work, item)
    except Exception as error:
        failed: Future[R] = Future()
        failed.set_exception(error)
        yield failed
