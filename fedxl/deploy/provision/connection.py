"""How sites reach a server: its address, and TLS 1.3. Both show a certificate of the federation's authority."""

from __future__ import annotations

import ssl
import tomllib
from pathlib import Path
from typing import Any

from fedxl.errors import UserError, first_line

HOME_FOLDER = "flower"  # in a party's folder: its socket and logs; all of its processes have it in their environment
FILE = "connection.toml"
LINK = Path(HOME_FOLDER) / "link.sock"  # SuperLink's socket, in the server's folder, which only its owner can enter


def read_connection(folder: Path) -> tuple[str, int]:
    """The host as sites know it, and the port."""
    table = _table(folder)
    try:
        return str(table["host"]), int(table["port"])
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"cannot read {folder / FILE}: {error}") from None


def read_server_key(folder: Path) -> str:
    """The fingerprint of the server's key, which a site requires; "": any key that the authority has signed."""
    return str(_table(folder).get("server_key", ""))


def _table(folder: Path) -> dict[str, Any]:
    path = folder / FILE
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; `fedxl deploy init` creates it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def tls_for_server(folder: Path) -> ssl.SSLContext:
    """TLS 1.3 of the gateway. Issues no session tickets, so that every connection shows its certificate."""
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
