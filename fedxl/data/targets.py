"""Labels as people write them, and as numbers [n, L]: 0 and 1, -1 for unknown, or grades of relevance."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl.data.examples import UNKNOWN
from fedxl.errors import UserError, kind_of, printable, require
from fedxl.risks.ranking import HIGHEST_GRADE

Label = str | int | float | bool
Encoder = Callable[[Any, str], Tensor]  # labels and where they are from -> [n, L]
FEW, SEEN = 4, 100_000  # values that a message lists, and among how many it looks for them
WHICH = "say which value is positive, once: positive="
# What else Python takes for a number is a code: zeros in front are part of it, and underscores are.
NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)?(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
SURE = 20  # examples, among which a label that is known of some has a negative one, unless -1 is what was meant
EXACT = 2**53  # beyond it, different whole numbers are one float
USUAL = {frozenset(("0", "1")): "1", frozenset(("-1", "1")): "1", frozenset(("false", "true")): "true"}


def encoder(positive: Label | None = None, labels: int = 0) -> Encoder:
    """How labels in memory are encoded: one label, of which `positive` is 1; or so many labels."""
    return partial(several, count=labels) if labels else partial(binary, positive=positive)


def binary(y: Any, where: str, positive: Label | None = None) -> Tensor:
    """One label per example, [n, 1]: 1 where it is positive.

    positive: the value that counts as positive; there is one other. None: labels are 0 and 1, -1 and 1, or booleans.

    >>> binary(["malignant", "benign"], "client 0", positive="malignant").tolist()
    [[1], [0]]
    >>> binary([-1, 1, -1], "client 0").tolist()
    [[0], [1], [0]]
    """
    values = _flat(as_array(y, where), where)
    gaps = int(_missing(values).sum())
    require(gaps == 0, f"{where}: {gaps} of {len(values)} labels are missing; drop these examples")
    if values.dtype.kind == "O" and all(isinstance(value, (int, float, np.number, np.bool_)) for value in values):
        values = values.astype(np.float64)
    if positive is not None:
        return _column(_equal(values, positive, where))
    if values.dtype.kind not in "biuf":
        raise UserError(f"{where}: labels are {listed(values)}; {WHICH}{listed(values[-1:])}")
    zeros = values == 0
    three = zeros.any() and (values == -1).any() and values.dtype.kind != "b"
    require(not three, f"{where}: labels are -1, 0 and 1; leave out those that are unknown, or {WHICH}1")
    strange = values[~(zeros | (values == 1) | (values == -1))][:1].tolist()
    told = f"{where}: labels must be 0 or 1 (or -1 and 1), found {strange[0] if strange else None}"
    require(not strange, f"{told}; for other values, {WHICH}...")
    return _column(values == 1)


def several(y: Any, where: str, count: int) -> Tensor:
    """Labels [n, L] of 0 and 1, NaN or -1 where one is not known; or classes [n], each against the rest, as [n, L].

    >>> several([[1, 0], [-1, 1]], "client 0", 2).tolist()
    [[1, 0], [-1, 1]]
    >>> several([2, 0], "client 0", 3).tolist()
    [[0, 0, 1], [1, 0, 0]]
    """
    values = as_array(y, where)
    try:
        numbers = values.astype(np.float64)  # None becomes NaN
    except (TypeError, ValueError):
        found = printable(repr(values.ravel()[:1].tolist()), 60)
        raise UserError(f"{where}: several labels must be numbers: 0, 1, or NaN for unknown, not {found}") from None
    classes = numbers.ndim == 1 and count > 1
    if numbers.ndim == 1 and not classes:
        numbers = numbers[:, None]
    told = f"{where}: labels have shape {list(values.shape)}; the risk has {count}, so they must be [n, {count}]"
    require(classes or (numbers.ndim == 2 and numbers.shape[1] == count), told)
    unknown = np.isnan(numbers) | (numbers == UNKNOWN)
    strange = numbers[~(unknown | np.isin(numbers, np.arange(count if classes else 2)))]
    each = "of several labels each must be 0, 1, or NaN or -1 for unknown"
    right = f"classes must be whole numbers from 0 to {count - 1}" if classes else each
    require(not len(strange), f"{where}: {right}, found {''.join(f'{value:g}' for value in strange[:1])}")
    minus, zero, one = ((numbers == value).any(0) for value in (UNKNOWN, 0, 1))
    signed = np.flatnonzero(minus & one & ~zero & (len(numbers) >= SURE))  # -1 may have been meant as negative
    told = f"{where}: label {''.join(map(str, signed[:1]))} is -1 or 1 and never 0, and -1 stands for unknown"
    require(classes or not len(signed), f"{told}; write 0 for negative, or NaN for unknown")
    if classes:
        numbers, unknown = numbers[:, None] == np.arange(count), unknown[:, None]
    return torch.from_numpy(np.where(unknown, UNKNOWN, numbers).astype(np.int64))


def grades(y: Any, where: str) -> Tensor:
    """Grades of relevance, [n, 1]."""
    found = whole_numbers(y, f"{where}: grades")
    low, high = (int(found.min()), int(found.max())) if len(found) else (0, 0)
    right = low >= 0 and high <= HIGHEST_GRADE
    require(right, f"{where}: grades lie between 0 and {HIGHEST_GRADE}, found {low} to {high}")
    return torch.from_numpy(found)[:, None]


def whole_numbers(values: Any, where: str) -> npt.NDArray[np.int64]:
    """One per example."""
    array = as_array(values, where)
    plain = array.ndim == 1 and array.dtype.kind in "biuf"
    require(plain, f"{where} must be whole numbers, one for each example")
    exact = array.dtype.kind != "f" or bool(np.isfinite(array).all() and (array == np.floor(array)).all())
    require(exact, f"{where} must be whole numbers, found others")
    return np.asarray(array, np.int64)


def as_array(y: Any, where: str) -> npt.NDArray[Any]:
    """Tensors, arrays, columns of data frames and lists as an array of any shape and type."""
    if isinstance(y, Tensor):
        y = dense(y, f"{where}: labels", "y")
        return np.asarray(y.double() if y.is_floating_point() else y)
    right = hasattr(y, "__array__") or isinstance(y, (list, tuple))
    require(right, f"{where}: labels must be an array, a tensor or a list, not {kind_of(y)}")
    try:
        return np.asarray(y)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{where}: labels must be one value for each example") from None


def dense(x: Tensor, what: str, name: str) -> Tensor:
    """A tensor on the CPU that needs no gradient."""
    require(not x.is_complex(), f"{what} are complex numbers; give real ones")
    require(x.layout == torch.strided and not x.is_nested, f"{what} are sparse; give {name}.to_dense()")
    require(not x.is_quantized, f"{what} are quantized; give {name}.dequantize()")
    require(x.device.type != "meta", f"{what} are on the device 'meta', which holds no numbers")
    return x.detach().cpu()


def listed(values: npt.NDArray[Any]) -> str:
    """Some of the different values, for a message.

    >>> listed(np.array(["b", "a", "b"]))
    "'a', 'b'"
    """
    different = sorted(set(values[:SEEN].tolist()), key=str)
    more = ", ..." if len(different) > FEW else ""
    return ", ".join(printable(repr(value), 40) for value in different[:FEW]) + more


def quoted(names: Sequence[Any]) -> str:
    """A few names, for a message.

    >>> quoted(["mass", "nodule", "edema", "hernia", "fibrosis"])
    "'mass', 'nodule', 'edema', 'hernia' and 1 more"
    """
    few = ", ".join(f"'{printable(name, 40)}'" for name in names[:FEW])
    return few + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def _column(values: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))[:, None]


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
    one = isinstance(positive, (str, int, float, np.generic))
    require(one, f"positive must be one value of the labels, not {kind_of(positive)}")
    numbers, shown = values.dtype.kind in "biuf", printable(repr(positive), 40)
    fits = values.dtype.kind == "O" or numbers != isinstance(positive, str)
    require(fits, f"{where}: positive is {shown}, but labels are {listed(values)}")
    found = np.asarray(values == positive, np.bool_)
    others = values[~found]
    if len(others) and (others != others[0]).any():
        told = f"{where}: labels are {listed(values)}"
        require(bool(found.any()), f"{told}, and positive is {shown}, which is not one of them")
        raise UserError(f"{told}; they must be two values: drop the others, or merge them")
    return found


# Labels of files, which are texts.


def canonical(value: object) -> str:
    """A value as text, the same however a file writes it. Codes stay as they are: "007" is not "7".

    >>> [canonical(value) for value in (1, "1.0", True, "TRUE", " sick ", "007")]
    ['1', '1', 'true', 'true', 'sick', '007']
    """
    text = str(value).strip()
    if text.lower() in ("true", "false"):
        return text.lower()
    if not NUMBER.fullmatch(text):
        return text
    try:
        number = float(text)
    except ValueError:  # "." and the like
        return text
    if not math.isfinite(number) or abs(number) >= EXACT:
        return text
    return str(int(number)) if number == int(number) else repr(number)


def as_number(text: str | None) -> float:
    """NaN for what is no number."""
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def two_values(found: Sequence[str], positive: Label | None, where: str) -> Mapping[str, int]:
    """The positive and the negative one among the different labels of some data, as {positive: 1, negative: 0}.

    Raises UserError if that cannot be told.
    """
    told = f"{where} holds {quoted(sorted(found))}"
    require(len(found) == 2, f"{told}; a label has two values: keep two, or drop the other rows")
    one, other = sorted(found)
    if positive is None:
        usual = USUAL.get(frozenset(found))
        require(usual is not None, f"{told}; say which one is positive: positive = '{one}' or '{other}'")
        assert usual is not None
        return {usual: 1, one if usual == other else other: 0}
    wanted = canonical(positive)
    require(wanted in found, f"{told}, but positive is {printable(positive)!r}, which never occurs")
    return {wanted: 1, one if wanted == other else other: 0}


def text_grades(found: Sequence[str], where: str) -> Mapping[str, int]:
    """The grades of relevance that these texts stand for."""
    for text in found:
        right = text.isascii() and text.isdecimal() and len(text) < 4 and int(text) <= HIGHEST_GRADE
        told = f"{where} holds '{printable(text, 40)}'; with query, a label is a grade from 0 to {HIGHEST_GRADE}"
        require(right, told)
    return {text: int(text) for text in found}
