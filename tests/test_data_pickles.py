"""Published pickles are data: what is anything else is refused, and nothing of it runs."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import tempfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from fedxl import UserError
from fedxl.data.pickles import loads


class _Python2(pickle._Pickler):
    """Writes as Python 2 did, protocol 2: texts and arrays as byte strings, under the names of NumPy 1."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_bytes(self, data: bytes) -> None:
        short = len(data) < 256
        head = (
            pickle.SHORT_BINSTRING + bytes([len(data)]) if short else pickle.BINSTRING + struct.pack("<i", len(data))
        )
        self.write(head + data)
        self.memoize(data)

    dispatch[bytes] = save_bytes

    def save_str(self, text: str) -> None:
        self.save_bytes(text.encode())

    dispatch[str] = save_str


def python2(content: object) -> bytes:
    file = io.BytesIO()
    _Python2(file, protocol=2).dump(content)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


ARRAY = np.arange(12, dtype=np.uint8).reshape(3, 4)
BATCH = {"labels": [1, 2, 3], "data": ARRAY, "batch_label": "training batch 1 of 5"}


def test_python_2_is_imitated():
    """The published batches begin so; the reference here is what they are known to hold."""
    names = [opcode.name for opcode, _, _ in pickletools.genops(python2(BATCH))]
    assert {"SHORT_BINSTRING", "GLOBAL", "REDUCE", "BUILD"} <= set(names)
    assert "STACK_GLOBAL" not in names
    assert b"cnumpy.core.multiarray\n_reconstruct\n" in python2(BATCH)


@pytest.mark.parametrize(
    "data", [python2(BATCH), pickle.dumps(BATCH, 3), pickle.dumps(BATCH, 4)], ids=["2", "3", "4"]
)
def test_a_batch_comes_out_as_it_went_in(data):
    content = loads(data, "here")
    assert content["labels"] == [1, 2, 3]
    assert content["data"].dtype == np.uint8
    assert np.array_equal(content["data"], ARRAY)


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3).T, np.arange(3, dtype=">i4"), np.zeros((0, 3), np.int64), np.float32([[2]])],
)
def test_arrays_of_numbers_of_any_kind(array):
    content = loads(pickle.dumps({"x": array}, 4), "here")["x"]
    assert content.dtype == array.dtype
    assert np.array_equal(content, array)


class Calls:
    def __init__(self, *reduced: object) -> None:
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


MARK = Path(tempfile.gettempdir(), f"fedxl-test-mark-{os.getpid()}")
TOUCH = f"touch {MARK}"
EVIL = {
    "a command": pickle.dumps(Calls(os.system, (TOUCH,))),
    "a command, protocol 0": pickle.dumps(Calls(os.system, (TOUCH,)), 0),
    "a command among data": pickle.dumps({**BATCH, "x": Calls(os.system, (TOUCH,))}, 4),
    "eval": pickle.dumps(Calls(eval, (f"__import__('os').system('{TOUCH}')",))),
    "getattr": b"c__builtin__\ngetattr\n.",
    "an attribute of what is allowed": b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.tofile\x93.",
    "a function of NumPy": b"cnumpy\nload\n(S'x.npy'\ntR.",
    "an old class": f"(S'{TOUCH}'\nios\nsystem\n.".encode(),
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent name": b"Psomething\n.",
    "an object of the allowed name": b"cnumpy\nndarray\n)\x81.",
    "attributes for an allowed name": b"cnumpy\ndtype\n(dS'x'\nI1\nsb.",
    "a slot for an allowed name": b"cnumpy\ndtype\n(N(dS'__call__'\nI1\nstb.",
    "an array of objects": pickle.dumps({"x": np.array([{}, []], dtype=object)}, 4),
    "an array of texts": pickle.dumps({"x": np.array(["a"])}, 4),
    "a record": pickle.dumps({"x": np.zeros(2, [("a", "u1")])}, 4),
    "a shape its bytes cannot fill": pickle.dumps({"x": ARRAY}, 4).replace(b"K\x03K\x04\x86", b"K\x03K\x7f\x86"),
    "half of it": python2(BATCH)[:-30],
    "no pickle": b"rubbish",
    "nothing": b"",
    "a list": pickle.dumps([1, 2]),
}


@pytest.mark.parametrize("case", list(EVIL))
def test_anything_else_is_refused_in_one_line(case):
    with pytest.raises(UserError, match=r"^here was not read: ") as refused:
        loads(EVIL[case], "here")
    assert len(str(refused.value).splitlines()) == 1
    assert not MARK.exists()


def test_the_refusals_are_not_for_nothing():
    """Plain pickle does run the first of them: these are live."""
    assert pickle.loads(EVIL["a command"]) == 0
    assert MARK.exists()
    MARK.unlink()


def test_what_is_asked_for_is_named():
    with pytest.raises(UserError, match=r"it asks for (posix|nt)\.system, which is no array of numbers"):
        loads(EVIL["a command"], "here")
