"""The process that prepares a site's data before the site connects: its reasons, and where it looks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from fedxl import UserError
from fedxl.deploy.processes import USER_ERROR, prepare

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


def test_a_mistake_is_one_line(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        prepare(site(tmp_path / "north", 'name = "npz"\npath = "nothing.npz"'))
    assert ended.value.code == USER_ERROR
    told = capfd.readouterr().err
    assert told.startswith("fedxl: ")
    assert "there is no file" in told
    assert told.count("\n") == 1


def test_a_data_set_of_ones_own_is_found_in_the_users_folder(tmp_path, monkeypatch, capfd):
    (tmp_path / "mydata.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    prepare(site(tmp_path / "north", 'name = "mydata:load"'))
    assert capfd.readouterr().out.startswith("site north: 12 examples ready")


def test_a_crash_ends_the_site_and_is_not_repeated(tmp_path, monkeypatch, capfd):
    (tmp_path / "mydata.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"were not prepared \(code 1\)"):
        prepare(site(tmp_path / "north", 'name = "mydata:load"\nwrong = true'))
    assert capfd.readouterr().err.count("ValueError: a mistake in somebody's code") == 1
