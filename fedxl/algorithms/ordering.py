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


def sort_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Rows [n, ...] of tensors that belong together, sorted by all that they hold: the first column counts most.

    >>> sort_rows(torch.tensor([2.0, 1.0, 2.0]), torch.tensor([5, 4, 3]))
    (tensor([1., 2., 2.]), tensor([4, 3, 5]))
    """
    rows = sorting([column for tensor in tensors for column in columns(tensor)])
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
