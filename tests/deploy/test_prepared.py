"""The process that prepares a site's data before its node starts: its reasons, and where it looks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedxl[flower]")

from fedxl import UserError
from fedxl.deploy.supervise.processes import prepared

OWN = """
import torch
from fedxl.data.examples import Splits
from fedxl.data.inputs import from_arrays

def load(wrong: bool = False) -> Splits:
    if wrong:
        raise ValueError("a mistake in somebody's code")
    return Splits(from_arrays([(torch.zeros(12, 3), torch.arange(12) % 2)]))
"""


def site(folder: Path, data: str) -> Path:
    folder.mkdir()
    (folder / "site.toml").write_text(f'[site]\nname = "north"\n[data]\n{data}\n')
    return folder


def test_a_mistake_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*nothing\.npz") as told:
        prepared(site(tmp_path / "north", 'name = "npz"\npath = "nothing.npz"'))
    assert not str(told.value).startswith("fedxl: ")


def test_a_data_set_of_ones_own_is_found_in_the_users_folder(tmp_path, monkeypatch):
    (tmp_path / "mydata.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert prepared(site(tmp_path / "north", 'name = "mydata:load"')) == "site north: 12 examples ready"


def test_a_crash_ends_the_site_and_is_not_repeated(tmp_path, monkeypatch, capfd):
    (tmp_path / "mydata.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"were not prepared \(code 1\)"):
        prepared(site(tmp_path / "north", 'name = "mydata:load"\nwrong = true'))
    assert capfd.readouterr().err.count("ValueError: a mistake in somebody's code") == 1
