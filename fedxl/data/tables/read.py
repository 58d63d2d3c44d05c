"""Columns of CSV and Parquet files, read by pyarrow in batches: a file larger than memory passes through."""

from __future__ import annotations

import base64
import codecs
import glob
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl.errors import UserError, first_line, printable, require, unknown

Block = npt.NDArray[np.float64]
Kind = Literal["number", "category", "empty", "date", "other"]  # empty: no value in sight, so it agrees with any kind

PARQUET = (".parquet", ".pq")
CSV = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
BATCH = 2**12  # rows of a Parquet file that are read at a time
BLOCK = 2**21  # bytes of a CSV file that are parsed at a time; no row may be longer
# What stands for a missing value, in files and in the texts of data frames: pandas's words, and "?". Those of pandas
# that begin as numbers do are left out, or arrow would look twice at every number.
MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "<NA>", "#N/A", "#N/A N/A", "#NA", "?")
DELIMITER = "set delimiter = {!r}"  # what to do about a file with another one
MOST_COLUMNS = 4096
LONGEST = 200  # characters of a column's name


class Column(NamedTuple):
    """A column as its file's beginning, or its schema, describes it."""

    kind: Kind
    type: Any  # arrow's


class Batch(NamedTuple):
    """Some rows of a file."""

    numbers: Block  # [rows, columns of numbers], NaN where one is missing
    texts: dict[str, Any]  # arrow's, null where one is missing


@dataclass(frozen=True)
class File:
    """A table and its columns."""

    path: Path
    delimiter: str
    columns: Mapping[str, Column]
    rows: Any = None  # arrow's, of a table that is in memory

    def batches(self, texts: Sequence[str], numbers: Sequence[str]) -> Iterator[Batch]:
        """The rows of these columns, batch by batch."""
        import pyarrow as pa

        wanted = [*numbers, *texts]
        with reading(self.path, list(self.columns)):
            try:
                for rows in self._stream(wanted, numbers):
                    yield _batch(rows, texts, numbers)
            except pa.ArrowInvalid:
                for _ in self._stream(wanted, numbers, threads=False):  # in one thread, arrow tells the row
                    pass
                raise

    def text(self, name: str, row: int) -> str | None:
        """What a cell of a column of texts holds, a word for a missing value included."""
        import pyarrow as pa

        for rows in self._stream([name], []):
            if row < rows.num_rows:
                return _cast(rows.column(name), pa.string())[row].as_py()  # type: ignore[no-any-return]
            row -= rows.num_rows
        return None

    def _stream(self, wanted: list[str], numbers: Sequence[str], threads: bool = True) -> Iterable[Any]:
        """These columns as record batches of arrow's, whatever the file is."""
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile

        if self.rows is not None:
            return self.rows.select(wanted).to_batches(BATCH)  # type: ignore[no-any-return]
        if _is_parquet(self.path):
            return ParquetFile(self.path).iter_batches(BATCH, columns=wanted)  # type: ignore[no-any-return]
        # Arrow does not read "true" as a float: such columns are read as booleans, and cast.
        booleans = {name for name in numbers if pa.types.is_boolean(self.columns[name].type)}
        types = dict.fromkeys(wanted, pa.string()) | dict.fromkeys(numbers, pa.float64())
        types |= dict.fromkeys(booleans, pa.bool_())
        return _open_csv(self.path, self.delimiter, types, threads)  # type: ignore[no-any-return]


def _open_csv(path: Path, delimiter: str, types: Mapping[str, Any], threads: bool = True) -> Any:
    """Arrow's streaming reader: columns of `types` in their order; all columns if it is empty."""
    from pyarrow import csv, input_stream

    stream = input_stream(str(path), compression="gzip" if path.name.lower().endswith(".gz") else None)
    reading = csv.ReadOptions(use_threads=threads, block_size=BLOCK)
    parsing = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    names = list(types)
    converting = csv.ConvertOptions(column_types=dict(types), include_columns=names, null_values=list(MISSING))
    return csv.open_csv(stream, reading, parsing, converting)


def open_table(path: Path, delimiter: str = "", advice: str = DELIMITER) -> File:
    """What a file holds, from its schema or its first rows; nothing else of it is read. advice: on its delimiter."""
    require_pyarrow("reading tables")
    require(path.is_file() or not path.exists(), f"{path} is not a file; it must be a CSV or Parquet file")
    require(path.exists(), f"there is no file {path}; path must name a CSV or Parquet file")
    known = _is_parquet(path) or path.name.lower().endswith(CSV)
    require(known, f"cannot tell what {path} is; a table's name ends in {', '.join((*CSV[:3], *PARQUET[:1]))}")
    from pyarrow.parquet import read_schema

    sign = delimiter or ("\t" if ".tsv" in path.name.lower() else ",")
    with reading(path, advice=advice):
        if _is_parquet(path):
            return _described(path, sign, read_schema(path), coded=_written_as_categories(path))
        with path.open("rb") as file:
            wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        require(not wide, f"{path} is not encoded as UTF-8, but as UTF-16; save it as UTF-8")
        require_delimiter(sign)
        with _open_csv(path, sign, {}, threads=False) as rows:  # in one thread, arrow tells the row of a mistake
            return _described(path, sign, rows.schema)


def in_memory(rows: Any) -> File:
    """A table of arrow's that is in memory."""
    return _described(Path("the data frame"), ",", rows.schema, rows)


def _written_as_categories(path: Path) -> set[str]:
    """The columns of a Parquet file that were categories. The format itself keeps this of texts alone."""
    import pyarrow as pa
    from pyarrow.parquet import read_metadata

    kept = (read_metadata(path).metadata or {}).get(b"ARROW:schema", b"")
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(kept)))
    except (pa.ArrowException, OSError, ValueError):
        return set()  # it was not written by arrow
    return {field.name for field in schema if pa.types.is_dictionary(field.type)}


def _described(path: Path, delimiter: str, schema: Any, rows: Any = None, coded: Collection[str] = ()) -> File:
    names = schema.names
    doubled = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    require(not doubled, f"{path} has two columns called '{printable(''.join(doubled[:1]))}'; rename one")
    require(len(names) <= MOST_COLUMNS, f"{path} has {len(names):,} columns; at most {MOST_COLUMNS:,} are read")
    for name in names:
        right = 0 < len(name) <= LONGEST
        require(right, f"{path}: a column is called '{printable(name, 40)}'; names have 1 to {LONGEST} characters")
    columns = {field.name: Column(_kind(field.type, field.name in coded), field.type) for field in schema}
    return File(path, delimiter, columns, rows)


def require_column(file: File, name: str, setting: str = "", advice: str = DELIMITER) -> None:
    """Raises UserError if a setting names a column that the file does not have; "": a model reads it.

    advice: what to do about another delimiter.
    """
    if name in file.columns:
        return
    if len(file.columns) == 1 and not _is_parquet(file.path):
        (only,) = file.columns
        sign = next((sign for sign in ";\t|," if sign in only), "")
        if sign:
            raise UserError(f"{file.path} seems to separate its columns by {sign!r}; {advice.format(sign)}")
    require(bool(setting), f"{file.path} lacks the column '{printable(name)}', which the model reads")
    raise unknown(f"column in {file.path} ({setting})", name, file.columns)


@contextmanager
def reading(path: Path, names: Sequence[str] = (), advice: str = DELIMITER) -> Iterator[None]:
    """What arrow says of a file that it cannot read, in one line."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeError, OverflowError, MemoryError) as error:
        raise UserError(_told(path, first_line(error), names, advice)) from None


def _told(path: Path, line: str, names: Sequence[str], advice: str) -> str:
    """Arrow's errors in words that say what would be right."""
    row = re.search(r"Row #(\d+)", line)
    place = f" in row {int(row[1]) - 1:,}" if row else " further down"  # arrow counts the names, too
    if found := re.search(r"CSV column #(\d+).*conversion error to (\w+): invalid value '(.*?)'?$", line):
        number, kind, value = int(found[1]), found[2], printable(found[3], 60)
        name = names[number] if number < len(names) else f"#{number}"
        what = "true or false" if kind == "bool" else "numbers"
        return (
            f"{path}: column '{printable(name)}' begins with {what}, but holds '{value}'{place}; correct it, "
            "or name the column in categorical"
        )
    lower = line.lower()
    if "utf8" in lower or "utf-8" in lower or "unicode" in lower:
        return f"{path} is not encoded as UTF-8; save it as UTF-8"
    if found := re.search(r"Expected (\d+) columns, got (\d+)", line):
        shown = printable(line.partition(f"got {found[2]}: ")[2], 60)
        which = f"row {int(row[1]) - 1:,}" if row else "a row"
        told = f"{path}: {which} has {found[2]} columns, the first line has {found[1]} ({shown})"
        if found[1] == "1":
            sign = next((sign for sign in ";\t|" if sign in shown), ";")
            return f"{told}; are columns separated by {sign!r}? {advice.format(sign)}"
        return f"{told}; is a quotation mark missing?"
    endless = "empty csv" in lower and path.stat().st_size > BLOCK  # so arrow calls a first line that does not end
    if "straddling" in lower or endless:
        return f"{path} holds a row of more than {BLOCK // 1000} kB; is a quotation mark missing?"
    if "empty csv" in lower:
        return f"{path} is empty; it must hold a line of names and rows"
    return f"cannot read {path}: {printable(line)}"


def _batch(rows: Any, texts: Sequence[str], numbers: Sequence[str]) -> Batch:
    import pyarrow as pa

    found = {name: _without_missing(_cast(rows.column(name), pa.string())) for name in texts}
    if not numbers or not rows.num_rows:
        return Batch(np.empty((rows.num_rows, len(numbers))), found)
    floats = rows.select(list(numbers))
    if any(kind != pa.float64() for kind in floats.schema.types):
        floats = pa.record_batch([_cast(column, pa.float64()) for column in floats.columns], list(numbers))
    (whole,) = floats.to_batches() if isinstance(floats, pa.Table) else (floats,)
    return Batch(whole.to_tensor(null_to_nan=True).to_numpy(), found)


def _without_missing(texts: Any) -> Any:
    """Texts, null where a word stands for a missing value."""
    import pyarrow as pa
    from pyarrow import compute

    missing = compute.is_in(texts, value_set=pa.array(MISSING))
    return compute.if_else(missing, pa.scalar(None, pa.string()), texts)


def _cast(column: Any, kind: Any) -> Any:
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


def _kind(type: Any, coded: bool = False) -> Kind:
    """coded: whether numbers are those of categories, as in a dictionary of arrow's."""
    import pyarrow as pa

    kinds = pa.types
    if kinds.is_dictionary(type):
        return _kind(type.value_type, coded=True)
    if kinds.is_boolean(type) or kinds.is_integer(type) or kinds.is_floating(type) or kinds.is_decimal(type):
        return "category" if coded else "number"
    if str(type) in ("string", "large_string", "string_view"):
        return "category"
    if kinds.is_null(type):
        return "empty"
    return "date" if kinds.is_temporal(type) else "other"


def _is_parquet(path: Path) -> bool:
    return path.name.lower().endswith(PARQUET)


def require_delimiter(delimiter: str) -> None:
    right = len(delimiter) == 1 and delimiter.isascii() and (delimiter.isprintable() or delimiter == "\t")
    require(right and delimiter != '"', "delimiter must be one character, such as ';'")


def require_pyarrow(what: str) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError(f"{what} needs pyarrow; pip install 'fedxl[table]'") from None


def find(path: str | tuple[str, ...]) -> list[Path]:
    """The files that a path, a pattern or a list of both names, each once."""
    found: dict[str, Path] = {}
    for one in (path,) if isinstance(path, str) else path:
        require(bool(one) and "\0" not in one, "path must name a CSV or Parquet file")
        matches = sorted(glob.glob(one, recursive=True)) if glob.has_magic(one) and not Path(one).exists() else [one]
        require(bool(matches), f"no file matches {printable(one)}")
        found |= {os.path.realpath(match): Path(match) for match in matches}
    require(bool(found), "path must name a CSV or Parquet file")
    folder = next((file for file in found.values() if file.is_dir()), None)
    require(folder is None, f"{folder} is a folder; name its files: path = '{folder}/*.csv'")
    return list(found.values())


def names_of(paths: Sequence[Path], hint: str = "; rename some") -> list[str]:
    """A name for each file: its own, or its folder's where all files are called alike."""
    own = [path.name.partition(".")[0] or path.name for path in paths]
    for names in (own, [path.resolve().parent.name for path in paths]):
        if len(set(names)) == len(names):
            return names
    raise UserError(f"files of different folders have the same names{hint}")
