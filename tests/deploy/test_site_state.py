"""What a site keeps on its disk: for its user alone, and taken up only if it belongs to the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fedxl import UserError
from fedxl.deploy.site import cache, requests
from fedxl.deploy.storage import locked
from fedxl.training.run_writer import load_checkpoint, save_checkpoint
from tests.deploy.federated import site_file
from tests.deploy.test_sites import train_request

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: {**t, "states.0.u": t["states.0.u"][1:]}, "states.0.u is float64"),
        (lambda t: {**t, "more": torch.ones(1)}, "it holds more, which is unexpected"),
        (lambda t: {k: v for k, v in t.items() if k != "states.0.u"}, "it lacks states.0.u"),
    ],
    ids=["a shape", "a name too many", "a name too few"],
)
def test_a_whole_state_of_something_else_is_refused_in_one_line(tmp_path, change, reason):
    _, good = train_request(tmp_path)
    mine, base = site_file(tmp_path, 0), good.facts["base"]
    folder = mine.state / good.facts["run"]
    kept = load_checkpoint(folder, base)
    save_checkpoint(folder, base, change(dict(kept.tensors)), kept.info, keep=base + 1)
    with pytest.raises(UserError, match=reason) as refused:
        requests.train(mine, good)
    assert len(str(refused.value).splitlines()) == 1


def test_what_a_site_keeps_is_for_its_user_alone(tmp_path):
    old = os.umask(0o022)
    try:
        mine = site_file(tmp_path, 0, state="deep/state", cache="deep/cache")
        with locked(mine.state / "0123456789abcdef") as folder:
            save_checkpoint(folder, 1, {"w": torch.ones(1)}, {}, private=True)
        cache.prepare(mine)
    finally:
        os.umask(old)
    found = {path.relative_to(mine.folder): path for path in (mine.folder / "deep").rglob("*")}
    assert {path.name for path in found.values()} >= {
        ".lock",
        "round-00000001.safetensors",
        "train_x.npy",
        "data.json",
    }
    for name, path in {Path("deep"): mine.folder / "deep", **found}.items():
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), name


def test_a_cache_that_was_left_open_is_closed(tmp_path):
    """Unless others keep something in its folder: then its own files are."""
    mine = site_file(tmp_path, 0)
    cache.prepare(mine)
    for other in (False, True):
        mine.cache.chmod(0o755)
        (mine.cache / "train_x.npy").chmod(0o644)
        if other:
            (mine.cache / "notes.txt").write_text("ours")
        cache.refresh(mine)
        assert (mine.cache / "train_x.npy").stat().st_mode & 0o777 == 0o600
        assert mine.cache.stat().st_mode & 0o777 == (0o755 if other else 0o700)
