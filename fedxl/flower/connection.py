"""Where a server is: the host and the port of its gateway, and the socket behind it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fedxl.errors import UserError

HOME_FOLDER = "flower"  # of a party: its socket and its logs; all of its processes have it in their environment
LINK = Path(HOME_FOLDER) / "link.sock"  # SuperLink's, in the server's folder, which only its owner can enter


def read_connection(folder: Path) -> tuple[str, int]:
    """Where the server is: the host as sites know it, and the port."""
    path = folder / "connection.toml"
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text())
        return str(table["host"]), int(table["port"])
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; `fedxl deploy init` makes it") from None
    except (OSError, tomllib.TOMLDecodeError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
