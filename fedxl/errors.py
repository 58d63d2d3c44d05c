"""Mistakes of a user, told in one line; anything else that is raised is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

WORDS = 300  # characters that are repeated of another party's text
LONGEST = 2000  # characters of a line that people are to read


class UserError(ValueError):
    """What is wrong, where, and what would be right, in one line.

    It stays one line, and does nothing to a terminal, whatever the names and values that it quotes hold.

    >>> print(UserError("unknown setting 'run.a\\nb\\x1b[2J'"))
    unknown setting 'run.a b [2J'
    """

    def __str__(self) -> str:
        text = " ".join("".join(c if c.isprintable() else " " for c in super().__str__()).split())
        return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


class DivergedError(UserError):
    """Weights or scores that are no longer finite: a learning rate that was too high."""


class RefusedError(ValueError):
    """Why a message from another party is not accepted, in one line."""


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless the condition holds."""
    if not condition:
        raise UserError(message)


def unknown(kind: str, name: str, known: Iterable[str], section: str = "") -> UserError:
    """The error for a name that is not in a table, with the nearest name that is.

    A section is shown before the names but not compared: with it all names look alike.

    >>> str(unknown("setting", "widht", ["width", "norm"], "model."))
    "unknown setting 'model.widht'; did you mean 'model.width'?"
    >>> str(unknown("setting", "outputs", ["width", "norm"], "model."))
    "unknown setting 'model.outputs'; known: model.norm, model.width"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    everything = ", ".join(section + other for other in names)
    hint = f"did you mean '{section}{near[0]}'?" if near else f"known: {everything}"
    return UserError(f"unknown {kind} '{section}{name}'; {hint}")


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind if it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def printable(text: object, most: int = WORDS) -> str:
    """Another party's words, safe for a log or a terminal: one line, no control characters, at most `most` long.

    Control characters, line breaks and direction overrides become escapes. They could forge log lines or drive a
    terminal.

    >>> printable("done\\n\\x1b[2Jround 7: all is well")
    'done\\\\n\\\\x1b[2Jround 7: all is well'
    """
    escaped = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(text)[:most])
    return escaped[:most]
