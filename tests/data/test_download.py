"""Fetching: from a server on this machine, whole and checked or not at all."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedxl import UserError, progress
from fedxl.data import DATASETS
from fedxl.data.sets import download
from fedxl.data.sets.download import FILES, Published, fetch
from tests.cli.test_errors import command
from tests.conftest import seen_at_a_terminal

CONTENT = os.urandom(3_000_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *ignored: object) -> None: ...


@pytest.fixture
def served(tmp_path) -> Iterator[str]:
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "set.npz").write_bytes(CONTENT)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "www")))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_is_fetched_once(served, tmp_path):
    root = tmp_path / "new" / "data"
    files = {"set": Published(f"{served}/set.npz?download=1", MD5)}
    path = fetch("set", root, files)
    assert path == root / "set.npz"
    assert path.read_bytes() == CONTENT
    assert [path.name for path in root.iterdir()] == ["set.npz"]
    nowhere = {"set": Published("http://127.0.0.1:1/set.npz", MD5)}
    assert fetch("set", root, nowhere) == path, "what is there is not fetched again"
    path.write_bytes(b"mine")
    with pytest.raises(UserError, match="exists, but it is not the published file; remove it"):
        fetch("set", root, files)
    assert path.read_bytes() == b"mine"


def test_from_a_file(served, tmp_path):
    files = {"set": Published((tmp_path / "www" / "set.npz").as_uri(), MD5)}
    assert fetch("set", tmp_path / "data", files).read_bytes() == CONTENT


def test_what_fails_leaves_nothing_behind(served, tmp_path):
    failures = {
        f"{served}/other.npz": "cannot fetch .*other.npz into .*: .*[Nn]ot [Ff]ound",
        "http://127.0.0.1:1/set.npz": "cannot fetch .*refused",
        "file:///no/such/set.npz": "cannot fetch .*[Nn]o such file",
        f"{served}/set.npz": "has the md5 [0-9a-f]{32}, not the published 0000",
    }
    for url, expected in failures.items():
        with pytest.raises(UserError, match=expected) as failed:
            fetch("set", tmp_path / "data", {"set": Published(url, "0" * 32)})
        assert len(str(failed.value).splitlines()) == 1
        assert not list((tmp_path / "data").iterdir())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot fetch"):
        fetch("set", tmp_path / "file", {"set": Published(f"{served}/set.npz", MD5)})


def test_fetch_from_the_command_line(served, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(download, "FILES", {"cifar10": Published(f"{served}/set.npz", MD5)})
    arguments = ("data", "fetch", "cifar10", "--root", str(tmp_path / "data"))
    code, out, err = command(monkeypatch, capsys, *arguments)
    assert (code, err) == (0, ""), "no progress bar without a terminal"
    assert "checksum verified" in out
    for name, expected in (
        ("cifar1", "did you mean 'cifar10'?"),
        ("chexpert", "cannot be fetched by a program; ask for it at https://stanfordmlgroup.github.io/"),
        ("medmnist", "name one of MedMNIST's sets: pathmnist, chestmnist"),
    ):
        code, _, err = command(monkeypatch, capsys, "data", "fetch", name)
        assert (code, len(err.strip().splitlines())) == (2, 1)
        assert expected in err


def test_the_list_has_one_line_each(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "data", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(DATASETS)
    assert all(len(line.split()) > 3 for line in out.splitlines())


def test_what_is_offered_can_be_checked():
    assert FILES["cifar10"].md5 == "c32a1d4ab5d03f1284b67883e8d87530"
    assert FILES["cifar100"].md5 == "03b5dce01913d631647c71ecec9e9cb8"
    for name, file in FILES.items():
        assert len(bytes.fromhex(file.md5)) == 16
        assert file.url.startswith("https://")
        assert file.file in (f"{name}.npz", f"{name.replace('cifar', 'cifar-')}-binary.tar.gz")


def test_a_terminal_sees_a_progress_bar():
    script = "from fedxl.progress import progress\nwith progress('resizing', 3) as advance:\n  advance(3)"
    shown = seen_at_a_terminal([sys.executable, "-c", script])
    assert b"resizing" in shown
    assert b"3/3" in shown


def test_a_log_sees_lines_of_what_takes_long(monkeypatch, capsys):
    with progress.progress("resizing", 3) as advance:
        advance(2)
    assert capsys.readouterr().err == "", "over before a line was due"
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    with progress.progress("resizing", 3) as advance:
        advance(2)
        advance(1)
    with progress.progress("cifar.tar.gz", None, bytes=True) as advance:
        advance(1_234_567)
    assert capsys.readouterr().err.splitlines() == ["resizing 2 of 3, about 0 s left", "cifar.tar.gz 1.2 MB"]
