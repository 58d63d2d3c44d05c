"""The order of the scores that a client uploads.

Scores in the order of their draws tell which example each is of, to whoever knows the seed. A sorted list is a
multiset and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

# drawn: as the steps read the examples. sorted: in ascending order.
Order = Literal["drawn", "sorted"]

STEPS = 2.0**20  # in a unit of the score; far above rounding, far below what scores differ by


def sort_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Rows [n, ...] of tensors that belong together, sorted by all that they hold: the first column counts most.

    >>> sort_rows(torch.tensor([2.0, 1.0, 2.0]), torch.tensor([5, 4, 3]))
    (tensor([1., 2., 2.]), tensor([4, 3, 5]))
    """
    exact = [column for tensor in tensors for column in columns(tensor)]
    # Executors differ in the last bits. Where scores are equal but for these, what belongs to them decides first.
    rounded = [torch.round(column * STEPS) if column.is_floating_point() else column for column in exact]
    rows = sorting([*rounded, *exact])
    return tuple(tensor[rows] for tensor in tensors)


def sorting(keys: Sequence[Tensor]) -> Tensor:
    """The indices [n] that sort by the first key, then by the next. Rows that differ nowhere look the same."""
    last, *others = reversed(keys)
    rows = _ascending(last)
    for key in others:
        rows = rows[_ascending(key[rows])]
    return rows


def _ascending(key: Tensor) -> Tensor:
    return torch.sort(key, stable=True).indices


def columns(tensor: Tensor) -> Sequence[Tensor]:
    """What sorts the rows of [n, ...]: n numbers each."""
    return tensor.flatten(1).unbind(1) if tensor.ndim > 1 else (tensor,)
