"""Several labels of each example as people write them, and as columns of 1, 0 and -1 (not known)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl.errors import UserError, printable, require

UNKNOWN = -1


class Columns(NamedTuple):
    """That labels are so many columns, or the numbers of as many classes."""

    number: int


def columns(values: npt.NDArray[Any], count: int, where: str) -> Tensor:
    """Labels [n, L] of 0 and 1, NaN or -1 where one is not known; or classes [n], each against the rest, as [n, L].

    >>> columns(np.array([[1, 0], [-1, 1]]), 2, "client 0").tolist()
    [[1, 0], [-1, 1]]
    >>> columns(np.array([2, 0]), 3, "client 0").tolist()
    [[0, 0, 1], [1, 0, 0]]
    """
    numbers = _numbers(values, where)
    if numbers.ndim == 1 and count > 1:
        return _classes(numbers, count, where)
    numbers = numbers.reshape(-1, 1) if numbers.ndim == 1 else numbers
    require(
        numbers.ndim == 2 and numbers.shape[1] == count,
        f"{where}: labels have shape {list(values.shape)}; the risk has {count}, so they must be [n, {count}]",
    )
    unknown = np.isnan(numbers) | (numbers == UNKNOWN)
    strange = numbers[~(unknown | (numbers == 0) | (numbers == 1))]
    require(
        not len(strange), f"{where}: of several labels each must be 0, 1, or NaN or -1 for unknown{_found(strange)}"
    )
    return torch.from_numpy(np.where(unknown, UNKNOWN, numbers).astype(np.int64))


def _classes(numbers: npt.NDArray[np.float64], count: int, where: str) -> Tensor:
    unknown = np.isnan(numbers) | (numbers == UNKNOWN)
    known = numbers[~unknown]
    strange = known[~np.isin(known, np.arange(count))]
    require(not len(strange), f"{where}: classes must be whole numbers from 0 to {count - 1}{_found(strange)}")
    each = (numbers[:, None] == np.arange(count)).astype(np.int64)
    return torch.from_numpy(np.where(unknown[:, None], UNKNOWN, each))


def _numbers(values: npt.NDArray[Any], where: str) -> npt.NDArray[np.float64]:
    try:
        return values.astype(np.float64)  # None becomes NaN
    except (TypeError, ValueError):
        found = printable(repr(values.ravel()[:1].tolist()), 60)
        raise UserError(f"{where}: several labels must be numbers: 0, 1, or NaN for unknown, not {found}") from None


def _found(strange: npt.NDArray[np.float64]) -> str:
    return f", found {strange[0]:g}" if len(strange) else ""
