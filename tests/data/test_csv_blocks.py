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
from fedxl.data import csv_blocks
from fedxl.data.columns import open_table
from fedxl.data.table import TableOptions, table

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
    "empty lines first": "\ufeff".encode() + b"\r\n\n" * 200 + written(),
    "empty lines": written().replace(b"1,plain", b"\n\n1,plain") + b"\n\n\n",
    "marks within texts": b'n,s,t\n1,5" pipe,x\n2,"a\nb" c,"d"\n3,"6""\n",7" of 8"\n' + b"4,x,y\n" * 40,
}


def read(path: Path) -> list[tuple[float, str | None, str | None]]:
    found = []
    for numbers, texts in open_table(path).batches(["s", "t"], ["n"], lambda batch: batch):
        found += zip(numbers[:, 0].tolist(), *(column.to_pylist() for column in texts.values()), strict=True)
    return found


def reference(data: bytes) -> list[tuple[float, str | None, str | None]]:
    _, *rows = [row for row in csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")) if row]
    words = [tuple(None if text in MISSING else text for text in row) for row in rows]
    return [(np.nan if n is None else float(n), s, t) for n, s, t in words]


@pytest.fixture
def small(monkeypatch):
    """Blocks of so many bytes, and so many threads."""

    def change(size: int, threads: int) -> None:
        monkeypatch.setattr(csv_blocks, "BLOCK", size)
        monkeypatch.setattr("fedxl.data.csv_blocks.THREADS", threads)

    return change


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_the_csv_module_wherever_blocks_end(tmp_path, small, form):
    data = FORMS[form]
    (tmp_path / "t.csv").write_bytes(data)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(data))
    expected = reference(data)
    assert len(expected) > 20
    for size in SIZES:
        for name, threads in (("t.csv", 1), ("t.csv", 4), ("t.csv.gz", 2)):
            small(size, threads)
            np.testing.assert_equal(read(tmp_path / name), expected)


def test_lines_may_end_with_a_carriage_return_alone(tmp_path, small):
    (tmp_path / "t.csv").write_bytes(b"n,s,t\r" + b"1,a,b\r2,c,d\r" * 40)
    small(64, 2)
    assert read(tmp_path / "t.csv") == [(1, "a", "b"), (2, "c", "d")] * 40


def test_marks_are_found_as_by_a_walk_over_all_characters():
    rng = np.random.default_rng(0)
    for _ in range(3000):
        data = rng.choice(np.frombuffer(b'",\na""', np.uint8), rng.integers(1, 24))
        found, inside, at = [], False, 0
        while at < len(data):
            mark = data[at] == ord('"')
            if inside and mark and at + 1 < len(data) and data[at + 1] == ord('"'):
                at += 1
            elif mark and (inside or at == 0 or data[at - 1] in b",\n"):
                found, inside = [*found, at], not inside
            at += 1
        marks = csv_blocks.enclosing(data, ",")
        # Doubled marks within a value may be told, too: they do not change what is inside.
        counts = [np.searchsorted(each, np.flatnonzero(data == ord("\n"))) % 2 for each in (marks, found)]
        assert counts[0].tolist() == counts[1].tolist(), data.tobytes()
        assert len(marks) % 2 == len(found) % 2, data.tobytes()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("more", "line"),
    [
        (b'1,"a,b\n1,a,b\n', 'begins with "a,b.* never ends; is a quotation mark missing'),
        (b"1," + b"a" * 200 + b",b\n" + GOOD, "a row of more than 0 kB"),
        (b"1,a\n" + GOOD + b"old,a,b\n", "a row has 2 columns, the first line has 3"),
        (b"old,a,b\n" + GOOD + b"1,a\n", "column 'n' begins with numbers, but holds 'old' further down"),
        (b"old,a,b\n" + GOOD + b'1,"a,b\n', "holds 'old' further down"),
        (b"1,\xff,b\n" * 30, "UTF-8"),
    ],
    ids=["open", "long", "ragged", "text", "text first", "encoding"],
)
def test_the_first_mistake_is_told_wherever_blocks_end(tmp_path, small, threads, more, line):
    (tmp_path / "t.csv").write_bytes(b"n,s,t\n" + GOOD + more)
    for size in SIZES:
        small(size, threads)
        with pytest.raises(UserError, match=line) as told:
            read(tmp_path / "t.csv")
        assert len(str(told.value).splitlines()) == 1
        assert "Row #" not in str(told.value)


def test_examples_do_not_depend_on_blocks_nor_threads(tmp_path, small, monkeypatch):
    rng = np.random.default_rng(1)
    rows = [
        f"{rng.integers(2)},s{rng.integers(3)},{rng.choice(['', 'NA', f'{rng.normal():.4f}'], p=[0.1, 0.1, 0.8])},"
        f"{rng.normal(1e6):.3f},{rng.choice(['red', 'blue'])}\n"
        for _ in range(3000)
    ]
    (tmp_path / "t.csv").write_text("y,site,a,b,c\n" + "".join(rows))
    pd.read_csv(tmp_path / "t.csv").to_parquet(tmp_path / "t.parquet")
    monkeypatch.setattr("fedxl.data.columns.BATCH", 100)
    found = []
    for size, threads, name in ((2**20, 1, "csv"), (777, 1, "csv"), (777, 3, "csv"), (1, 3, "parquet")):
        small(size, threads)
        splits = table(str(tmp_path / f"t.{name}"), "y", TableOptions(site="site"))
        found.append((splits.train.source.x, splits.validation.x, splits.test.x, splits.preparation))
    for other in found[1:]:
        assert all(torch.equal(one, another) for one, another in zip(found[0][:3], other[:3], strict=True))
        assert found[0][3] == other[3]


def test_a_name_of_two_lines_behind_a_byte_order_mark(tmp_path, small):
    (tmp_path / "t.csv").write_bytes('\ufeff"n\n1,2,3","s","t"\n'.encode() + GOOD)
    small(64, 2)
    assert list(open_table(tmp_path / "t.csv").columns) == ["n\n1,2,3", "s", "t"]
    small(len('\ufeff"n\n1,2,3",') + 2, 2)  # the only line break in the first block is in the name
    with pytest.raises(UserError, match="a row of more than"):
        open_table(tmp_path / "t.csv")


def test_row_numbers_are_those_of_each_file():
    ends, rows = np.array([3, 3, 7]), np.array([6, 0, 2, 3], np.int32)
    assert csv_blocks.row_numbers(ends, ["a", "b", "c"], rows) == ["c:4", "a:1", "a:3", "c:1"]
    assert csv_blocks.row_numbers(np.array([9]), [""], rows) == ["7", "1", "3", "4"]
    assert csv_blocks.row_numbers(ends, ["a"], rows[:0]) == []
