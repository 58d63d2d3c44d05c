"""How a table's columns become what a network reads. Fitted on training data, saved with the model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedxl.data.images import Image
from fedxl.data.tables.read import LONGEST, MOST_COLUMNS, Block, require_delimiter
from fedxl.data.tables.summary import LABELS, LARGEST, MOST_CATEGORIES, Categories, Numbers, Summary
from fedxl.errors import UserError, printable, require
from fedxl.options import call
from fedxl.risks.several import label_names

Ints = npt.NDArray[np.int64]
Inputs = npt.NDArray[np.float32]
FORM = 1  # version of the file; a new number means other inputs for the same model
NAME = "preparation.json"  # in a run's folder
SMALLEST = 1e-30  # of a scale
ROUNDING = 1e-14  # of a mean, relative: time stamps of 16 digits vary by more
MOST_WIDTH = 8192  # inputs of a network
MOST_TEXT = 4_000_000  # characters as JSON


@dataclass(frozen=True)
class Number:
    """A column of numbers: (value - mean) / scale, the mean where it is missing, and whether it was, if told so."""

    name: str
    mean: float
    scale: float
    indicator: bool = False  # a column of its own that is 1 where the value is missing: training data had such

    def __post_init__(self) -> None:
        right = math.isfinite(self.mean) and abs(self.mean) <= LARGEST and SMALLEST <= self.scale <= LARGEST
        require(right, f"column '{printable(self.name)}' has the mean {self.mean} and the scale {self.scale}")

    @property
    def width(self) -> int:
        return 1 + self.indicator


@dataclass(frozen=True)
class Category:
    """A column of texts, one output for each value that training data had often enough, and one for all else."""

    name: str
    values: tuple[str, ...]

    def __post_init__(self) -> None:
        require(len(self.values) <= MOST_CATEGORIES, f"column '{printable(self.name)}' has too many categories")
        right = all(isinstance(text, str) and 0 < len(text) <= LONGEST for text in self.values)
        require(right, f"a category of column '{printable(self.name)}' is not a text of 1 to {LONGEST} characters")
        once = len(set(self.values)) == len(self.values)
        require(once, f"column '{printable(self.name)}' has a category twice")

    @property
    def width(self) -> int:
        return len(self.values) + 1


@dataclass(frozen=True)
class Preparation:
    """How examples are made of a table's columns, or of images, and which columns say what they are.

    >>> age = Number("age", mean=50.0, scale=10.0, indicator=True)
    >>> made = Preparation(columns=(age, Category("sex", ("f", "m"))), label="sick", positive="1", negative="0")
    >>> made.places()
    [[0, 1], [2, 3, 4]]
    >>> made.apply(np.array([[70.0, 1], [np.nan, np.nan]])).tolist()
    [[2.0, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0, 1.0]]
    >>> Preparation.from_json(made.to_json()) == made
    True
    """

    columns: tuple[Number | Category, ...] = ()  # empty: images
    image: Image | None = None
    label: str = ""
    positive: str = ""  # the label's value that counts as 1, as `keys.canonical` writes it
    negative: str = ""
    site: str = ""
    id: str = ""
    delimiter: str = ""
    source: Literal["table", "folder"] = "table"
    labels: tuple[str, ...] = ()  # the columns of several labels; then `label` is empty
    time: str = ""  # of time to event: the column that says when; `label` is the one that says whether

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        require(len(names) <= MOST_COLUMNS, f"a preparation has at most {MOST_COLUMNS} columns, not {len(names)}")
        require(len(set(names)) == len(names), "a preparation has a column twice")
        require(not (self.label and self.labels), "a preparation has one label or several, not both")
        label_names(self.labels or ("label",))
        roles = {self.label, *self.labels, self.site, self.id, self.time}
        taken = next((name for name in names if name in roles), None)
        told = f"a preparation has a feature column '{printable(taken)}', which has another meaning"
        require(taken is None, told)
        require(bool(self.columns) != bool(self.image), "a preparation has either columns or images")
        if self.delimiter:
            require_delimiter(self.delimiter)
        require(self.width <= MOST_WIDTH, f"columns become {self.width:,} inputs, at most {MOST_WIDTH:,}; drop some")
        texts = (*names, self.label, self.positive, self.negative, self.site, self.id, self.time)
        require(all(len(text) <= LONGEST for text in texts), f"a name has more than {LONGEST} characters")

    @property
    def width(self) -> int:
        return sum(column.width for column in self.columns)

    def places(self) -> list[list[int]]:
        """Which outputs each column has: first are numbers, then which of them are missing, then categories."""
        numbers, _, _, indicated, starts = self._plan
        found = {at: list(range(start, start + self.columns[at].width)) for at, start in starts.items()}
        found |= {at: [place] for place, at in enumerate(numbers.tolist())}
        for place, number in enumerate(indicated.tolist()):
            found[int(numbers[number])].append(len(numbers) + place)
        return [found[at] for at in range(len(self.columns))]

    def apply(self, block: Block) -> Inputs:
        """A network's inputs [rows, width] of [rows, columns]: numbers, indices of categories, NaN where missing."""
        out = np.empty((len(block), self.width), np.float32)
        numbers, means, scales, indicated, places = self._plan
        if len(numbers):
            values = block if len(numbers) == block.shape[1] else block[:, numbers]
            scaled = values - means
            scaled /= scales
            gone = np.isnan(scaled) if np.isnan(scaled.sum()) else None
            if gone is not None:
                np.copyto(scaled, 0.0, where=gone)
            with np.errstate(over="ignore"):  # what is beyond a float32 is told with all that is not finite
                out[:, : len(numbers)] = scaled
            if len(indicated):
                out[:, len(numbers) : len(numbers) + len(indicated)] = 0.0 if gone is None else gone[:, indicated]
        for at, start in places.items():
            column = self.columns[at]
            assert isinstance(column, Category)
            values = np.where(np.isnan(block[:, at]), len(column.values), block[:, at]).astype(np.int64)
            out[:, start : start + column.width] = 0.0
            out[np.arange(len(block)), start + values] = 1.0
        return out

    @cached_property
    def _plan(self) -> tuple[Ints, Block, Block, Ints, dict[int, int]]:
        """The columns of numbers, their means and scales; which have an indicator; where categories' outputs are."""
        found = {at: column for at, column in enumerate(self.columns) if isinstance(column, Number)}
        means, scales = (np.array([getattr(each, name) for each in found.values()]) for name in ("mean", "scale"))
        indicated = np.flatnonzero([column.indicator for column in found.values()])
        places, start = {}, len(found) + len(indicated)
        for at, column in enumerate(self.columns):
            if at not in found:
                places[at] = start
                start += column.width
        return np.array(list(found), np.int64), means, scales, indicated, places

    def to_json(self) -> dict[str, Any]:
        columns = [{"kind": type(column).__name__.lower(), **asdict(column)} for column in self.columns]
        rest = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("labels", "time"):  # without them, a file is as those of older versions
            if not rest[name]:
                del rest[name]
        return {"form": FORM, **rest, "columns": columns, "image": self.image and asdict(self.image)}

    def to_text(self) -> str:
        return json.dumps(self.to_json(), indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str | bytes) -> Preparation:
        """What `to_text` gave, or one line."""
        require(len(text) <= MOST_TEXT, "the preparation of the data is too long")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            raise UserError("cannot read the preparation of the data: it is not JSON") from None
        return cls.from_json(content)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Preparation:
        """What `to_json` gave, or one line: it may come from another party."""
        try:
            given = dict(content)
            form, columns, image = given.pop("form"), given.pop("columns"), given.pop("image")
            require(form == FORM, f"it has the form {printable(form)}; this version reads {FORM}")
            require(isinstance(columns, list) and len(columns) <= MOST_COLUMNS, "its columns are not a list")
            kinds = {"number": Number, "category": Category}
            read = tuple(call(kinds[each.pop("kind")], each, "column") for each in map(dict, columns))
            found = {"columns": read, "image": None if image is None else call(Image, image, "image")}
            return call(cls, given, "preparation", ours=found)
        except UserError as error:
            raise UserError(f"cannot read the preparation of the data: {error}") from None
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError, OverflowError):
            raise UserError("cannot read the preparation of the data: it is malformed") from None


def fit(summary: Summary) -> Preparation:
    """The preparation that follows from the training data of all sites."""
    columns = tuple(_fitted(name, told) for name, told in summary.columns.items())
    return Preparation(columns=columns, **{**summary.about, LABELS: tuple(summary.about.get(LABELS, ()))})


def _fitted(name: str, told: Any) -> Number | Category:
    if isinstance(told, Categories):
        few = (
            f"column '{printable(name)}' has no category that is frequent enough at any site; drop it, or lower rare"
        )
        few += f"; if it identifies rows, name it: id = '{printable(name)}'"
        require(bool(told.counts), f"{few} (if it should hold numbers, it holds a text, too, or decimal commas)")
        return Category(name, tuple(told.counts))
    if not isinstance(told, Numbers) or not told.present:
        raise UserError(f"column '{printable(name)}' has almost no values in the training data; name it in drop")
    spread = min(math.sqrt(told.squares / told.present), LARGEST)
    # What does not vary but for rounding is constant, and becomes 0: blown up, its rounding errors would be noise.
    constant = spread <= ROUNDING * max(abs(told.mean), SMALLEST)
    return Number(name, told.mean, LARGEST if constant else spread, told.missing > 0)
