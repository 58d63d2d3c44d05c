"""Errors for wrong input, reported in one line. Any other exception is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

WORDS = 300  # characters of another party's text that we quote
LONGEST = 2000  # characters of an error message
# Settings, values of settings and risks that version 0.4 removed, each because it was measured to gain nothing, and
# what to use instead. docs/notes/removed.md has the measurements.
REMOVED = {
    **dict.fromkeys(("worst_site", "mix", "reach", "estimator", "correction"), "leave it out"),
    **dict.fromkeys(("top_form", "tau1", "tau2"), "top = k alone counts the first k places"),
    "cohort_weights": "leave it out",
    "one_class=centre": "use 'lend' or 'train'",
    **dict.fromkeys(("level=balanced", "level=bounded"), "use 'even'"),
    "aggregation=median": "use 'trimmed', which is never worse",
    "participation=cyclic": "use 'uniform'",
    "participation=reshuffled": "use 'uniform'",
    "cvar_tpauc": "use tpauc",
}
# What other libraries call our settings.
SYNONYMS = {"learning_rate": "lr", "epochs": "rounds", "num_rounds": "rounds"}


class UserError(ValueError):
    """What is wrong, where, and what would be right, in one line.

    It stays one line without control characters, whatever names and values it quotes.

    >>> print(UserError("unknown setting 'run.a\\nb\\x1b[2J'"))
    unknown setting 'run.a b [2J'
    """

    def __str__(self) -> str:
        text = " ".join("".join(c if c.isprintable() else " " for c in super().__str__()).split())
        return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class OwnersError(UserError):
    """A mistake whose details are for the owner of some data alone.

    >>> error = OwnersError("the label is 'relapse'", "the labels differ")
    >>> print(error, "|", for_others(error))
    the label is 'relapse' | the labels differ
    """

    def __init__(self, message: str, others: str) -> None:
        super().__init__(message)
        self.others = others  # what they are told


class DivergedError(UserError):
    """Weights or scores are no longer finite: the learning rate was too high."""


class RefusedError(ValueError):
    """Why we refuse a message from another party, in one line."""


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless the condition holds."""
    if not condition:
        raise UserError(message)


def refuse(condition: object, reason: str) -> None:
    """Raise `RefusedError(reason)` if the condition holds."""
    if condition:
        raise RefusedError(reason)


def for_others(error: Exception) -> str:
    """The line that another party may read."""
    return error.others if isinstance(error, OwnersError) else first_line(error)


def unknown(kind: str, name: str, known: Iterable[str], section: str = "") -> UserError:
    """The error for a name that is not in a table, with the one that others call so, or the closest one.

    The section is shown before the names but does not count for closeness.

    >>> str(unknown("setting", "widht", ["width", "norm"], "model."))
    "unknown setting 'model.widht'; did you mean 'model.width'?"
    >>> str(unknown("setting", "outputs", ["width", "norm"], "model."))
    "unknown setting 'model.outputs'; known: model.norm, model.width"
    """
    if name in REMOVED:
        return was_removed(section + name, REMOVED[name])
    names = sorted(known)
    near = [SYNONYMS[name]] if SYNONYMS.get(name) in names else difflib.get_close_matches(name, names, n=1)
    everything = ", ".join(section + other for other in names)
    hint = f"did you mean '{section}{near[0]}'?" if near else f"known: {everything}"
    return UserError(f"unknown {kind} '{section}{name}'; {hint}")


def require_known(kind: str, name: str, known: Iterable[str], section: str = "") -> None:
    """Raise the error for an unknown name unless it is in the table."""
    known = list(known)
    if name not in known:
        raise unknown(kind, name, known, section)


def was_removed(what: str, instead: str) -> UserError:
    """The error for something that an older version knew.

    >>> str(unknown("setting", "mix", ["lr"], "algorithm."))
    "'algorithm.mix' was removed in version 0.4, because it gained nothing: leave it out"
    """
    return UserError(f"'{what}' was removed in version 0.4, because it gained nothing: {instead}")


def kind_of(value: object) -> str:
    """What something is, for a message on what it should be.

    >>> kind_of(None), kind_of([]), kind_of(int)
    ('None', 'a list', 'the class int')
    >>> kind_of(3)
    'an int'
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if the message is empty."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def printable(text: object, most: int = WORDS) -> str:
    """Another party's text, safe for a log or a terminal: one line, no control characters, at most `most` long.

    Control characters, line breaks and direction overrides are escaped: they could forge log lines or control a
    terminal.

    >>> printable("done\\n\\x1b[2Jround 7: all is well")
    'done\\\\n\\\\x1b[2Jround 7: all is well'
    """
    escaped = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(text)[:most])
    return escaped[:most]
