"""Labels as people write them (0 and 1, -1 and 1, booleans, two texts), and as 0 and 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl.data.label_columns import Columns, columns
from fedxl.errors import UserError, kind_of, printable, require

Label = str | int | float | bool
FEW, SEEN = 4, 100_000  # values that a message lists, and among how many it looks for them
WHICH = "say which value is positive, once: positive="


def encoded(y: Any, where: str, positive: Label | Columns | None = None) -> Tensor:
    """One label for each example, 1 where it is positive; or several.

    positive: the value that counts as positive; there is one other. None: labels are 0 and 1, -1 and 1, or booleans.

    >>> encoded(["malignant", "benign"], "client 0", positive="malignant").tolist()
    [1, 0]
    >>> encoded([-1, 1, -1], "client 0").tolist()
    [0, 1, 0]
    """
    if isinstance(positive, Columns):
        return columns(as_array(y, where), positive.number, where)
    values = _flat(as_array(y, where), where)
    missing = _missing(values)
    require(
        not missing.any(), f"{where}: {int(missing.sum())} of {len(values)} labels are missing; drop these examples"
    )
    values = _numbers(values)
    if positive is not None:
        return torch.from_numpy(_equal(values, positive, where).astype(np.int64))
    if values.dtype.kind not in "biuf":
        raise UserError(f"{where}: labels are {listed(values)}; {WHICH}{listed(values[-1:])}")
    zeros = values == 0
    require(
        not (zeros.any() and (values == -1).any() and values.dtype.kind != "b"),
        f"{where}: labels are -1, 0 and 1; leave out those that are unknown, or {WHICH}1",
    )
    strange = values[~(zeros | (values == 1) | (values == -1))]
    require(
        not len(strange),
        f"{where}: labels must be 0 or 1 (or -1 and 1), found {_first(strange)}; for other values, {WHICH}...",
    )
    return torch.from_numpy((values == 1).astype(np.int64))


def listed(values: npt.NDArray[Any]) -> str:
    """Some of the different values, for a message.

    >>> listed(np.array(["b", "a", "b"]))
    "'a', 'b'"
    """
    different = sorted(set(values[:SEEN].tolist()), key=str)
    more = ", ..." if len(different) > FEW else ""
    return ", ".join(printable(repr(value), 40) for value in different[:FEW]) + more


def as_array(y: Any, where: str) -> npt.NDArray[Any]:
    """Tensors, arrays, columns of data frames and lists as an array of any shape and type."""
    if isinstance(y, Tensor):
        require(not y.is_complex(), f"{where}: labels are complex numbers; they must be 0 or 1")
        dense = y.layout == torch.strided and not y.is_nested
        require(dense, f"{where}: labels are sparse; give y.to_dense()")
        require(not y.is_quantized, f"{where}: labels are quantized; give y.dequantize()")
        require(y.device.type != "meta", f"{where}: labels are on the device 'meta', which holds no numbers")
        y = y.detach().cpu()
        return np.asarray(y.double() if y.is_floating_point() else y)
    right = hasattr(y, "__array__") or isinstance(y, (list, tuple))
    require(right, f"{where}: labels must be an array, a tensor or a list, not {kind_of(y)}")
    try:
        return np.asarray(y)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{where}: labels must be one value for each example") from None


def _flat(values: npt.NDArray[Any], where: str) -> npt.NDArray[Any]:
    """One value for each example; a single column is such values, too."""
    if values.ndim == 2 and values.shape[1] == 1:
        return values[:, 0]
    shape = list(values.shape)
    one_hot = values.ndim == 2 and values.dtype.kind in "biuf" and bool(((values != 0).sum(1) == 1).all())
    hint = "; they look one-hot: give y.argmax(1), if the second column is the positive class" if one_hot else ""
    require(values.ndim == 1, f"{where}: labels must be one number per example, got shape {shape}{hint}")
    return values


def _missing(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    if values.dtype.kind == "f":
        return np.asarray(np.isnan(values), np.bool_)
    if values.dtype.kind != "O":
        return np.zeros(len(values), np.bool_)
    # NaN differs from itself; a comparison with pandas' NA is neither true nor false.
    return np.array([v is None or type(v).__name__ in ("NAType", "NaTType") or v != v for v in values], np.bool_)


def _numbers(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Objects that are all numbers as numbers."""
    if values.dtype.kind != "O" or not all(isinstance(value, (int, float, np.number, np.bool_)) for value in values):
        return values
    return values.astype(np.float64)


def _equal(values: npt.NDArray[Any], positive: Label, where: str) -> npt.NDArray[np.bool_]:
    require(
        isinstance(positive, (str, int, float, np.generic)),
        f"positive must be one value of the labels, not {kind_of(positive)}",
    )
    numbers = values.dtype.kind in "biuf"
    fits = values.dtype.kind == "O" or numbers != isinstance(positive, str)
    require(fits, f"{where}: positive is {printable(repr(positive), 40)}, but labels are {listed(values)}")
    found = np.asarray(values == positive, np.bool_)
    others = values[~found]
    if len(others) and (others != others[0]).any():
        told = f"{where}: labels are {listed(values)}"
        require(bool(found.any()), f"{told}, and positive is {printable(repr(positive), 40)}, which is none of them")
        raise UserError(f"{told}; they must be two values: drop the others, or merge them")
    return found


def _first(values: npt.NDArray[Any]) -> Any:
    return values[0].item() if len(values) else None
