"""Mistakes of a user, told in one line; anything else that is raised is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """What is wrong, where, and what would be right, in one line."""


class DivergedError(UserError):
    """Weights or scores that are no longer finite: a rate that was too high."""


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless the condition holds."""
    if not condition:
        raise UserError(message)


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a table, with the nearest name that is.

    >>> str(unknown("setting", "model.widht", ["model.width", "model.norm"]))
    "unknown setting 'model.widht'; did you mean 'model.width'?"
    >>> str(unknown("setting", "model.outputs", ["model.width", "model.norm"]))
    "unknown setting 'model.outputs'; known: model.norm, model.width"
    """

    def told(name: str) -> str:
        """With their section before them all settings look alike."""
        return name.rpartition(".")[2] if kind == "setting" else name

    names = {told(other): other for other in sorted(known)}
    near = difflib.get_close_matches(told(name), names, n=1)
    hint = f"did you mean '{names[near[0]]}'?" if near else f"known: {', '.join(names.values())}"
    return UserError(f"unknown {kind} '{name}'; {hint}")


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind if it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
