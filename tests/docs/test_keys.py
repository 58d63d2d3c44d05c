"""How real sites are approved: the commands in the table of docs/deployment.md, each where the table says."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from fedxl.cli.main import app
from tests.docs.pages import ROOT

AT_A_SITE = ("request", "accept")
LONG_LIVED = ("serve", "join", "fetch", "status")  # other tests run these


def arrive(place: Path, site: Path) -> None:
    """What people send each other: a folder, a request, a certificate."""
    sent = {
        site / "request.csr": place / "request.csr",
        place / "hospitals" / "approved" / "north.crt": site / "north.crt",
    }
    for file, there in sent.items():
        if file.exists():
            shutil.copy(file, there)
    if not site.exists() and (place / "hospitals").exists():
        shutil.copytree(place / "hospitals" / "sites" / "north", site)


def test_a_site_is_approved_listed_revoked_and_renewed(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "deployment.md").read_text()
    table = page.partition("## For real")[2].partition("\n\nA site's")[0]
    place, site, shown = tmp_path / "server", tmp_path / "north", {}
    place.mkdir()
    shutil.copy(ROOT / "examples" / "digits.toml", place / "experiment.toml")
    commands = [shlex.split(found) for found in re.findall(r"`fedxl deploy ([^`]+)`", table)]
    assert len(commands) > 8
    for verb, *words in commands:
        if verb in LONG_LIVED:
            continue
        monkeypatch.chdir(site if verb in AT_A_SITE else place)
        given = ["hospitals/authority" if word == "/media/stick/authority" else word for word in words]
        done = CliRunner().invoke(app, ["deploy", verb, *given], input="y\n", catch_exceptions=False)
        assert done.exit_code == 0, (verb, words, done.output)
        shown[verb] = done.output
        arrive(place, site)
    assert "up to 5000 examples" in shown["list"]
    assert shown["request"].splitlines()[1] in shown["list"], "the key that the site has read out"
    assert "north is revoked" in shown["revoke"]
