"""Examples that occur twice, against a dictionary of their bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedxl.data import twins
from fedxl.data.twins import Rows


def rows(x: torch.Tensor) -> Rows:
    return Rows(lambda indices: x[indices], len(x))


def by_bytes(x: torch.Tensor) -> list[int]:
    """The first row that has the same bytes."""
    seen: dict[bytes, int] = {}
    return [seen.setdefault(row.numpy().tobytes(), at) for at, row in enumerate(x)]


KINDS = {
    "coarse rows": lambda rng: torch.from_numpy(rng.integers(0, 2, (300, 5)).astype(np.float32)),
    "one-hot rows": lambda rng: torch.eye(7)[torch.from_numpy(rng.integers(0, 7, 300))],
    "distinct rows": lambda rng: torch.from_numpy(rng.normal(size=(300, 3))),
    "odd bytes": lambda rng: torch.from_numpy(rng.integers(0, 3, (300, 1, 1, 5), dtype=np.uint8)),
    "one number": lambda rng: torch.from_numpy(rng.integers(0, 50, (300, 1))),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_twins_are_found_as_a_dictionary_finds_them(kind, monkeypatch):
    monkeypatch.setattr(twins, "WORDS", 64)  # many blocks
    rng = np.random.default_rng(0)
    x, other = KINDS[kind](rng), KINDS[kind](rng)[:100]
    other = torch.cat([other, x[:3]])
    assert rows(x).firsts().tolist() == by_bytes(x)
    mine, theirs = rows(other).also_in(rows(x))
    known = {row.numpy().tobytes() for row in x}
    assert mine.tolist() == [at for at, row in enumerate(other) if row.numpy().tobytes() in known]
    assert torch.equal(other[mine], x[theirs])


def test_rows_that_share_a_hash_are_not_taken_for_twins(monkeypatch):
    monkeypatch.setattr(twins, "_hashed", lambda block: np.zeros(len(block), np.uint64))
    x = torch.tensor([[1.0], [2.0], [1.0]])
    assert rows(x).firsts().tolist() == [0, 1, 0]
    assert rows(torch.tensor([[2.0]])).also_in(rows(torch.tensor([[3.0]])))[0].tolist() == []


def test_zero_has_one_sign_and_empty_sets_have_no_twins():
    x = torch.tensor([[0.0, 1.0], [-0.0, 1.0]])
    assert rows(x).firsts().tolist() == [0, 0]
    empty = rows(x[:0])
    assert empty.firsts().tolist() == []
    assert empty.also_in(rows(x))[0].tolist() == rows(x).also_in(empty)[0].tolist() == []
