"""Worker processes: who gets which work, what they report, and how their errors are told."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest

from fedxl import UserError
from fedxl.experiments.workers import Worker, WorkerPool, assign, report_progress
from tests.conftest import until


class Piece(NamedTuple):
    kind: str
    number: int


def test_like_work_goes_to_who_has_done_the_like():
    def dealt(workers: list[Worker], todo: list[Piece]) -> list[tuple[int, Piece]]:
        idle, waiting, order = list(workers), list(todo), []
        while waiting and idle:
            worker, piece = assign(idle, waiting, workers)
            idle.remove(worker)
            waiting.remove(piece)
            worker.known.add(piece.kind)
            order.append((workers.index(worker), piece))
        return order

    workers = [Worker(None, None) for _ in range(3)]
    pieces = [Piece("a", 0), Piece("a", 1), Piece("b", 0), Piece("b", 1), Piece("b", 2)]
    assert dealt(workers, pieces) == [(0, Piece("b", 0)), (1, Piece("a", 0)), (2, Piece("b", 1))], (
        "what most is left of first, each by somebody else, then again what most is left of"
    )
    assert dealt(workers[:2], pieces[1:]) == [(0, Piece("b", 0)), (1, Piece("a", 1))], "each what it knows"
    assert dealt(workers[1:2], pieces[2:]) == [(0, Piece("b", 0))], "and rather the unknown than nothing"


def perish(piece: Piece) -> None:
    os._exit(9)


def fail_at_one(piece: Piece) -> int:
    if piece.number == 1:
        raise UserError("this one cannot be done")
    return piece.number


def test_errors_of_workers_are_reported():
    pool = WorkerPool(1, perish)
    with pytest.raises(UserError, match="a worker was killed"):
        list(pool([Piece("a", 0)]))
    pool.stop()
    pool = WorkerPool(1, fail_at_one)
    assert [result for _, result in pool([Piece("a", 0), Piece("a", 2)])] == [0, 2]
    with pytest.raises(UserError, match="this one cannot be done"):
        list(pool([Piece("a", 1)]))
    (process,) = pool.workers[0].process._processes.values()
    pool.stop()
    # Its executor waits for it, too, and may notice its end a little later.
    assert until(lambda: not process.is_alive())


def report_number(piece: Piece) -> int:
    report_progress(piece.number)
    return piece.number


def test_the_progress_of_workers_adds_up():
    told: list[int] = []
    pool = WorkerPool(2, report_number)
    for _ in range(2):
        list(pool([Piece("a", 3), Piece("b", 4), Piece("a", 5)], told.append))
    pool.stop()
    assert sum(told) == 24
