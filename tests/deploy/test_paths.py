"""Files that [data] names: the same ones whoever reads a party's settings, and wherever."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from fedxl import UserError, __version__
from fedxl.cli.main import app
from fedxl.deploy.provision.folders import ENGINES
from fedxl.deploy.provision.settings import files_below, read_server, read_site
from fedxl.deploy.server.serve import serve
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
    assert cache.holding(site).count("all") > 0
    assert site.data["path"] == read_server(place / "trial" / "server" / "server.toml").config.data["path"]
    assert "No problems found" in command("data", "check", str(site.folder / "site.toml"))


def test_folders_for_other_machines_name_no_folder_of_this_one(place):
    command("deploy", "init", "real", "--sites", "a,b", "--config", "table.toml", "--keys-at-sites")
    for name in ("a", "b"):
        site = read_site(place / "real" / "sites" / name / "site.toml")
        assert site.data["path"] == str(site.folder / "change this")
        assert site.settings.part == 0, "each has a data set of its own"
        assert site.settings.evaluate == "none"
    assert not read_server(place / "real" / "server" / "server.toml").config.data


def test_readmes_name_what_parties_install(place):
    with (place / "table.toml").open("a") as file:
        file.write("dp_clip = 1.0\ndp_noise = 1.0\ndp_score_noise = 1.0\n")
    for number, engine in enumerate(ENGINES):
        out = f"real {number}"
        command(
            "deploy", "init", out, "--sites", "a", "--config", "table.toml", "--keys-at-sites", "--engine", engine
        )
        for party in ("server", "sites/a"):
            text = (place / out / party / "README.md").read_text()
            assert re.search(r"'fedxl\[(deploy|flower|nvflare),table,dp\]'", text)
            assert f"everywhere: {__version__}." in text
        assert "fedxl data check site.toml" in text
        assert "docs/" not in text, "an installation has none"
    assert "\n[data]\n" not in (place / "real 0" / "server" / "server.toml").read_text(), "it has no data"


def test_sites_get_the_given_preparation_of_an_experiment(place):
    (place / "pub").mkdir()
    text = CONFIG.replace("[risk]", 'preparation = "pub/preparation.json"\n[risk]')
    (place / "table.toml").write_text(text)
    real = ("deploy", "init", "real", "--sites", "a,b", "--config", "table.toml", "--keys-at-sites")
    done = CliRunner().invoke(app, real)
    assert "there is no file pub/preparation.json" in str(done.exception)
    (place / "pub" / "preparation.json").write_text("{}")
    command(*real)
    for name in ("a", "b"):
        site = read_site(place / "real" / "sites" / name / "site.toml")
        assert site.data["preparation"] == str(site.folder / "preparation.json")
        assert Path(site.data["preparation"]).read_text() == "{}"


def test_who_evaluates_is_said_and_can_be_chosen(place):
    real = ("--sites", "a,b", "--config", "table.toml", "--keys-at-sites")
    line = "no site discloses metrics yet; each may set evaluate in its site.toml"
    assert line in " ".join(command("deploy", "init", "one", *real).split())
    assert line in " ".join((place / "one" / "sites" / "a" / "README.md").read_text().split())
    assert line not in " ".join(command("deploy", "init", "two", *real, "--evaluate", "server").split())
    command("deploy", "init", "three", "--sites", "a,b", "--config", "table.toml", "--evaluate", "sites")
    found = [read_server(place / folder / "server" / "server.toml") for folder in ("one", "two", "three")]
    assert [each.settings.evaluate for each in found] == ["sites", "server", "sites"]
    assert [bool(each.config.data) for each in found] == [False, True, False]


def test_the_server_finds_its_own_files_and_misses_them_before_it_waits_for_sites(place, monkeypatch):
    real = ("--sites", "a,b", "--config", "table.toml", "--keys-at-sites", "--evaluate", "server")
    command("deploy", "init", "real", *real)
    monkeypatch.chdir("/")
    server = read_server(place / "real" / "server" / "server.toml")
    with pytest.raises(UserError, match="real/server/change this"):
        serve(server, None)  # no carrier is asked for any site


def test_a_sites_own_files_are_found_from_anywhere(place):
    command("deploy", "init", "real", "--sites", "a,b", "--config", "table.toml", "--keys-at-sites")
    folder = place / "real" / "sites" / "b"
    (folder / "mine.csv").write_bytes((place / "hospitals" / "a.csv").read_bytes())
    (folder / "site.toml").write_text((folder / "site.toml").read_text().replace("change this", "mine.csv", 1))
    checked = command("data", "check", str(folder / "site.toml"))
    assert "\nb " in checked
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
