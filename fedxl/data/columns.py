"""Columns of CSV and Parquet files, read by pyarrow in batches: a file larger than memory passes through."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from fedxl.data.csv_blocks import blocks, map_in_threads, parser, require_delimiter
from fedxl.errors import UserError, first_line, printable, require, unknown

R = TypeVar("R")
Block = npt.NDArray[np.float64]
Kind = Literal["number", "category", "empty", "date", "other"]  # empty: no value in sight, so it agrees with any kind

PARQUET = (".parquet", ".pq")
CSV = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
BATCH = 2**12  # rows of a Parquet file that are read at a time
MOST_COLUMNS = 4096
LONGEST = 200  # characters of a column's name


class Column(NamedTuple):
    """A column as its file's beginning, or its schema, describes it."""

    kind: Kind
    type: Any  # arrow's


class Batch(NamedTuple):
    """Some rows of a file."""

    numbers: Block  # [rows, columns of numbers], NaN where one is missing
    texts: dict[str, Any]  # arrow's


@dataclass(frozen=True)
class File:
    """A table and its columns."""

    path: Path
    delimiter: str
    columns: Mapping[str, Column]
    rows: Any = None  # arrow's, of a table that is in memory

    def batches(self, texts: Sequence[str], numbers: Sequence[str], finish: Callable[[Batch], R]) -> Iterator[R]:
        """What `finish` makes of the rows of these columns, batch by batch. It is called in several threads."""
        from pyarrow.parquet import ParquetFile

        with reading(self.path, list(self.columns)):
            wanted = [*numbers, *texts]
            if self.rows is not None:
                rows = self.rows.select(wanted).to_batches(BATCH)
            elif _is_parquet(self.path):
                rows = ParquetFile(self.path).iter_batches(BATCH, columns=wanted)
            else:
                yield from self._csv(texts, numbers, finish)
                return
            yield from map_in_threads(lambda batch: finish(_batch(batch, texts, numbers)), rows)

    def _csv(self, texts: Sequence[str], numbers: Sequence[str], finish: Callable[[Batch], R]) -> Iterator[R]:
        import pyarrow as pa

        # Arrow does not read "true" as a float: such columns are read as booleans, and cast.
        booleans = {name for name in numbers if pa.types.is_boolean(self.columns[name].type)}
        types = {name: pa.bool_() if name in booleans else pa.float64() for name in numbers}
        types |= dict.fromkeys(texts, pa.string())
        first = parser(self.delimiter, types)  # which has the columns' names itself
        others = parser(self.delimiter, types, list(self.columns))

        def parsed(block: tuple[int, Any]) -> R:
            number, text = block
            return finish(_batch((others if number else first)(text), texts, numbers))

        yield from map_in_threads(parsed, enumerate(blocks(self.path, self.delimiter)))


def open_table(path: Path, delimiter: str = "") -> File:
    """What a file holds, from its schema or its first rows; nothing else of it is read."""
    require_pyarrow("reading tables")
    require(path.is_file() or not path.exists(), f"{path} is not a file; it must be a CSV or Parquet file")
    require(path.exists(), f"there is no file {path}; path must name a CSV or Parquet file")
    known = _is_parquet(path) or path.name.lower().endswith(CSV)
    require(known, f"cannot tell what {path} is; a table's name ends in {', '.join((*CSV[:3], *PARQUET[:1]))}")
    from pyarrow.parquet import read_schema

    sign = delimiter or ("\t" if ".tsv" in path.name.lower() else ",")
    with reading(path):
        return _described(path, sign, read_schema(path) if _is_parquet(path) else _csv_schema(path, sign))


def in_memory(rows: Any) -> File:
    """A table of arrow's that is in memory."""
    return _described(Path("the data frame"), ",", rows.schema, rows)


def _described(path: Path, delimiter: str, schema: Any, rows: Any = None) -> File:
    names = schema.names
    doubled = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    require(not doubled, f"{path} has two columns called '{printable(doubled[0]) if doubled else ''}'; rename one")
    require(len(names) <= MOST_COLUMNS, f"{path} has {len(names):,} columns; at most {MOST_COLUMNS:,} are read")
    for name in names:
        right = 0 < len(name) <= LONGEST
        require(right, f"{path}: a column is called '{printable(name, 40)}'; names have 1 to {LONGEST} characters")
    return File(path, delimiter, {field.name: Column(_kind(field.type), field.type) for field in schema}, rows)


def require_column(file: File, name: str, setting: str) -> None:
    """Raises UserError if a setting names a column that the file does not have."""
    if name in file.columns:
        return
    if len(file.columns) == 1 and not _is_parquet(file.path):
        (only,) = file.columns
        sign = next((sign for sign in ";\t|" if sign in only), "")
        if sign:
            raise UserError(f"{file.path} seems to separate its columns by {sign!r}; set delimiter = {sign!r}")
    raise unknown(f"column in {file.path} ({setting})", name, file.columns)


@contextmanager
def reading(path: Path, names: Sequence[str] = ()) -> Iterator[None]:
    """What arrow says of a file that it cannot read, in one line."""
    import pyarrow as pa

    try:
        yield
    except UserError:
        raise
    except (pa.ArrowException, OSError, UnicodeError, OverflowError, MemoryError) as error:
        raise UserError(_told(path, first_line(error), names)) from None


def _told(path: Path, line: str, names: Sequence[str]) -> str:
    """Arrow's errors in words that say what would be right."""
    if found := re.search(r"CSV column #(\d+).*conversion error to (\w+): invalid value '(.*?)'?$", line):
        number, kind, value = int(found[1]), found[2], printable(found[3], 60)
        name = names[number] if number < len(names) else f"#{number}"
        what = "true or false" if kind == "bool" else "numbers"
        return (
            f"{path}: column '{printable(name)}' begins with {what}, but holds '{value}' further down; correct it, "
            "or name the column in categorical"
        )
    lower = line.lower()
    if "utf8" in lower or "utf-8" in lower or "unicode" in lower:
        return f"{path} is not encoded as UTF-8; save it as UTF-8"
    if found := re.search(r"Expected (\d+) columns, got (\d+)", line):
        shown = re.sub(r"Row #\d+: ", "", line)  # which counts from where a block begins
        told = f"{path}: a row has {found[2]} columns, the first line has {found[1]} ({printable(shown, 120)})"
        if found[1] == "1":
            return f"{told}; set delimiter to what separates columns, such as delimiter = ';'"
        return f"{told}; is a quotation mark missing?"
    if "empty csv" in lower:
        return f"{path} is empty; it must hold a line of names and rows"
    return f"cannot read {path}: {printable(line)}"


def _batch(rows: Any, texts: Sequence[str], numbers: Sequence[str]) -> Batch:
    """Rows of arrow's as numbers and texts."""
    import pyarrow as pa

    found = {name: _cast(rows.column(name), pa.string()) for name in texts}
    if not numbers or not rows.num_rows:
        return Batch(np.empty((rows.num_rows, len(numbers))), found)
    floats = rows.select(list(numbers))
    if any(kind != pa.float64() for kind in floats.schema.types):
        floats = pa.record_batch([_cast(column, pa.float64()) for column in floats.columns], list(numbers))
    (whole,) = floats.to_batches() if isinstance(floats, pa.Table) else (floats,)
    return Batch(whole.to_tensor(null_to_nan=True).to_numpy(), found)


def _cast(column: Any, kind: Any) -> Any:
    """A column in the type that is wanted."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if column.type == kind:
        return column
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_boolean(column.type) and kind == pa.float64():
        column = column.cast(pa.uint8())
    return column.cast(kind, safe=False)


def _kind(type: Any) -> Kind:
    import pyarrow as pa

    kinds = pa.types
    if kinds.is_dictionary(type):
        return _kind(type.value_type)
    if kinds.is_boolean(type) or kinds.is_integer(type) or kinds.is_floating(type) or kinds.is_decimal(type):
        return "number"
    if str(type) in ("string", "large_string", "string_view"):
        return "category"
    if kinds.is_null(type):
        return "empty"
    return "date" if kinds.is_temporal(type) else "other"


def _is_parquet(path: Path) -> bool:
    return path.name.lower().endswith(PARQUET)


def _csv_schema(path: Path, delimiter: str) -> Any:
    with path.open("rb") as file:
        wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    require(not wide, f"{path} is not encoded as UTF-8, but as UTF-16; save it as UTF-8")
    require_delimiter(delimiter)
    with closing(blocks(path, delimiter)) as text:
        first = next(text, None)
    require(first is not None, f"{path} is empty; it must hold a line of names and rows")
    return parser(delimiter, {})(first).schema


def require_pyarrow(what: str) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError(f"{what} needs pyarrow; pip install 'fedxl[table]'") from None
