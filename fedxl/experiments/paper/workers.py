"""Processes that work side by side and stay: like work goes to whoever has done the like before.

A process keeps what it has compiled (`engine/trace.py`) and what its libraries have found out about their kernels, so
a second run of the same program costs it seconds, where another process would begin anew.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_uint64
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Generic, Protocol, TypeVar

import torch

from fedxl.errors import UserError

LOOK_EVERY = 1.0  # seconds, at what workers have told
R = TypeVar("R")


class Work(Protocol):
    @property
    def kind(self) -> Hashable:
        """The same for work that one compiled program does."""


W = TypeVar("W", bound=Work)


@dataclass(eq=False)
class Worker:
    process: ProcessPoolExecutor
    told: c_uint64  # in shared memory, of all that it has told; nobody else writes it, so nobody need lock it
    known: set[Hashable] = field(default_factory=set)  # kinds of work that it has done


class Crew(Generic[W, R]):
    """So many processes, which do `task` of whatever they are given."""

    def __init__(self, size: int, task: Callable[[W], R]) -> None:
        context = get_context("spawn")
        self.task = task
        self.heard = 0  # of all that workers have told
        tallies = [context.RawValue(c_uint64, 0) for _ in range(size)]
        self.workers = [
            Worker(ProcessPoolExecutor(1, context, initializer=_begin, initargs=(size, told)), told)
            for told in tallies
        ]

    def __call__(
        self, todo: Sequence[W], advance: Callable[[int], None] = lambda count: None
    ) -> Iterator[tuple[W, R]]:
        """Each piece of work and its result, in the order in which they are done. What fails, fails all.

        advance: is told what the workers `tell`. Whoever does not take all results must stop the crew.
        """
        waiting, busy = list(todo), dict[Future[R], tuple[Worker, W]]()
        idle = list(self.workers)
        try:
            while waiting or busy:
                while waiting and idle:
                    worker, work = assign(idle, waiting, self.workers)
                    idle.remove(worker)
                    waiting.remove(work)
                    worker.known.add(work.kind)
                    busy[worker.process.submit(self.task, work)] = worker, work
                done = wait(busy, LOOK_EVERY, return_when=FIRST_COMPLETED).done
                told = sum(worker.told.value for worker in self.workers)
                advance(told - self.heard)
                self.heard = told
                for future in done:
                    worker, work = busy.pop(future)
                    idle.append(worker)
                    yield work, future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker was killed, perhaps for want of memory; what is done is kept: run it again, with fewer "
                "--jobs"
            ) from error

    def stop(self) -> None:
        """At once, whatever they are doing."""
        for worker in self.workers:
            for process in list((worker.process._processes or {}).values()):
                process.terminate()
        for worker in self.workers:
            # A pool that is still closing when Python ends may be told to close once more, and complain.
            worker.process.shutdown(wait=True, cancel_futures=True)


def assign(idle: Sequence[Worker], waiting: Sequence[W], workers: Sequence[Worker]) -> tuple[Worker, W]:
    """Who does what next: what the worker knows; else what nobody knows yet; else what most is left of."""
    for worker in idle:
        for work in waiting:
            if work.kind in worker.known:
                return worker, work
    everyone = set[Hashable]().union(*(worker.known for worker in workers))
    kinds = [work.kind for work in waiting]
    freshest = min(idle, key=lambda worker: len(worker.known))
    return freshest, max(waiting, key=lambda work: (work.kind not in everyone, kinds.count(work.kind)))


_told: c_uint64  # a worker's own


def tell(count: int) -> None:
    """Of a worker: so much more of its work is done."""
    _told.value += count


def _begin(size: int, told: c_uint64) -> None:
    global _told
    _told = told
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us is told, and stops us
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
