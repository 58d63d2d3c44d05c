"""The address of a server: host and port of its gateway, and the socket behind it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fedxl.errors import UserError

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
