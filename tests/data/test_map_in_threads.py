"""Work in threads whose results come in order."""

from __future__ import annotations

import threading

import pytest

from fedxl.data.csv_blocks import map_in_threads


def test_results_come_in_order_though_later_items_are_done_first(monkeypatch):
    monkeypatch.setattr("fedxl.data.csv_blocks.THREADS", 2)
    later = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert later.wait(30)
        if item == 1:
            later.set()
        return item

    assert list(map_in_threads(work, range(40))) == list(range(40))


def test_few_items_are_held_at_a_time(monkeypatch):
    monkeypatch.setattr("fedxl.data.csv_blocks.THREADS", 2)
    taken = []
    for result in map_in_threads(lambda item: item, (taken.append(item) or item for item in range(50))):
        assert taken[-1] <= result + 3


def test_the_first_error_in_order_is_raised_even_if_the_stream_fails_later(monkeypatch):
    monkeypatch.setattr("fedxl.data.csv_blocks.THREADS", 4)

    def items():
        yield from (1, 0, 2)
        raise OSError("the stream")

    done = []
    with pytest.raises(ZeroDivisionError):
        done.extend(map_in_threads(lambda item: 1 // item, items()))
    with pytest.raises(OSError, match="the stream"):
        done.extend(map_in_threads(lambda item: item, items()))
    assert done == [1, 1, 0, 2]
