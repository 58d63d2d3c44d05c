"""How a site becomes a member: it makes a key and a request, and the server's operator approves it by fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from fedxl.deploy.provision import keys, members
from fedxl.deploy.provision.connection import read_connection
from fedxl.deploy.provision.settings import read_server, read_site
from fedxl.errors import UserError, require
from fedxl.files import write_atomically

KEY, CERTIFICATE, REQUEST = "site.key", "site.crt", "request.csr"


class ApprovedCertificate(NamedTuple):
    """What `fedxl deploy list` shows of one certificate."""

    site: str
    fingerprint: str
    examples: int
    end: datetime


def request(folder: Path) -> tuple[Path, str]:
    """Make the site's key, if it has none, and a signing request. Returns its file and the key's fingerprint."""
    name = read_site(folder / "site.toml").settings.name
    keys.require_site_name(name)
    secret = folder / KEY
    if not secret.exists():
        keys.write_private(secret, keys.private_pem(keys.new_key()))
    key = keys.read_key(secret)
    write_atomically(folder / REQUEST, keys.signing_request(name, key))
    return folder / REQUEST, keys.fingerprint(key.public_key())


def approve(
    out: Path,
    file: Path,
    examples: int,
    agreed: Callable[[str, str], bool],
    authority: Path | None = None,
    days: int = keys.DAYS,
) -> Path:
    """Sign a site's request and admit the site, if `agreed` confirms its fingerprint. Returns the certificate."""
    server = _server(out)
    name, key = keys.read_request(file)
    sites = read_server(server / "server.toml").settings.sites
    require(name in sites, f"'{name}' is not among the sites in {server / 'server.toml'}: {', '.join(sites)}")
    require(examples > 0, f"examples must be positive, got {examples}")
    issuer_key, issuer = _authority(authority or out / "authority")
    told = f"{name} is not approved: the fingerprints differ; have the site read its own again: fedxl deploy request"
    require(agreed(name, keys.fingerprint(key)), told)
    certificate = keys.site_certificate(name, key, issuer_key, issuer, days)
    place = out / "approved" / f"{name}.crt"
    place.parent.mkdir(exist_ok=True)
    write_atomically(place, keys.certificate_pem(certificate))
    members.add(server, name, certificate, examples)
    return place


def accept(folder: Path, file: Path) -> x509.Certificate:
    """Install the certificate in the site's folder, if it belongs to this site."""
    certificate, key = keys.read_certificate(file), keys.read_key(folder / KEY)
    name = read_site(folder / "site.toml").settings.name
    mine = keys.public_key(certificate) == key.public_key() and keys.common_name(certificate.subject) == name
    require(mine, f"{file} is not the certificate of {name}'s key in {folder}")
    authority = keys.read_certificate(folder / "ca.crt")
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # of several kinds: a wrong signature, another issuer
        other = f"{file} was not signed by this federation's authority"
        raise UserError(f"{other}, {keys.common_name(authority.subject)}") from None
    write_atomically(folder / CERTIFICATE, keys.certificate_pem(certificate))
    return certificate


def revoke(out: Path, site: str) -> None:
    members.remove(_server(out), site)
    (out / "approved" / f"{site}.crt").unlink(missing_ok=True)


def renew(out: Path, authority: Path | None = None, days: int = keys.DAYS) -> x509.Certificate:
    """Make a new certificate for the server's key. A running gateway uses it for new connections."""
    server = _server(out)
    issuer_key, issuer = _authority(authority or out / "authority")
    host, _ = read_connection(server)
    key = keys.read_key(server / "server.key").public_key()
    certificate = keys.server_certificate(key, issuer_key, issuer, server_hosts(host), days)
    write_atomically(server / "server.crt", keys.certificate_pem(certificate))
    return certificate


def approved(out: Path) -> list[ApprovedCertificate]:
    known = members.Members(_server(out))
    known.refresh()
    require(not known.problems, "; ".join(known.problems))
    return [
        ApprovedCertificate(name, keys.fingerprint(keys.public_key(each)), member.examples, each.not_valid_after_utc)
        for name, member in known.approved.items()
        for each in member.certificates
    ]


def _server(out: Path) -> Path:
    found = (out / "server" / "server.toml").exists()
    require(found, f"there is no server/ in {out}; name the folder that `fedxl deploy init` created")
    return out / "server"


def server_hosts(host: str) -> list[str]:
    return list(dict.fromkeys([host, "localhost", "127.0.0.1"]))


def _authority(folder: Path) -> tuple[keys.Key, x509.Certificate]:
    found = (folder / "ca.key").exists()
    require(found, f"there is no ca.key in {folder}; name the authority's folder with --authority")
    key, certificate = keys.read_key(folder / "ca.key"), keys.read_certificate(folder / "ca.crt")
    keys.check_dates(certificate, "the federation's authority", "a new federation needs a new one")
    return key, certificate
