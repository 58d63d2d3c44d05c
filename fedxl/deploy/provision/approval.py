"""The approved sites, and how a site becomes one: it makes a key and a request, which the server's operator approves.

There is one file per approved site in the server's folder. Changes take effect at once, without a restart.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from fedxl.deploy.provision import keys
from fedxl.deploy.provision.connection import read_connection
from fedxl.deploy.provision.settings import read_server, read_site
from fedxl.errors import UserError, first_line, require
from fedxl.files import write_atomically

KEY, CERTIFICATE, REQUEST = "site.key", "site.crt", "request.csr"
FOLDER = "members"


@dataclass(frozen=True)
class Member:
    """A site that the server's operator has approved."""

    name: str
    examples: int  # the most that it may claim
    certificates: tuple[x509.Certificate, ...]  # several while a new one replaces an old one


class Members:
    """The approved sites in a server's folder."""

    def __init__(self, server: Path) -> None:
        self.folder = server / FOLDER
        self._seen: dict[Path, tuple[int, int]] | None = None
        self.approved: dict[str, Member] = {}
        self.by_key: dict[bytes, str] = {}  # the site that owns each public key
        self.problems: list[str] = []  # files that could not be read

    def refresh(self) -> bool:
        """Reload the files if any has changed. Returns whether one had. If it raises OSError, nothing has changed."""
        found: dict[Path, tuple[int, int]] = {}
        for path in self._files():
            with suppress(FileNotFoundError):  # revoked at this moment
                stat = path.stat()
                found[path] = (stat.st_mtime_ns, stat.st_size)
        if found == self._seen:
            return False
        before, self.approved, self.problems = self.approved, {}, []
        for path in list(found):
            try:
                self.approved[path.stem] = _read(path)
            except FileNotFoundError:  # revoked at this moment
                continue
            except OSError as error:  # the disk fails: what was read last counts until it can be read again
                del found[path]
                if path.stem in before:
                    self.approved[path.stem] = before[path.stem]
                self.problems.append(f"cannot read {path}: {first_line(error)}")
            except UserError as error:  # a site whose file makes no sense is refused; the others are not affected
                self.problems.append(str(error))
        self.by_key = {
            keys.public_pem(keys.public_key(certificate)): name
            for name, member in self.approved.items()
            for certificate in member.certificates
        }
        self._seen = found
        return True

    def _files(self) -> list[Path]:
        """Raises OSError if the folder cannot be listed: `glob` would find nothing, and drop all sites."""
        try:
            return sorted(path for path in self.folder.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            if self._seen:
                raise
            return []  # nobody was approved yet


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
    if not (folder / KEY).exists():
        write_atomically(folder / KEY, keys.private_pem(keys.new_key()), private=True)
    key = keys.read_key(folder / KEY)
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
    issuer = read_authority(authority or out / "authority")
    told = f"{name} is not approved: the fingerprints differ; have the site read its own again: fedxl deploy request"
    require(agreed(name, keys.fingerprint(key)), told)
    certificate = keys.site_certificate(name, key, issuer, days)
    place = out / "approved" / f"{name}.crt"
    place.parent.mkdir(exist_ok=True)
    write_atomically(place, keys.certificate_pem(certificate))
    _add(server, name, certificate, examples)
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
    """Remove a site's entry. From now on its keys are refused."""
    path = _path(_server(out), site)
    known = ", ".join(sorted(file.stem for file in path.parent.glob("*.json"))) or "none"
    require(path.exists(), f"there is no approved site '{site}'; approved: {known}")
    if _certificates(path).exists():
        shutil.rmtree(_certificates(path))
    path.unlink()
    (out / "approved" / f"{site}.crt").unlink(missing_ok=True)


def renew(out: Path, authority: Path | None = None, days: int = keys.DAYS) -> x509.Certificate:
    """Make a new certificate for the server's key. A running server uses it for new connections."""
    server = _server(out)
    issuer = read_authority(authority or out / "authority")
    key = keys.read_key(server / "server.key").public_key()
    certificate = keys.server_certificate(read_connection(server).host, key, issuer, days)
    write_atomically(server / "server.crt", keys.certificate_pem(certificate))
    return certificate


def approved(out: Path) -> list[ApprovedCertificate]:
    known = Members(_server(out))
    with _reading(known.folder):
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


def read_authority(folder: Path) -> keys.Authority:
    found = (folder / "ca.key").exists()
    require(found, f"there is no ca.key in {folder}; name the authority's folder with --authority")
    key, certificate = keys.read_key(folder / "ca.key"), keys.read_certificate(folder / "ca.crt")
    keys.check_dates(certificate, "the federation's authority", "a new federation needs a new one")
    return keys.Authority(key, certificate)


def _add(server: Path, name: str, certificate: x509.Certificate, examples: int) -> None:
    """Add a certificate to a site's entry. It replaces those of the same key; others stay valid until they expire."""
    path = _path(server, name)
    key = keys.public_key(certificate)
    with _reading(path):
        before = [
            each for each in (_read(path).certificates if path.exists() else ()) if keys.public_key(each) != key
        ]
    path.parent.mkdir(exist_ok=True)
    pems = [keys.certificate_pem(each).decode() for each in (*before, certificate)]
    write_atomically(path, json.dumps({"examples": examples, "certificates": pems}, indent=1).encode())
    _certificates(path).mkdir(mode=0o700, exist_ok=True)
    (_certificates(path) / certificate.fingerprint(hashes.SHA1()).hex()).touch()


def _certificates(path: Path) -> Path:
    """A file for each certificate of a site, with the name that nginx has for it: those who are let in by nginx."""
    return path.with_suffix("")


def _path(server: Path, name: str) -> Path:
    keys.require_site_name(name)
    return server / FOLDER / f"{name}.json"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _read(path: Path) -> Member:
    try:
        content = json.loads(path.read_text())
        examples = int(content["examples"])
        pems = [str(pem).encode() for pem in content["certificates"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}; approve the site again") from None
    return Member(path.stem, examples, tuple(keys.parse_certificate(pem, str(path)) for pem in pems))
