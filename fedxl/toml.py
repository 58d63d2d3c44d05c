"""Settings files in TOML, restricted to the values that our settings and our own files can hold."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedxl.errors import UserError, require, unknown

Table = dict[str, Any]
WHOLE = 2**63  # TOML's own limit; Python has none
DEEPEST = 8  # nested tables and lists


def read(path: Path, known: Collection[str] = ()) -> dict[str, Table]:
    """The sections of a file, with plain values only; if some are known, no others. Or a one-line error."""
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except RecursionError:
        raise UserError(f"cannot read {path}: it is nested too deeply") from None
    except (ValueError, OSError) as error:  # also raised for numbers of thousands of digits
        raise UserError(f"cannot read {path}: {error}") from None
    for name, table in tables.items():
        require(isinstance(table, dict), f"'{name}' stands outside of any section; put it below one, such as [run]")
        require_plain(table, name)
    for name in tables if known else ():
        if name not in known:
            raise unknown("section", name, known)
    return tables


def parse_value(text: str) -> Any:
    """A value in TOML syntax; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text.strip()


def require_plain(value: Any, where: str, depth: int = 0) -> None:
    """Refuse dates and infinities: no setting accepts them, and not every file that we write can hold them."""
    require(depth <= DEEPEST, f"'{where}' is nested too deeply")
    if isinstance(value, dict):
        for key, item in value.items():
            require_plain(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, list):
        for item in value:
            require_plain(item, where, depth + 1)
    elif isinstance(value, int):
        # The value is not shown: Python refuses to print integers that are too long.
        require(-WHOLE <= value < WHOLE, f"'{where}' must lie between -2^63 and 2^63 - 1")
    else:
        finite = not isinstance(value, float) or math.isfinite(value)
        require(isinstance(value, (str, float)) and finite, f"'{where}' cannot be {value}")
