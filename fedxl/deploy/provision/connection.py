"""How sites reach a server: its address, and TLS 1.3. Both show a certificate of the federation's authority."""

from __future__ import annotations

import ssl
import tomllib
from dataclasses import dataclass
from pathlib import Path

from fedxl.errors import UserError, first_line
from fedxl.options import call

FILE = "connection.toml"


@dataclass(frozen=True)
class Connection:
    host: str  # as sites know the server
    port: int
    server_key: str = ""  # the fingerprint of the server's key, which a site requires; "": any from the authority


def read_connection(folder: Path) -> Connection:
    path = folder / FILE
    try:
        return call(Connection, tomllib.loads(path.read_text()), FILE)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; `fedxl deploy init` creates it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def tls_for_server(folder: Path) -> ssl.SSLContext:
    """TLS 1.3. Issues no session tickets, so that every connection shows its certificate."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, folder, "server")
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0
    return context


def tls_for_site(folder: Path) -> ssl.SSLContext:
    """Also checks the server's name or address, which is this protocol's default."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, folder, "site")


def _context(protocol: int, folder: Path, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    try:
        context.load_verify_locations(cafile=str(folder / "ca.crt"))
        context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"cannot use the certificates in {folder}: {first_line(error)}") from None
    return context
