"""A pool of worker processes. Each piece of work goes to a worker that has done the same kind before, if possible.

A process keeps what it has compiled (`engine/cuda/trace.py`) and what its libraries have found out about their
kernels, so a second run of the same program costs it seconds, where a new process would start from scratch.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_uint64
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Generic, Protocol, TypeVar

import torch

from fedxl.errors import UserError

POLL = 1.0  # seconds between two looks at the workers' progress
R = TypeVar("R")


class Work(Protocol):
    @property
    def kind(self) -> Hashable:
        """The same for work that one compiled program does."""


W = TypeVar("W", bound=Work)


@dataclass(eq=False)
class Worker:
    process: ProcessPoolExecutor
    progress: c_uint64  # in shared memory; only the worker writes it, so it needs no lock
    known: set[Hashable] = field(default_factory=set)  # kinds of work that it has done


class WorkerPool(Generic[W, R]):
    """`size` processes that call `task` on each piece of work."""

    def __init__(self, size: int, task: Callable[[W], R]) -> None:
        context = get_context("spawn")
        self.task = task
        self.reported = 0  # progress of all workers so far
        counters = [context.RawValue(c_uint64, 0) for _ in range(size)]
        self.workers = [
            Worker(ProcessPoolExecutor(1, context, initializer=_start, initargs=(size, counter)), counter)
            for counter in counters
        ]

    def __call__(
        self, todo: Sequence[W], advance: Callable[[int], None] = lambda count: None
    ) -> Iterator[tuple[W, R]]:
        """Each piece of work and its result, in the order of completion. An error in one stops all.

        advance: called with the workers' progress. A caller that does not take all results must stop the pool.
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
                done = wait(busy, POLL, return_when=FIRST_COMPLETED).done
                progress = sum(worker.progress.value for worker in self.workers)
                advance(progress - self.reported)
                self.reported = progress
                for future in done:
                    worker, work = busy.pop(future)
                    idle.append(worker)
                    yield work, future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker was killed, perhaps because memory ran out; finished runs are kept: run it again, with "
                "fewer --jobs"
            ) from error

    def stop(self) -> None:
        """Stop all workers at once, whatever they are doing."""
        for worker in self.workers:
            for process in list((worker.process._processes or {}).values()):
                process.terminate()
        for worker in self.workers:
            # If an executor is still closing when Python exits, Python closes it again and logs an error.
            worker.process.shutdown(wait=True, cancel_futures=True)


def assign(idle: Sequence[Worker], waiting: Sequence[W], workers: Sequence[Worker]) -> tuple[Worker, W]:
    """The next worker and its work: a kind it knows, else one that no worker knows, else the most frequent one."""
    for worker in idle:
        for work in waiting:
            if work.kind in worker.known:
                return worker, work
    everyone = set[Hashable]().union(*(worker.known for worker in workers))
    kinds = [work.kind for work in waiting]
    freshest = min(idle, key=lambda worker: len(worker.known))
    return freshest, max(waiting, key=lambda work: (work.kind not in everyone, kinds.count(work.kind)))


_progress: c_uint64  # of this worker


def report_progress(count: int) -> None:
    """Called in a worker: so much more of its work is done."""
    _progress.value += count


def _start(size: int, counter: c_uint64) -> None:
    global _progress
    _progress = counter
    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process gets the signal and stops us
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))


def _end_with_parent() -> None:
    """End this process if the parent is killed: otherwise it would go on with its run, and hold the run's folder."""
    parent = parent_process()
    assert parent is not None, "workers are started by multiprocessing"
    parent.join()
    os._exit(1)
