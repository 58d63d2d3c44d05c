"""Rows whose numbers are cast where they stand: arrow's CSV reader finds the same, or has to read them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="needs fedxl[table]")

from fedxl.data.columns import _batch  # noqa: E402
from fedxl.data.csv_blocks import MISSING, Parser  # noqa: E402
from fedxl.data.plain_rows import PlainRows, Rows  # noqa: E402

NAMES = ["a", "b", "c", "d"]
NUMBERS, TEXTS = ["a", "c"], ["d", "b"]
USUAL = ["1", "-2.5", "0.1", "1e5", "-.5", "123456789.123456789", "5e-324", "2.2250738585072011e-308", "007", "1."]
ODD = [
    "",
    "NA",
    "?",
    "nan",
    "+1",
    " 1",
    "1 ",
    "-",
    "-nan",
    "inf",
    "1,2",
    '"3"',
    "x",
    "/",
    "0x1",
    "1_0",
    "\r",
    "\0",
    "ä",
]


def plain(block: bytes, names: list[str] = NAMES, delimiter: str = ",") -> Rows | None:
    places = ([names.index(name) for name in some if name in names] for some in (NUMBERS, TEXTS))
    return PlainRows(delimiter, len(names), *places, MISSING)(pa.py_buffer(block))


def reference(block: bytes, names: list[str] = NAMES, delimiter: str = ",") -> Any:
    """As arrow's CSV reader has it; None if it refuses."""
    numbers, texts = ([name for name in some if name in names] for some in (NUMBERS, TEXTS))
    types = {name: pa.float64() for name in numbers} | dict.fromkeys(texts, pa.string())
    try:
        return _batch(Parser(delimiter, types, names)(pa.py_buffer(block)), texts, numbers)
    except pa.ArrowInvalid:
        return None


def assert_same(found: Rows, expected: Any) -> None:
    assert expected is not None
    assert np.array_equal(found.numbers, expected.numbers, equal_nan=True)
    signs = (np.signbit(each.numbers[~np.isnan(each.numbers)]) for each in (found, expected))
    assert np.array_equal(*signs)
    texts = [column.to_pylist() for column in expected.texts.values()]
    assert [column.to_pylist() for column in found.texts] == texts


@pytest.mark.parametrize(
    "block",
    [
        b"1,a,2.5,b\n-3,c,4e2,d\n",
        b"1,a,2.5,b\r\n-3,c,4e2,d\r\n",
        b",,,\n1,a,,NA\nNaN,?,null,<NA>\n",
        "1,ä,2,ß\n3,,4,\n".encode(),
    ],
    ids=["plain", "CRLF", "gaps", "UTF-8"],
)
def test_plain_rows_are_read_here(block):
    found = plain(block)
    assert found is not None
    assert_same(found, reference(block))


@pytest.mark.parametrize(
    "block",
    [
        b"", b"\n", b"1,a,2,b", b"1,a,2\n", b"1,a,2,b,c\n", b"1,a,2\n,b\n", b'1,"a",2,b\n', b"1,a,x,b\n",
        b"1,a,2,b\r3,a,4,b\n", b"1,a\r,2,b\r\n", b"1,a,2,b\n\n", b"1,\xff,2,b\n", b"1,a,NA ,b\n",
        b"\xef\xbb\xbf1,a,2,b\n",
    ],
)  # fmt: skip
def test_other_rows_are_left_to_the_csv_reader(block):
    assert plain(block) is None


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|", ".", "5"])
def test_nothing_is_read_that_the_csv_reader_reads_otherwise(delimiter):
    """Thousands of short blocks, of which some hold one odd field and some several."""
    rng = np.random.default_rng(ord(delimiter))
    outcomes = {True: 0, False: 0}
    for share, names, ending in product((0.0, 0.02, 0.2), (NAMES, ["a"], ["c", "x", "a"]), ("\n", "\r\n")):
        for _ in range(60):
            rows = rng.integers(1, 9)
            fields = rng.choice(USUAL, (rows, len(names)))
            odd = rng.random(fields.shape) < share
            fields = np.where(odd, rng.choice(ODD, fields.shape), fields)
            block = "".join(delimiter.join(row) + ending for row in fields.tolist()).encode()
            found = plain(block, names, delimiter)
            outcomes[found is not None] += 1
            if found is not None:
                assert_same(found, reference(block, names, delimiter))
    assert outcomes[False] > 50
    assert outcomes[True] > 400 or delimiter in ".5"


def test_an_attempt_in_vain_is_not_repeated_and_gaps_are_remembered():
    read = PlainRows(",", 4, [0, 2], [1], MISSING)
    some, gaps, quoted = (pa.py_buffer(text) for text in (b"1,a,2,b\n", b"1,a,NA,b\n", b'1,"a",2,b\n'))
    for block in (some, gaps, some, gaps):
        assert read(block) is not None
    assert read(quoted) is None
    assert read(some) is None
