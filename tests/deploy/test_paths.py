"""Files that [data] names: the same ones whoever reads a party's settings, and wherever."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="needs fedxl[flower]")

from fedxl import UserError
from fedxl.cli.main import app
from fedxl.deploy.provision.settings import files_below, read_server, read_site
from fedxl.deploy.site import cache
from tests.data.tables import frame, write_sites

CONFIG = """[data]
name = "table"
path = "hospitals/*.csv"
label = "sick"
positive = "yes"
group = "patient"
[risk]
name = "auroc"
[algorithm]
name = "fedxl1"
"""


def command(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with a config that names tables relative to it, and with a name that a pattern would take apart."""
    place = tmp_path / "here [1]"
    write_sites(place / "hospitals", frame())
    (place / "table.toml").write_text(CONFIG)
    monkeypatch.chdir(place)
    return place


def test_a_trial_finds_the_files_that_training_found(place, tmp_path, monkeypatch):
    command("deploy", "init", "trial", "--sites", "a,b,c,d", "--config", "table.toml")
    monkeypatch.chdir(tmp_path)  # parties run in folders of their own
    site = read_site(place / "trial" / "sites" / "b" / "site.toml")
    assert cache.prepare(site) > 0
    assert site.data["path"] == read_server(place / "trial" / "server" / "server.toml").config.data["path"]
    assert "No problems found" in command("data", "check", str(site.folder / "site.toml"))


def test_folders_for_other_machines_name_no_folder_of_this_one(place):
    command("deploy", "init", "real", "--sites", "a,b", "--config", "table.toml", "--keys-at-sites")
    for file in ("server/server.toml", "sites/a/site.toml"):
        assert 'path = "hospitals/*.csv"' in (place / "real" / file).read_text()


def test_a_sites_own_files_are_found_from_anywhere(place):
    command("deploy", "init", "real", "--sites", "a,b", "--config", "table.toml", "--keys-at-sites")
    folder = place / "real" / "sites" / "a"
    (folder / "mine.csv").write_bytes((place / "hospitals" / "a.csv").read_bytes())
    (folder / "site.toml").write_text((folder / "site.toml").read_text().replace("hospitals/*.csv", "mine.csv"))
    checked = command("data", "check", str(folder / "site.toml"))
    assert "\na " in checked
    assert "examples ready" in command("site", "prepare", str(folder)).replace("\n", " ")


def test_files_that_a_data_set_looks_for_by_itself_are_found_from_anywhere(place, monkeypatch):
    """Published data sets look into the folder data: below where the user is, or below the site's own folder."""
    (place / "table.toml").write_text('[data]\nname = "cifar10"\n' + CONFIG[CONFIG.index("[risk]") :])
    command("deploy", "init", "trial", "--sites", "a,b", "--config", "table.toml")
    command("deploy", "init", "real", "--sites", "a,b", "--config", "table.toml", "--keys-at-sites")
    monkeypatch.chdir("/")
    for folder, root in (("trial", place / "data"), ("real", place / "real" / "sites" / "a" / "data")):
        site = read_site(place / folder / "sites" / "a" / "site.toml")
        assert cache.own_config(site).data["root"] == str(root)
        root.mkdir()
        (root / "cifar-10-batches-bin").mkdir()
        assert str(root) in cache._stamps(site), "so that new files are noticed"
        with pytest.raises(UserError, match="cifar-10") as told:
            cache.prepare(site)
        assert str(root) in str(told.value)


def test_only_files_of_our_own_data_sets_are_made_whole():
    found = files_below(Path("/x"), {"name": "table", "path": ["a.csv", "/b.csv"], "label": "a.csv", "cache": ""})
    assert found == {"name": "table", "path": ["/x/a.csv", "/b.csv"], "label": "a.csv", "cache": ""}
    assert files_below(Path("/x"), {"name": "own:load", "path": "s3://a"})["path"] == "s3://a"
