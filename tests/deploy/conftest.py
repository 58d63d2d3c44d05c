"""A federation of two sites on disk, for tests of its transport."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("f") / "x"
    pytest.importorskip("cryptography", reason="needs fedxl[deploy]")
    from fedxl.deploy.provision import folders

    folders.init(["a", "b"], place)
    return place


@pytest.fixture
def out(federation, tmp_path) -> Path:
    """A copy, to spoil."""
    return Path(shutil.copytree(federation, tmp_path / "f"))
