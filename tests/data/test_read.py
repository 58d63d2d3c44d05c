"""CSV files in blocks: the rows that Python's csv module finds, wherever blocks end, by any number of threads."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedxl import UserError
from fedxl.data.tables import read as reading
from fedxl.data.tables.read import open_table
from fedxl.data.tables.roles import TableOptions
from fedxl.data.tables.table import table

pytest.importorskip("pyarrow", reason="needs fedxl[table]")

SIZES = range(64, 141, 11)  # bytes of a block
ROWS = [
    ["1", "plain", "x"],
    ["-2.5e3", "two\nlines", "y"],
    ["", "a, b", 'the "first" one'],
    ["NA", "\r\n\n", '"'],
    ["4", 'says ""', "\n"],
    ["0.125", "", "?"],
    ["7", "last", "z"],
] * 3  # fmt: skip
GOOD = b"1,a,b\n" * 40  # more than a block
MISSING = ("", "NA", "?")


def written(quoting: Any = csv.QUOTE_MINIMAL, ends: str = "\n") -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, quoting=quoting, lineterminator=ends).writerows([["n", "s", "t"], *ROWS])
    return text.getvalue().encode()


FORMS = {
    "minimal": written(),
    "all quoted": written(csv.QUOTE_ALL),
    "CRLF": written(ends="\r\n"),
    "BOM": "\ufeff".encode() + written(csv.QUOTE_ALL),
    "no last line break": written()[:-1],
    "empty lines first": "\ufeff".encode() + b"\r\n\n" * 10 + written(),
    "empty lines": written().replace(b"1,plain", b"\n\n1,plain") + b"\n\n\n",
    "marks within texts": b'n,s,t\n1,5" pipe,x\n2,"a\nb" c,"d"\n3,"6""\n",7" of 8"\n' + b"4,x,y\n" * 40,
}


def read(path: Path) -> list[tuple[float, str | None, str | None]]:
    found = []
    for numbers, texts in open_table(path).batches(["s", "t"], ["n"]):
        found += zip(numbers[:, 0].tolist(), *(column.to_pylist() for column in texts.values()), strict=True)
    return found


def reference(data: bytes) -> list[tuple[float, str | None, str | None]]:
    _, *rows = [row for row in csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")) if row]
    words = [tuple(None if text in MISSING else text for text in row) for row in rows]
    return [(np.nan if n is None else float(n), s, t) for n, s, t in words]


@pytest.fixture
def small(monkeypatch):
    """Blocks of so many bytes."""
    return lambda size: monkeypatch.setattr(reading, "BLOCK", size)


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_the_csv_module_wherever_blocks_end(tmp_path, small, form):
    data = FORMS[form]
    (tmp_path / "t.csv").write_bytes(data)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(data))
    expected = reference(data)
    assert len(expected) > 20
    for size in SIZES:
        small(size)
        for name in ("t.csv", "t.csv.gz"):
            np.testing.assert_equal(read(tmp_path / name), expected)


def test_lines_may_end_with_a_carriage_return_alone(tmp_path, small):
    (tmp_path / "t.csv").write_bytes(b"n,s,t\r" + b"1,a,b\r2,c,d\r" * 40)
    small(64)
    assert read(tmp_path / "t.csv") == [(1, "a", "b"), (2, "c", "d")] * 40


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (b'1,"a,b\n1,a,b\n', "row 41 has 2 columns.* is a quotation mark missing"),
        (b"1," + b"a" * 400 + b",b\n" + GOOD, "a row of more than 0 kB; is a quotation mark missing"),
        (b"1,a\n" + GOOD + b"old,a,b\n", "row 41 has 2 columns, the first line has 3"),
        (b"old,a,b\n" + GOOD + b"1,a\n", "column 'n' begins with numbers, but holds 'old' in row 41"),
        (b"old,a,b\n" + GOOD + b'1,"a,b\n', "holds 'old' in row 41"),
        (b"1,\xff,b\n" * 30, "UTF-8"),
    ],
    ids=["open", "long", "ragged", "text", "text first", "encoding"],
)
def test_the_first_mistake_is_told_wherever_blocks_end(tmp_path, small, more, line):
    (tmp_path / "t.csv").write_bytes(b"n,s,t\n" + GOOD + more)
    for size in SIZES:
        small(size)
        with pytest.raises(UserError, match=line) as told:
            read(tmp_path / "t.csv")
        assert len(str(told.value).splitlines()) == 1
        assert "Row #" not in str(told.value)


def test_examples_do_not_depend_on_blocks(tmp_path, small, monkeypatch):
    rng = np.random.default_rng(1)
    rows = [
        f"{rng.integers(2)},s{rng.integers(3)},{rng.choice(['', 'NA', f'{rng.normal():.4f}'], p=[0.1, 0.1, 0.8])},"
        f"{rng.normal(1e6):.3f},{rng.choice(['red', 'blue'])}\n"
        for _ in range(3000)
    ]
    (tmp_path / "t.csv").write_text("y,site,a,b,c\n" + "".join(rows))
    pd.read_csv(tmp_path / "t.csv").to_parquet(tmp_path / "t.parquet")
    monkeypatch.setattr("fedxl.data.tables.read.BATCH", 100)
    found = []
    for size, name in ((2**20, "csv"), (777, "csv"), (1, "parquet")):
        small(size)
        splits = table(str(tmp_path / f"t.{name}"), TableOptions(label="y", site="site"))
        found.append((splits.train.x, splits.validation.x, splits.test.x, splits.preparation))
    for other in found[1:]:
        assert all(torch.equal(one, another) for one, another in zip(found[0][:3], other[:3], strict=True))
        assert found[0][3] == other[3]


def test_a_name_of_two_lines_behind_a_byte_order_mark(tmp_path, small):
    (tmp_path / "t.csv").write_bytes('\ufeff"n\n1,2,3","s","t"\n'.encode() + GOOD)
    small(64)
    assert list(open_table(tmp_path / "t.csv").columns) == ["n\n1,2,3", "s", "t"]
    small(len('\ufeff"n\n1,2,3",') + 2)  # the only line break in the first block is in the name
    with pytest.raises(UserError, match="a row of more than"):
        open_table(tmp_path / "t.csv")
