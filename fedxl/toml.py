"""Files of settings: TOML, of what every setting of ours can be and every file of ours can hold."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

from fedxl.errors import UserError, require

Table = dict[str, Any]
WHOLE = 2**63  # TOML's own limit; Python has none
DEEPEST = 8  # tables and lists within each other


def read(path: Path) -> dict[str, Table]:
    """The sections of a file, plain values only; one line if it is not such a file."""
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except RecursionError:
        raise UserError(f"cannot read {path}: it nests too deep") from None
    except (ValueError, OSError) as error:  # numbers of thousands of digits are a ValueError of their own
        raise UserError(f"cannot read {path}: {error}") from None
    for name, table in tables.items():
        require(isinstance(table, dict), f"'{name}' must be a section, [{name}], with settings in it")
        require_plain(table, name)
    return tables


def parse_value(text: str) -> Any:
    """A value as TOML writes it; a bare word is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text.strip()


def require_plain(value: Any, where: str, depth: int = 0) -> None:
    """Dates and infinities are TOML, but no setting takes them and not every file we write could hold them."""
    require(depth <= DEEPEST, f"'{where}' nests too deep")
    if isinstance(value, dict):
        for key, item in value.items():
            require_plain(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, list):
        for item in value:
            require_plain(item, where, depth + 1)
    elif isinstance(value, int):
        # Not shown: Python refuses to write numbers that are too long.
        require(-WHOLE <= value < WHOLE, f"'{where}' must lie between -2^63 and 2^63 - 1")
    else:
        finite = not isinstance(value, float) or math.isfinite(value)
        require(isinstance(value, (str, float)) and finite, f"'{where}' cannot be {value}")
