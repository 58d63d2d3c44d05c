"""Labels as files have them: texts, numbers or booleans, of which one value counts as positive."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from fedxl.errors import printable, require

Value = str | int | float | bool
# What else Python takes for a number is a code: zeros in front are part of it, and underscores are.
NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)?(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
EXACT = 2**53  # beyond it, different whole numbers are one float
USUAL = {frozenset(("0", "1")): "1", frozenset(("-1", "1")): "1", frozenset(("false", "true")): "true"}


def canonical(value: object) -> str:
    """A value as text, the same however a file writes it. Codes stay as they are: "007" is not "7".

    >>> [canonical(value) for value in (1, "1.0", True, "TRUE", " sick ", "007")]
    ['1', '1', 'true', 'true', 'sick', '007']
    """
    text = str(value).strip()
    if text.lower() in ("true", "false"):
        return text.lower()
    if not NUMBER.fullmatch(text):
        return text
    try:
        number = float(text)
    except ValueError:  # "." and the like
        return text
    if not math.isfinite(number) or abs(number) >= EXACT:
        return text
    return str(int(number)) if number == int(number) else repr(number)


def two_values(found: Sequence[str], positive: Value | None, where: str) -> tuple[str, str]:
    """(positive, negative) among the different labels of some data; one line if that cannot be told."""
    names = ", ".join(f"'{printable(text, 40)}'" for text in sorted(found)[:5])
    told = f"{where} holds {names}" + (f" and {len(found) - 5} more values" if len(found) > 5 else "")
    require(len(found) == 2, f"{told}; a label has two values: keep two, or drop the other rows")
    one, other = sorted(found)
    if positive is None:
        usual = USUAL.get(frozenset(found))
        require(usual is not None, f"{told}; say which one is positive: positive = '{one}' or '{other}'")
        assert usual is not None
        return usual, one if usual == other else other
    wanted = canonical(positive)
    require(wanted in found, f"{told}, but positive is {printable(positive)!r}, which never occurs")
    return wanted, one if wanted == other else other
