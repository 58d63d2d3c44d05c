"""New examples from files, and predictions as a file: CSV for people and spreadsheets, Parquet for programs."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedxl.data.examples import UNKNOWN, Examples
from fedxl.data.sets.own import floats, labels, read
from fedxl.data.tables.prepare import Preparation
from fedxl.data.tables.table import read_new
from fedxl.data.targets import binary, several
from fedxl.errors import UserError, require
from fedxl.files import write_atomically, writing
from fedxl.training.result import Prediction

# A spreadsheet takes a cell for a formula if it begins like this, whether it is quoted or not.
FORMULA = re.compile(r"^[\s]*[=+\-@\t\r]")
LINE_BREAK = re.compile(r"[\r\n]+")
NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?([eE][+-]?\d+)?")


def read_examples(path: Path, preparation: Preparation | None, count: int = 0) -> Examples:
    """The examples of a table, a folder of images, or an .npz file, with what identifies each.

    Labels are -1 where the file has none. count: how many labels the model has, if they are several.
    """
    require(path.exists(), f"there is no file {path}")
    arrays = path.suffix == ".npz"
    if preparation is None:
        told = f"this model was trained on arrays and does not know how to prepare {path}"
        require(arrays, f"{told}; give it an .npz file with x")
        return _arrays(path, count)
    kind = "folders of images" if preparation.source == "folder" else "tables (CSV or Parquet)"
    require(not arrays, f"this model prepares {kind} itself; give it one of those instead of {path}")
    found = read_new(preparation, path)
    require(len(found) > 0, f"{path} holds no rows")
    return found


def _arrays(path: Path, count: int) -> Examples:
    """x, and optionally y, of time to event its time, and rows, what identifies each example."""
    found = read(path, f"there is no file {path}")
    require("x" in found, f"{path} lacks the array x; it must hold x, and may hold y, time and rows")
    x, y, names = found["x"], found.get("y"), found.get("rows")
    right = x.dtype.kind in "biuf" and x.ndim >= 2
    require(right, f"{path}: x must hold rows of numbers, not {x.dtype} {list(x.shape)}")
    require(len(x) > 0, f"{path} holds no rows")
    right = names is None or names.shape == (len(x),)
    require(right, f"{path}: rows must name each of the {len(x)} examples")
    where = f"{path}: y"
    if y is None:
        given = torch.full((len(x), max(1, count)), UNKNOWN)
    else:
        plain = y.dtype.kind in "biuf"
        require(plain, f"{where} must hold numbers, not {y.dtype}")
        given = several(y, where, count) if count else binary(labels(y), where)
    require(len(given) == len(x), f"{where} must hold the labels of each of the {len(x)} examples")
    times = found.get("time") if y is not None else None  # without events, times say nothing
    if times is not None:
        right = times.dtype.kind in "biuf" and times.shape == (len(x),)
        right = right and bool((np.isfinite(times) & (times >= 0)).all())
        require(right, f"{path}: time must be a number from 0 on for each of the {len(x)} examples")
    time = None if times is None else torch.from_numpy(times.astype(np.float64))
    return Examples(floats(x), given, time=time, row=list(map(str, range(len(x)) if names is None else names)))


def write(path: Path, rows: Sequence[str], prediction: Prediction) -> int:
    """Write the predictions, whole or not at all; how many identities were changed for spreadsheets."""
    found = WRITERS.get(path.suffix)
    require(found is not None, f"{path} must end in {' or '.join(WRITERS)}")
    assert found is not None
    content, changed = found({"row": list(rows), **prediction.columns})
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return changed


def harmless(text: str) -> str:
    """The text, with an apostrophe before it where a spreadsheet would run it as a formula. Numbers stay numbers.

    Line breaks become spaces: a spreadsheet may begin a row at one, and a formula behind it.

    >>> harmless("=HYPERLINK(A1)"), harmless("-17"), harmless("P-17"), harmless("P\\r=A1")
    ("'=HYPERLINK(A1)", '-17', 'P-17', 'P =A1')
    """
    text = LINE_BREAK.sub(" ", text)
    return f"'{text}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else text


def _csv(table: dict[str, list[Any]]) -> tuple[bytes, int]:
    rows = table["row"]
    safe = [harmless(text) for text in rows]
    changed = sum(one != other for one, other in zip(rows, safe, strict=True))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(safe, *list(table.values())[1:], strict=True))
    return buffer.getvalue().encode(), changed


def _parquet(table: dict[str, list[Any]]) -> tuple[bytes, int]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError("writing Parquet needs pyarrow; pip install 'fedxl[table]'") from None
    buffer = io.BytesIO()
    pq.write_table(pa.table(table), buffer)
    return buffer.getvalue(), 0


WRITERS: dict[str, Callable[[dict[str, list[Any]]], tuple[bytes, int]]] = {".csv": _csv, ".parquet": _parquet}
