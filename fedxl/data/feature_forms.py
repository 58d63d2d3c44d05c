"""Features as people hold them (tensors, arrays, data frames, lists of images), and as one tensor."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl.errors import UserError, kind_of, printable, require

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FEW = 4  # columns that a message lists
KINDS = {"O": "Python objects", "U": "texts", "S": "texts", "T": "texts", "M": "dates", "m": "times", "c": "complex"}


class Features(NamedTuple):
    x: Tensor  # [n, ...]
    columns: tuple[str, ...] = ()  # of a data frame


def features(x: Any, where: str) -> Features:
    """One row for each example, as a tensor on the CPU that needs no gradient. Types stay, as far as torch has them.

    >>> features([[1, 2], [3, 4]], "client 0").x.shape
    torch.Size([2, 2])
    """
    if isinstance(x, Tensor):
        return Features(_tensor(x, where))
    if is_frame(x):
        return _frame(x, where)
    if isinstance(x, (list, tuple)) and len(x) > 0 and all(isinstance(row, Tensor) for row in x):
        shapes = sorted({tuple(row.shape) for row in x})
        require(len(shapes) == 1, f"{where}: examples have different shapes: {_shapes(shapes)}")
        return Features(_tensor(torch.stack(list(x)), where))
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
    require(array.dtype.kind in "biuf", f"{what} must be numbers, not {_dtype(array.dtype)}")
    if array.dtype.kind == "u" and array.itemsize > 1:
        array = array.astype(np.float64 if array.itemsize == 8 else np.int64)
    elif array.dtype.kind == "f" and array.itemsize > 8:
        array = array.astype(np.float64)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the memory may be read-only; nothing writes to it
        tensor = torch.from_numpy(array)
    return tensor.float() if tensor.dtype == torch.bool else tensor


def _tensor(x: Tensor, where: str) -> Tensor:
    require(not x.is_complex(), f"{where}: examples are complex numbers; give real ones: torch.view_as_real(x)")
    require(x.layout == torch.strided and not x.is_nested, f"{where}: examples are sparse; give x.to_dense()")
    require(not x.is_quantized, f"{where}: examples are quantized; give x.dequantize()")
    require(x.device.type != "meta", f"{where}: examples are on the device 'meta', which holds no numbers")
    x = x.detach().cpu()
    if x.is_floating_point() and x.dtype not in FLOATS:  # of 8 bits, which torch stores and hardly computes with
        return x.float()
    return x.float() if x.dtype == torch.bool else x


def _frame(frame: Any, where: str) -> Features:
    names = tuple(map(str, frame.columns))
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, f"{where}: the data frame has two columns {_listed(twice)}")
    require(len(names) > 0, f"{where}: the data frame has no columns")
    columns = {name: _column(frame[key]) for name, key in zip(names, frame.columns, strict=True)}
    strange = [name for name, values in columns.items() if values.dtype.kind not in "biuf"]
    require(
        not strange,
        f"{where}: {_words(strange)} no numbers; drop or encode {_them(strange)}, or give all data to "
        "fedxl.from_frame, which encodes categories",
    )
    gaps = [name for name, values in columns.items() if values.dtype.kind == "f" and np.isnan(values).any()]
    require(
        not gaps,
        f"{where}: {_words(gaps)} missing values; fill them in, or give all data to fedxl.from_frame, which does",
    )
    return Features(as_tensor(np.stack(list(columns.values()), 1), f"{where}: examples"), names)


def _column(series: Any) -> npt.NDArray[Any]:
    """A column's values; of pandas' nullable numbers, missing ones are NaN."""
    kind = getattr(series.dtype, "kind", "")
    if hasattr(series.dtype, "na_value") and kind in "biuf" and kind:
        return np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
    return np.asarray(series)


def _words(names: list[str]) -> str:
    return f"column {_listed(names)} holds" if len(names) == 1 else f"columns {_listed(names)} hold"


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{printable(name, 40)}'" for name in names[:FEW])
    return shown + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def _shapes(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes[:FEW]) + (", ..." if len(shapes) > FEW else "")


def _dtype(dtype: np.dtype[Any]) -> str:
    return KINDS.get(dtype.kind, str(dtype))
