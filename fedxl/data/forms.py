"""Examples and labels as people hold them (tensors, arrays, data frames, lists), and as tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl.errors import UserError, kind_of, printable, require

Label = str | int | float | bool
UNKNOWN = -1  # of several labels, one that is not known
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FEW, SEEN = 4, 100_000  # names or values that a message lists, and among how many it looks for them
KINDS = {"O": "Python objects", "U": "texts", "S": "texts", "T": "texts", "M": "dates", "m": "times", "c": "complex"}
WHICH = "say which value is positive, once: positive="


class Features(NamedTuple):
    x: Tensor  # [n, ...]
    columns: tuple[str, ...] = ()  # of a data frame


class Columns(NamedTuple):
    """That labels are so many columns, or the numbers of as many classes."""

    number: int


def features(x: Any, where: str) -> Features:
    """One row for each example, as a tensor on the CPU that needs no gradient. Types stay, as far as torch has them.

    >>> features([[1, 2], [3, 4]], "client 0").x.shape
    torch.Size([2, 2])
    """
    if is_frame(x):
        return _frame(x, where)
    if isinstance(x, (list, tuple)) and len(x) > 0 and all(isinstance(row, Tensor) for row in x):
        shapes = sorted({tuple(row.shape) for row in x})
        more = ", ..." if len(shapes) > FEW else ""
        told = ", ".join(str(list(shape)) for shape in shapes[:FEW])
        require(len(shapes) == 1, f"{where}: examples have different shapes: {told}{more}")
        x = torch.stack(list(x))
    if isinstance(x, Tensor):
        x = _dense(x, f"{where}: examples", "x")
        # Floats of 8 bits torch stores, and hardly computes with.
        odd = x.dtype == torch.bool or (x.is_floating_point() and x.dtype not in FLOATS)
        return Features(x.float() if odd else x)
    require(not hasattr(x, "toarray"), f"{where}: examples are a sparse matrix; give x.toarray()")
    right = hasattr(x, "__array__") or isinstance(x, (list, tuple))
    require(right, f"{where}: examples must be a tensor, an array or a data frame, not {kind_of(x)}")
    try:
        array = np.asanyarray(x)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{where}: examples must be arrays of numbers, all of one shape") from None
    require(not isinstance(array, np.ma.MaskedArray), f"{where}: examples are a masked array; fill in what is masked")
    return Features(as_tensor(np.asarray(array), f"{where}: examples"))


def is_frame(x: Any) -> bool:
    """Whether it is a table with named columns, as pandas and polars have them."""
    return hasattr(x, "columns") and hasattr(x, "to_numpy")


def as_tensor(array: npt.NDArray[Any], what: str) -> Tensor:
    """An array as a tensor, in a type that torch has."""
    require(array.dtype.kind in "biuf", f"{what} must be numbers, not {KINDS.get(array.dtype.kind, array.dtype)}")
    if array.dtype.kind == "u" and array.itemsize > 1:
        array = array.astype(np.float64 if array.itemsize == 8 else np.int64)
    elif array.dtype.kind == "f" and array.itemsize > 8:
        array = array.astype(np.float64)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the memory may be read-only; nothing writes to it
        tensor = torch.from_numpy(array)
    return tensor.float() if tensor.dtype == torch.bool else tensor


def _dense(x: Tensor, what: str, name: str) -> Tensor:
    """A tensor on the CPU that needs no gradient."""
    require(not x.is_complex(), f"{what} are complex numbers; give real ones")
    require(x.layout == torch.strided and not x.is_nested, f"{what} are sparse; give {name}.to_dense()")
    require(not x.is_quantized, f"{what} are quantized; give {name}.dequantize()")
    require(x.device.type != "meta", f"{what} are on the device 'meta', which holds no numbers")
    return x.detach().cpu()


def _frame(frame: Any, where: str) -> Features:
    names = tuple(map(str, frame.columns))
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, f"{where}: the data frame has two columns {quoted(twice)}")
    require(len(names) > 0, f"{where}: the data frame has no columns")
    columns = {name: _column(frame[key]) for name, key in zip(names, frame.columns, strict=True)}
    strange = [name for name, values in columns.items() if values.dtype.kind not in "biuf"]
    advice = "or give all data to fedxl.from_frame, which"
    require(not strange, f"{where}: {_hold(strange)} no numbers; drop or encode them, {advice} encodes categories")
    gaps = [name for name, values in columns.items() if values.dtype.kind == "f" and np.isnan(values).any()]
    require(not gaps, f"{where}: {_hold(gaps)} missing values; fill them in, {advice} does")
    return Features(as_tensor(np.stack(list(columns.values()), 1), f"{where}: examples"), names)


def _column(series: Any) -> npt.NDArray[Any]:
    """A column's values; of pandas' nullable numbers, missing ones are NaN."""
    kind = getattr(series.dtype, "kind", "")
    if hasattr(series.dtype, "na_value") and kind in "biuf" and kind:
        return np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
    return np.asarray(series)


def _hold(names: Sequence[str]) -> str:
    return f"column {quoted(names)} holds" if len(names) == 1 else f"columns {quoted(names)} hold"


def quoted(names: Sequence[Any]) -> str:
    """A few names, for a message.

    >>> quoted(["mass", "nodule", "edema", "hernia", "fibrosis"])
    "'mass', 'nodule', 'edema', 'hernia' and 1 more"
    """
    few = ", ".join(f"'{printable(name, 40)}'" for name in names[:FEW])
    return few + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


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
    gaps = int(_missing(values).sum())
    require(gaps == 0, f"{where}: {gaps} of {len(values)} labels are missing; drop these examples")
    if values.dtype.kind == "O" and all(isinstance(value, (int, float, np.number, np.bool_)) for value in values):
        values = values.astype(np.float64)
    if positive is not None:
        return torch.from_numpy(_equal(values, positive, where).astype(np.int64))
    if values.dtype.kind not in "biuf":
        raise UserError(f"{where}: labels are {listed(values)}; {WHICH}{listed(values[-1:])}")
    zeros = values == 0
    require(
        not (zeros.any() and (values == -1).any() and values.dtype.kind != "b"),
        f"{where}: labels are -1, 0 and 1; leave out those that are unknown, or {WHICH}1",
    )
    strange = values[~(zeros | (values == 1) | (values == -1))][:1].tolist()
    told = f"{where}: labels must be 0 or 1 (or -1 and 1), found {strange[0] if strange else None}"
    require(not strange, f"{told}; for other values, {WHICH}...")
    return torch.from_numpy((values == 1).astype(np.int64))


def columns(values: npt.NDArray[Any], count: int, where: str) -> Tensor:
    """Labels [n, L] of 0 and 1, NaN or -1 where one is not known; or classes [n], each against the rest, as [n, L].

    >>> columns(np.array([[1, 0], [-1, 1]]), 2, "client 0").tolist()
    [[1, 0], [-1, 1]]
    >>> columns(np.array([2, 0]), 3, "client 0").tolist()
    [[0, 0, 1], [1, 0, 0]]
    """
    try:
        numbers = values.astype(np.float64)  # None becomes NaN
    except (TypeError, ValueError):
        found = printable(repr(values.ravel()[:1].tolist()), 60)
        raise UserError(f"{where}: several labels must be numbers: 0, 1, or NaN for unknown, not {found}") from None
    classes = numbers.ndim == 1 and count > 1
    if numbers.ndim == 1 and not classes:
        numbers = numbers[:, None]
    require(
        classes or (numbers.ndim == 2 and numbers.shape[1] == count),
        f"{where}: labels have shape {list(values.shape)}; the risk has {count}, so they must be [n, {count}]",
    )
    unknown = np.isnan(numbers) | (numbers == UNKNOWN)
    strange = numbers[~(unknown | np.isin(numbers, np.arange(count if classes else 2)))]
    each = "of several labels each must be 0, 1, or NaN or -1 for unknown"
    right = f"classes must be whole numbers from 0 to {count - 1}" if classes else each
    require(not len(strange), f"{where}: {right}, found {''.join(f'{value:g}' for value in strange[:1])}")
    if classes:
        numbers, unknown = numbers[:, None] == np.arange(count), unknown[:, None]
    return torch.from_numpy(np.where(unknown, UNKNOWN, numbers).astype(np.int64))


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
        y = _dense(y, f"{where}: labels", "y")
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


def _equal(values: npt.NDArray[Any], positive: Label, where: str) -> npt.NDArray[np.bool_]:
    require(
        isinstance(positive, (str, int, float, np.generic)),
        f"positive must be one value of the labels, not {kind_of(positive)}",
    )
    numbers, shown = values.dtype.kind in "biuf", printable(repr(positive), 40)
    fits = values.dtype.kind == "O" or numbers != isinstance(positive, str)
    require(fits, f"{where}: positive is {shown}, but labels are {listed(values)}")
    found = np.asarray(values == positive, np.bool_)
    others = values[~found]
    if len(others) and (others != others[0]).any():
        told = f"{where}: labels are {listed(values)}"
        require(bool(found.any()), f"{told}, and positive is {shown}, which is none of them")
        raise UserError(f"{told}; they must be two values: drop the others, or merge them")
    return found
