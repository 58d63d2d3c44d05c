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
from fedxl.data.cifar import loads


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

# Each of them keeps plain pickle, or whoever looks at what it gave, busy for ever, or takes all memory or the stack.
BOMBS = {
    "a memo of two thousand million places": b"Nr\xff\xff\xff\x7f.",
    "tuples of itself, by DUP": b"})" + b"2\x86" * 60 + b"Ns.",
    "tuples of itself, by the memo": b"})" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60)) + b"Ns.",
    "tuples of itself, noted twice": b"})" + b"".join(b"q\x00q%ch%c\x86" % (n, n) for n in range(1, 60)) + b"Ns.",
    "tuples of itself, built of nothing": b"})" + b"".join(b"Nbq%ch%c\x86" % (n, n) for n in range(60)) + b"Ns.",
    # Noting place 0 twice makes one place: whoever counts notes instead looks for the tuple in the wrong one.
    "tuples of itself, noted in order": b"\x80\x04}K\x01q\x00q\x00Ns)\x94h\x01\x86"
    + b"".join(b"\x94h%c\x86" % n for n in range(2, 60))
    + b"Ns.",
    "lists of itself": b"}S'a'\n]" + b"".join(b"q%c](h%ch%ce" % (n, n, n) for n in range(60)) + b"s.",
    "tuples as deep as the stack": b"})" + b"\x85" * 200_000 + b"Ns.",
    "a number of a hundred thousand bytes": b"\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000 + b".",
    "a number of a hundred thousand digits": b"L" + b"9" * 100_000 + b"L\n.",
    "more bytes than there are": b"\x8e" + struct.pack("<Q", 2**40) + b"x.",
    "a byte array larger than any memory": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",
    "an array of too many dimensions": pickle.dumps({"x": ARRAY}, 4).replace(
        b"K\x03K\x04\x86", b"(" + b"J\xff\xff\xff\x7f" * 10_000 + b"t"
    ),
}


@pytest.mark.parametrize("case", list(BOMBS))
def test_a_few_bytes_cannot_keep_it_busy(case):
    """Refused before anything is built: were it not so, this would not come to an end."""
    with pytest.raises(UserError, match=r"^here was not read: ") as refused:
        loads(BOMBS[case], "here")
    assert len(str(refused.value)) < 200


def test_parts_that_are_shared_as_picklers_share_them():
    """Texts and types of arrays, that is; two arrays of one type are common."""
    batch = {"a": ARRAY, "b": ARRAY + 1, "names": ["same", "same"]}
    for data in (pickle.dumps(batch, 3), pickle.dumps(batch, 4)):
        content = loads(data, "here")
        assert np.array_equal(content["b"], ARRAY + 1)
        assert len(set(content["names"])) == 1


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
    with pytest.raises(UserError, match=r"it asks for (posix|nt)\.system, which is not an array of numbers"):
        loads(EVIL["a command"], "here")
