"""Labels as files have them: texts, numbers or booleans, of which one value counts as positive."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedxl.errors import printable, require

Value = str | int | float | bool
USUAL = {frozenset(("0", "1")): "1", frozenset(("-1", "1")): "1", frozenset(("false", "true")): "true"}


def canonical(value: object) -> str:
    """A value as text, the same however a file writes it.

    >>> [canonical(value) for value in (1, "1.0", True, "TRUE", " sick ")]
    ['1', '1', 'true', 'true', 'sick']
    """
    text = str(value).strip()
    if text.lower() in ("true", "false"):
        return text.lower()
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if math.isfinite(number) and number == int(number) else repr(number)


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
