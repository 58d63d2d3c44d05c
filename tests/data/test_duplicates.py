"""Examples that occur twice, against a dictionary of their bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedxl.data.check import also_in, digests, first_equal


def rows(x: torch.Tensor) -> np.ndarray:
    return digests(x.split(64))


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
def test_duplicates_are_found_as_a_dictionary_finds_them(kind):
    rng = np.random.default_rng(0)
    x, other = KINDS[kind](rng), KINDS[kind](rng)[:100]
    other = torch.cat([other, x[:3]])
    assert first_equal(rows(x)).tolist() == by_bytes(x)
    mine, theirs = also_in(rows(other), rows(x))
    known = {row.numpy().tobytes() for row in x}
    assert mine.tolist() == [at for at, row in enumerate(other) if row.numpy().tobytes() in known]
    assert torch.equal(other[mine], x[theirs])


def test_rows_of_other_types_are_no_duplicates():
    x = torch.zeros(2, 1)
    assert also_in(rows(x), rows(x.int()))[0].tolist() == []


def test_zero_has_one_sign_and_empty_sets_have_no_duplicates():
    x = torch.tensor([[0.0, 1.0], [-0.0, 1.0]])
    assert first_equal(rows(x)).tolist() == [0, 0]
    empty = rows(x[:0])
    assert first_equal(empty).tolist() == []
    assert also_in(empty, rows(x))[0].tolist() == also_in(rows(x), empty)[0].tolist() == []
