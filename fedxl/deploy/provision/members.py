"""The approved sites: one file per site in the server's folder. Changes take effect at once, without a restart."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from fedxl.deploy.provision import keys
from fedxl.errors import UserError, require
from fedxl.files import write_atomically

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
        """Reload the files if any has changed. Returns whether one had."""
        found: dict[Path, tuple[int, int]] = {}
        for path in sorted(self.folder.glob("*.json")):
            with suppress(FileNotFoundError):  # revoked at this moment
                stat = path.stat()
                found[path] = (stat.st_mtime_ns, stat.st_size)
        if found == self._seen:
            return False
        self.approved, self.problems = {}, []
        for path in found:
            try:
                self.approved[path.stem] = _read(path)
            except FileNotFoundError:  # revoked at this moment
                continue
            except UserError as error:  # a site whose file cannot be read is refused; the others are not affected
                self.problems.append(str(error))
        self.by_key = {
            keys.public_pem(keys.public_key(certificate)): name
            for name, member in self.approved.items()
            for certificate in member.certificates
        }
        self._seen = found
        return True


def add(server: Path, name: str, certificate: x509.Certificate, examples: int) -> None:
    """Add a certificate to a site's entry. It replaces those of the same key; others stay valid until they expire."""
    path = _path(server, name)
    key = keys.public_key(certificate)
    before = [each for each in (_read(path).certificates if path.exists() else ()) if keys.public_key(each) != key]
    path.parent.mkdir(exist_ok=True)
    pems = [keys.certificate_pem(each).decode() for each in (*before, certificate)]
    write_atomically(path, json.dumps({"examples": examples, "certificates": pems}, indent=1).encode())


def remove(server: Path, name: str) -> None:
    """Remove a site's entry. From now on its keys are refused."""
    path = _path(server, name)
    known = ", ".join(sorted(file.stem for file in path.parent.glob("*.json"))) or "none"
    require(path.exists(), f"there is no approved site '{name}'; approved: {known}")
    path.unlink()


def _path(server: Path, name: str) -> Path:
    keys.require_site_name(name)
    return server / FOLDER / f"{name}.json"


def _read(path: Path) -> Member:
    try:
        content = json.loads(path.read_text())
        examples = int(content["examples"])
        pems = [str(pem).encode() for pem in content["certificates"]]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}; approve the site again") from None
    return Member(path.stem, examples, tuple(keys.parse_certificate(pem, str(path)) for pem in pems))
