"""How a site becomes a member: request, approve, accept, revoke and renew, as the commands do it."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from cryptography import x509
from typer.testing import CliRunner

from fedxl import UserError
from fedxl.cli.main import app
from fedxl.deploy.processes import server_reminders
from fedxl.deploy.provision import approval, folders, keys
from fedxl.deploy.provision.approval import Members
from tests.deploy.federated import config


class Said(NamedTuple):
    code: int
    out: str
    error: str


def run(*arguments: str | Path, said: str = "") -> Said:
    """A command of `fedxl deploy`, in this process."""
    found = CliRunner().invoke(app, ["deploy", *map(str, arguments)], input=said)
    mistaken = isinstance(found.exception, UserError)  # which `fedxl` itself turns into one line and code 2
    return Said(2 if mistaken else found.exit_code, found.stdout, str(found.exception or ""))


@pytest.fixture
def out(tmp_path) -> Path:
    folders.init(["north", "south"], tmp_path / "f", config=config("fedxl2"), keys_at_sites=True)
    return tmp_path / "f"


def test_the_whole_way_by_its_commands(out):
    """The site's folder is moved elsewhere first, as it would be: its key is never where the server is."""
    site = out.parent / "elsewhere"
    (out / "sites" / "north").rename(site)
    assert not list(out.rglob("site.key")), "nobody has made a key for a site"
    asked = run("request", site)
    words, shown = asked.out.splitlines()[1:3]
    assert stat.S_IMODE((site / "site.key").stat().st_mode) == 0o600
    early = run("join", site)
    assert (early.code, "has no certificate yet" in early.error) == (2, True)
    wrong = run("approve", out, site / "request.csr", "--examples", "500", "--fingerprint", "0000")
    assert (wrong.code, "the fingerprints differ" in wrong.error) == (2, True)
    no = run("approve", out, site / "request.csr", "--examples", "500", said="n\n")
    assert no.code == 2
    assert shown in no.out
    assert words in no.out
    half = run("approve", out, site / "request.csr", "--examples", "500", "--fingerprint", words[:23])
    assert half.code == 2
    assert not Members(out / "server").approved
    for said in (shown.upper().replace(":", " "), words.upper().replace("-", " ")):
        good = run("approve", out, site / "request.csr", "--examples", "500", "--fingerprint", said)
        assert good.code == 0, good.error
    assert run("accept", site, out / "approved" / "north.crt").code == 0
    listed = run("list", out).out
    assert "north" in listed
    assert "500" in listed
    assert shown in listed, "whole, to be compared"
    assert words in listed
    assert run("revoke", out, "north").code == 0
    assert "north" not in run("list", out).out
    wrong = run("list", out / "server")
    assert (wrong.code, "there is no server/ in" in wrong.error) == (2, True)
    again = run("revoke", out, "north")
    assert (again.code, "there is no approved site 'north'; approved: none" in again.error) == (2, True)


def agreed(name: str, shown: str) -> bool:
    return True


def member(out: Path, name: str = "north") -> Path:
    site = out / "sites" / name
    file, _ = approval.request(site)
    approval.accept(site, approval.approve(out, file, 500, agreed))
    return site


def test_a_renewal_keeps_the_key_and_replaces_the_certificate(out):
    site = member(out)
    key, old = (site / "site.key").read_bytes(), keys.read_certificate(site / "site.crt")
    member(out)
    new = keys.read_certificate(site / "site.crt")
    assert (site / "site.key").read_bytes() == key
    assert new.serial_number != old.serial_number
    [listed] = approval.approved(out)
    assert listed.end == new.not_valid_after_utc


def test_a_new_key_is_approved_beside_the_old_one_until_the_site_is_revoked(out):
    site = member(out)
    (site / "site.key").unlink()
    member(out)
    assert len({entry.fingerprint for entry in approval.approved(out)}) == 2
    approval.revoke(out, "north")
    assert approval.approved(out) == []


def spoilt(out: Path) -> dict[str, tuple[Path, str]]:
    """Requests that must not be signed, and why."""
    place = out.parent
    (place / "junk.csr").write_bytes(
        b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"
    )
    (place / "large.csr").write_bytes(bytes(10**6))
    (place / "stranger.csr").write_bytes(keys.signing_request("east", keys.new_key()))
    (place / "path.csr").write_bytes(keys.signing_request("../../north", keys.new_key()))
    weak = x509.CertificateSigningRequestBuilder().subject_name(keys._name("north"))
    key = keys.ec.generate_private_key(keys.ec.SECP256R1())
    request = weak.sign(key, keys.hashes.SHA256()).public_bytes(keys.Encoding.PEM)
    (place / "curve.csr").write_bytes(request)
    return {
        "junk": (place / "junk.csr", "is not a signing request"),
        "large": (place / "large.csr", "is too large"),
        "stranger": (place / "stranger.csr", "'east' is not among the sites"),
        "path": (place / "path.csr", "has no valid site name"),
        "curve": (place / "curve.csr", "not on the curve P-384"),
        "missing": (place / "missing.csr", "cannot read"),
    }


def test_requests_that_are_none_are_not_signed(out):
    for kind, (file, why) in spoilt(out).items():
        with pytest.raises(UserError, match=why):
            approval.approve(out, file, 500, agreed)
        assert not (out / "approved").exists(), kind
    file, _ = approval.request(out / "sites" / "north")
    with pytest.raises(UserError, match="examples must be positive"):
        approval.approve(out, file, 0, agreed)
    (out / "authority").rename(out.parent / "stick")
    with pytest.raises(UserError, match="name the authority's folder with --authority"):
        approval.approve(out, file, 500, agreed)
    assert approval.approve(out, file, 500, agreed, authority=out.parent / "stick").exists()


def test_a_site_takes_its_own_certificate_alone(out, tmp_path):
    north, south = member(out), member(out, "south")
    with pytest.raises(UserError, match="is not the certificate of north's key"):
        approval.accept(north, south / "site.crt")
    key = keys.read_key(north / "site.key")
    forged = keys.site_certificate("north", key.public_key(), keys.new_authority())
    (tmp_path / "forged.crt").write_bytes(keys.certificate_pem(forged))
    with pytest.raises(UserError, match="was not signed by this federation's authority"):
        approval.accept(north, tmp_path / "forged.crt")


def test_whoever_runs_out_is_told_in_time(out, monkeypatch):
    member(out)
    assert list(server_reminders(out / "server")) == ["not approved yet: south (fedxl deploy approve)"]
    member(out, "south")
    assert list(server_reminders(out / "server")) == []
    later = datetime.now(UTC) + timedelta(days=keys.DAYS - 10)

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return later

    monkeypatch.setattr(keys, "datetime", Clock)
    lines = list(server_reminders(out / "server"))
    assert len(lines) == 3
    assert "certificate of the server expires on" in lines[0]
    assert "in 9 day(s); renew it: fedxl deploy renew" in lines[0]
    assert "certificate of site north expires on" in lines[1]
    later += timedelta(days=20)
    assert all("expired on" in line for line in server_reminders(out / "server"))


def test_an_expired_certificate_ends_join_and_serve_in_one_line(out):
    site = member(out)
    issuer = approval.read_authority(out / "authority")
    for role, place, name, key in (
        ("join", site, "site", keys.read_key(site / "site.key")),
        ("serve", out / "server", "server", keys.read_key(out / "server" / "server.key")),
    ):
        ended = keys.site_certificate("north", key.public_key(), issuer, days=0)
        (place / f"{name}.crt").write_bytes(keys.certificate_pem(ended))
        found = run(role, place)
        assert found.code == 2
        assert "expired on" in found.error


@pytest.mark.parametrize(
    ("host", "port", "why"),
    [
        ("", 18000, "is not a host"),
        ("x" * 65, 18000, "is not a host"),
        ("bücher.example", 18000, "is not a host"),
        ("a b", 18000, "is not a host"),
        ("-a.example", 18000, "is not a host"),
        ("fl.example.org", -1, "between 1 and 65535"),
        ("fl.example.org", 99999, "between 1 and 65535"),
        ("fl.example.org", 0, "between 1 and 65535"),
    ],
)
def test_hosts_and_ports_that_are_none(tmp_path, host, port, why):
    with pytest.raises(UserError, match=why):
        folders.init(["a"], tmp_path / "f", host, port)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("host", ["fl.example.org", "10.0.0.7", "2001:db8::7", "localhost"])
def test_hosts_that_are_good(tmp_path, host):
    folders.init(["a"], tmp_path / "f", host)
    assert keys.read_certificate(tmp_path / "f" / "server" / "server.crt")


def test_a_site_that_says_it_is_another_does_not_start(out):
    north = member(out)
    file = north / "site.toml"
    file.write_text(file.read_text().replace('name = "north"', 'name = "south"'))
    found = run("join", north)
    assert (found.code, "but site.crt belongs to 'north'" in found.error) == (2, True)
