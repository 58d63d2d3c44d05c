"""Predictions as a file: CSV for people and spreadsheets, Parquet for programs."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedxl.errors import UserError, require
from fedxl.files import write_atomically
from fedxl.training.predict import Prediction

# A spreadsheet takes a cell for a formula if it begins like this, whether it is quoted or not.
FORMULA = re.compile(r"^[\s]*[=+\-@\t\r]")
NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?([eE][+-]?\d+)?")


def write(path: Path, rows: Sequence[str], prediction: Prediction) -> int:
    """Write the predictions, whole or not at all; how many identities were changed for spreadsheets."""
    found = next((kind for suffix, kind in WRITERS.items() if path.suffix == suffix), None)
    require(found is not None, f"{path} must end in {' or '.join(WRITERS)}")
    assert found is not None
    content, changed = found(columns(rows, prediction))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return changed


def columns(rows: Sequence[str], prediction: Prediction) -> dict[str, list[Any]]:
    """What a file of predictions holds, by column."""
    if prediction.labels:
        return {"row": list(rows), **_by_label(prediction)}
    table: dict[str, list[Any]] = {"row": list(rows), "score": prediction.scores.tolist()}
    if prediction.probabilities is not None:
        table["probability"] = prediction.probabilities.tolist()
    if prediction.classes is not None:
        table["class"] = prediction.classes.tolist()
    return table


def _by_label(prediction: Prediction) -> dict[str, list[Any]]:
    """The columns of each label together; one without a decision has its score alone."""
    table: dict[str, list[Any]] = {}
    scores, probabilities, classes, *_ = prediction
    for number, name in enumerate(prediction.labels):
        table[f"score_{name}"] = scores[:, number].tolist()
        if probabilities is not None and classes is not None and name not in prediction.undecided:
            table[f"probability_{name}"] = probabilities[:, number].tolist()
            table[f"class_{name}"] = classes[:, number].tolist()
    return table


def harmless(text: str) -> str:
    """The text, with an apostrophe before it where a spreadsheet would run it as a formula. Numbers stay numbers.

    >>> harmless("=HYPERLINK(A1)"), harmless("-17"), harmless("P-17")
    ("'=HYPERLINK(A1)", '-17', 'P-17')
    """
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
