"""Rows' numbers, made when they are asked for."""

from __future__ import annotations

import pickle

import numpy as np

from fedxl.data.csv_blocks import RowNumbers


def test_numbers_are_those_of_each_file():
    ends, rows = np.array([3, 3, 7]), np.array([6, 0, 2, 3], np.int32)
    found = RowNumbers(ends, ["a", "b", "c"], rows)
    expected = ["c:4", "a:1", "a:3", "c:1"]
    assert list(found) == expected
    assert found == expected
    assert found != expected[:-1]
    assert [found[at] for at in (0, 1, -1)] == ["c:4", "a:1", "c:1"]
    assert list(found[1:3]) == expected[1:3]
    assert pickle.loads(pickle.dumps(found)) == expected
    assert "c:1" in found
    assert RowNumbers(np.array([9]), [""], rows) == ["7", "1", "3", "4"]
    assert not RowNumbers(ends, ["a"], rows[:0])
