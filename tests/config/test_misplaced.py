"""A setting in the wrong section: the one line names the right one."""

from __future__ import annotations

import pytest

from fedxl.config.experiment import read
from fedxl.errors import UserError

CONFIG = '[data]\nname = "digits"\n[risk]\nname = "pauc"\n[algorithm]\nname = "fedxl2"\n'


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("run.lr=0.1", "unknown setting 'run.lr'; lr belongs in [algorithm]"),
        ("algorithm.rounds=3", "unknown setting 'algorithm.rounds'; rounds belongs in [run]"),
        ("data.batch1=3", "unknown setting 'data.batch1'; batch1 belongs in [run]"),
        ("algorithm.hidden=[3]", "unknown setting 'algorithm.hidden'; hidden belongs in [model]"),
        ("run.lam=2", "unknown setting 'run.lam'; lam belongs in [risk]"),
        ("run.clients=3", "unknown setting 'run.clients'; clients belongs in [data]"),
    ],
)
def test_the_right_section_is_named(tmp_path, override, told):
    (tmp_path / "c.toml").write_text(CONFIG)
    with pytest.raises(UserError) as error:
        read(tmp_path / "c.toml", [override])
    assert str(error.value) == told


@pytest.mark.parametrize(
    "override", ["data.seed=3", "run.seed=3", "model.hidden=[3]", "data.name=mine:data", "run.x=1"]
)
def test_what_is_in_place_or_nowhere_else_is_left_to_others(tmp_path, override):
    (tmp_path / "c.toml").write_text(CONFIG)
    assert read(tmp_path / "c.toml", [override])


def test_a_setting_outside_of_all_sections_is_told(tmp_path):
    (tmp_path / "c.toml").write_text("lr = 0.1\n" + CONFIG)
    with pytest.raises(UserError, match=r"'lr' stands outside of any section; put it below one, such as \[run\]"):
        read(tmp_path / "c.toml")
