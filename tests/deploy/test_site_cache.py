"""A site's data: prepared once, opened from its cache, prepared anew when files change, and safe on a full disk."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedxl import UserError
from fedxl.config.experiment import Config, load_data
from fedxl.deploy.provision.settings import SiteFile, SiteSettings, read_site
from fedxl.deploy.site import cache, requests
from fedxl.training.run_writer import load_latest
from tests.deploy.federated import (
    DATA,
    InProcess,
    config,
    deployed,
    site_file,
)
from tests.deploy.test_sites import train_request

pytestmark = pytest.mark.usefixtures("impatient")


def count(site: SiteFile) -> int:
    cache.refresh(site)
    return cache.holding(site).count("all")


def test_what_a_site_knew_of_other_data_is_left_behind(tmp_path, monkeypatch):
    _, good = train_request(tmp_path)
    mine = site_file(tmp_path, 0)
    monkeypatch.setattr(cache, "identity", lambda site: "of others")
    assert "its data have changed since round" in requests.train(mine, good).facts["note"]


def test_a_site_opens_its_data_from_its_cache(tmp_path):
    mine = site_file(tmp_path, 2)
    cache.prepare(mine)
    first = cache.training_data(mine)
    assert len(first) == cache.holding(mine).count("all") > 0
    written = (mine.cache / "train_x.npy").stat().st_mtime_ns
    assert torch.equal(cache.training_data(mine).x, first.x)
    assert (mine.cache / "train_x.npy").stat().st_mtime_ns == written
    whole = load_data(Config(data=dict(DATA), risk={}, algorithm={}, run={})).validation
    each = [cache.examples(site_file(tmp_path, number), "validation") for number in range(4)]
    assert sum(len(part) for part in each) == len(whole), "parts of one data set share what is held back"
    assert torch.equal(each[2].x, whole.x[2::4])
    (mine.cache / "data.json").write_text("{")
    assert torch.equal(cache.training_data(mine).x, first.x)
    assert (mine.cache / "train_x.npy").stat().st_mtime_ns > written, "a damaged cache is written anew"
    with pytest.raises(UserError, match="part is 7, but the data have 4 client"):
        cache.training_data(replace(mine, settings=replace(mine.settings, part=7)))


def test_sites_and_server_draw_their_data_by_one_seed(tmp_path):
    folders = pytest.importorskip("fedxl.deploy.provision.folders", reason="needs fedxl[deploy]")
    experiment = config("fedxl2", seed=7)
    experiment = replace(experiment, data={"name": "digits", "clients": 4, "one_class": 1})
    folders.init(["a", "b", "c", "d"], tmp_path / "federation", config=experiment)
    mine = read_site(tmp_path / "federation" / "sites" / "b" / "site.toml")
    part = load_data(experiment).train.parts[1]
    assert torch.equal(cache.training_data(mine).x, load_data(experiment).train.x[torch.from_numpy(part)])


def test_other_files_are_prepared_anew_and_missing_ones_are_not(tmp_path):
    rng = np.random.default_rng(0)
    file = tmp_path / "mine.npz"

    def write(count: int) -> None:
        np.savez(file, x=rng.normal(size=(count, 3)), y=np.arange(count) % 2, client=np.zeros(count, int))

    write(10)
    mine = SiteFile(SiteSettings(name="a"), {"name": "npz", "path": str(file)}, tmp_path / "a")
    assert count(mine) == 10
    assert cache.examples(mine, "validation") is None
    write(12)
    assert len(cache.training_data(mine)) == 10, "not in the middle of a run"
    before = cache.identity(mine)
    assert count(mine) == 12, "but when the site starts or says hello"
    assert cache.identity(mine) != before
    file.unlink()
    assert count(mine) == 12, "what is prepared is enough"


def test_a_full_disk_at_a_site_loses_nothing_and_room_is_enough_to_go_on(tmp_path):
    """A real file system of two pages: the state after one round fits, the next one beside it does not."""
    carrier = InProcess(tmp_path)
    state = carrier.sites["100"].state
    state.mkdir(parents=True)
    if not mounted(state, "size=8k"):
        pytest.skip("needs the right to mount a small file system")
    try:
        found = deployed(tmp_path, config("fedxl2", cohort=0, rounds=2, eval_every=1), carrier, minimum=3)
        dropped = [entry for record in found.history for entry in record.get("dropped", [])]
        assert {entry["site"] for entry in dropped} == {"a"}
        assert all("No space left on device; earlier states are intact" in e["reason"] for e in dropped)
        [folder] = [place for place in state.iterdir() if place.is_dir()]
        kept, complaints = load_latest(folder)
        assert kept
        assert not complaints
        assert mounted(state, "remount,size=1m")
        longer = deployed(tmp_path, config("fedxl2", cohort=0, rounds=4, eval_every=1), carrier, minimum=3)
        assert not any(entry["round"] > 2 for record in longer.history for entry in record.get("dropped", []))
        asked = next(facts for node, facts in carrier.sent if node == "100" and facts.get("round") == 3)
        assert kept.path.name == f"round-{asked['base']:08d}.safetensors", "from the state that it had kept"
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)  # states read from it are still mapped


def mounted(place: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True).returncode == 0
