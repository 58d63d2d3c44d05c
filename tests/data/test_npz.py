"""Files of arrays that are not what they say: one line, before any memory is taken."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedxl import UserError
from fedxl.data import npz
from fedxl.data.sets import own as archive
from tests.cli.test_errors import CONFIG, arrays, command


def npy(array: np.ndarray, **header: object) -> bytes:
    """A file of one array, whose header says something else."""
    stream = io.BytesIO()
    described = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape, **header}
    np.lib.format.write_array_header_1_0(stream, described)
    return stream.getvalue() + array.tobytes()


def packed(path: Path, **members: bytes) -> Path:
    """An archive of the good arrays, with other ones in their place."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in {**{name: npy(array) for name, array in arrays().items()}, **members}.items():
            file.writestr(f"{name}.npy", content)
    return path


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def claiming(path: Path, size: int) -> Path:
    """An archive whose first member says that it is so large once it is unpacked."""
    content = bytearray(packed(path).read_bytes())
    for mark, place in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        start = content.index(mark) + place
        content[start : start + 4] = struct.pack("<I", size)
    return written(path, bytes(content))


X = arrays()["x"]
LONG_HEADER = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b" " * 1000
FILES = {
    "nothing": (lambda p: written(p, b""), "cannot read"),
    "a device": (lambda p: Path("/dev/null"), "is not a file"),
    "a device without end": (lambda p: Path("/dev/zero"), "is not a file"),
    "a pipe that nobody writes to": (pipe, "is not a file"),
    "a folder": (lambda p: p.parent, "is not a file"),
    "one array": (lambda p: written(p, npy(X)), "cannot read"),
    "half of it": (lambda p: written(p, packed(p).read_bytes()[:-200]), "cannot read"),
    "no array in it": (lambda p: packed(p, x=b"rubbish"), "cannot read"),
    "nothing in it": (lambda p: packed(p, x=b""), "cannot read"),
    "a shape without end": (lambda p: packed(p, x=npy(X, shape=(2**40, 2**20))), "does not match its header"),
    "a shape that overflows": (lambda p: packed(p, x=npy(X, shape=(2**63, 2))), "does not match its header"),
    "a negative shape": (lambda p: packed(p, x=npy(X, shape=(-12, -5))), "does not match its header"),
    "too many dimensions": (lambda p: packed(p, x=npy(X, shape=(12, 5, *[1] * 40))), "does not match its header"),
    "a shape that is none": (lambda p: packed(p, x=npy(X, shape="wide")), "cannot read"),
    "a header without end": (lambda p: packed(p, x=LONG_HEADER), "cannot read"),
    "a header too deep": (lambda p: packed(p, x=npy(X, shape=[[[[[[1]]]]]])), "cannot read"),
    "a size that is none": (lambda p: claiming(p, 2**31), "does not match its header"),
    "objects": (lambda p: packed(p, x=npy(X, descr="|O")), "neither numbers nor strings"),
    "a record": (lambda p: packed(p, x=npy(X, descr=[("a", "<f8")])), "neither numbers nor strings"),
    "dates": (lambda p: packed(p, x=npy(X, descr="<M8[s]")), "neither numbers nor strings"),
    "complex numbers": (lambda p: packed(p, x=npy(X.astype(complex))), "x must hold numbers"),
    "no features": (lambda p: packed(p, x=npy(X[:, :0])), "hold no numbers"),
    "numbers too large": (lambda p: packed(p, x=npy(1e300 * X)), "NaN or infinity"),
    "labels that wrap around": (lambda p: packed(p, y=npy(np.full(12, 2**64 - 1, np.uint64))), "labels must be 0 or"),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(FILES))
def test_what_is_no_file_of_arrays_is_one_line(kind, tmp_path, monkeypatch, capsys):
    write, message = FILES[kind]
    path = write(tmp_path / "d.npz")
    (tmp_path / "c.toml").write_text(CONFIG.replace('"digits"', f'"npz"\npath = "{path}"'))
    code, _, err = command(monkeypatch, capsys, "train", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run"))
    assert (code, len(err.strip().splitlines())) == (2, 1), err
    assert message in err


@pytest.mark.parametrize("kind", [">f8", "<f4", "f2", "g", "i2", ">i8", "u4", "?"])
def test_numbers_of_any_kind_are_the_numbers_they_are(kind, tmp_path):
    x = (np.arange(60) % 2).reshape(12, 5).astype(kind)
    y, client = arrays()["y"], arrays()["client"]
    whole = npz(str(packed(tmp_path / "d.npz", x=npy(x), y=npy(y.astype(kind)), client=npy(client.astype(">i2")))))
    assert torch.equal(whole.train.x, torch.from_numpy(x.astype(np.float32)))
    assert whole.train.y[:, 0].tolist() == y.tolist()
    assert [part.tolist() for part in whole.train.parts] == [list(range(n, n + 4)) for n in (0, 4, 8)]


def test_more_than_memory_holds_is_told_before_it_is_read(tmp_path, monkeypatch):
    """A bomb: 4 MB of zeros in 4 kB, where 1 MB is free."""
    path = packed(tmp_path / "d.npz", x=npy(np.zeros((2**19, 1))))
    assert path.stat().st_size < 2**14
    monkeypatch.setattr(archive, "_room", lambda: 2**20)
    monkeypatch.setattr(np.lib.format, "read_array", lambda *ignored, **options: pytest.fail("it was read"))
    with pytest.raises(UserError, match=r"holds 0\.0 GB of arrays, but only 0\.0 GB of memory are free"):
        npz(str(path))


def test_free_memory_is_some_and_not_too_much():
    assert 2**20 < archive._room() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_two_arrays_of_one_name(tmp_path):
    path = packed(tmp_path / "d.npz")
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as file:
        file.writestr("x.npy", npy(X))
    with pytest.raises(UserError, match="two arrays of the same name"):
        npz(str(path))


def test_a_client_for_every_example_takes_no_longer_than_few(tmp_path):
    """By sorting: by looking through all examples for each client this would be ten thousand million comparisons."""
    count = 100_000
    numbers = np.random.default_rng(0).permutation(count)
    members = {"x": npy(np.zeros((count, 1), np.float32)), "y": npy(np.arange(count) % 2), "client": npy(numbers)}
    parts = npz(str(packed(tmp_path / "d.npz", **members))).train.parts
    assert len(parts) == count
    assert numbers[parts[777][0]] == 777
