"""Calling a function with a user's options: names and types are checked against its signature, one line if wrong."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np

from fedxl.errors import UserError, unknown

R = TypeVar("R")


def call(fn: Callable[..., R], options: Mapping[str, Any], where: str, trusted: Collection[str] = ()) -> R:
    """`fn(**options)`, once every option is known and of the right type. `trusted` names come from us, unchecked.

    >>> def power(base: float, times: int = 2) -> float:
    ...     return base**times
    >>> call(power, {"base": 3}, "maths")
    9.0
    >>> call(power, {"base": 3, "tmies": 4}, "maths")
    Traceback (most recent call last):
    fedxl.errors.UserError: unknown setting 'maths.tmies'; did you mean 'maths.times'?
    """
    signature = inspect.signature(fn)
    hints = typing.get_type_hints(fn)  # of a dataclass, its fields, those it inherits included
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    public = [name for name, kind in kinds.items() if name not in trusted and kind not in variadic]
    given: dict[str, Any] = {}
    for name, value in options.items():
        if name in trusted:
            given[name] = value
        elif name not in public and not takes_any:
            raise unknown("setting", f"{where}.{name}", [f"{where}.{known}" for known in public])
        else:
            given[name] = convert(value, hints.get(name, Any), f"{where}.{name}")
    for name in public:
        if signature.parameters[name].default is inspect.Parameter.empty and name not in given:
            raise UserError(f"the setting '{where}.{name}' is missing")
    try:
        return fn(**given)
    except UserError as error:
        raise UserError(f"[{where}] {error}") from None


def convert(value: Any, hint: Any, where: str) -> Any:
    """The value as the type that is hinted: whole numbers pass for floats, lists for tuples; nothing else is bent."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    value = value.item() if isinstance(value, np.generic) else value
    if hint is Any:
        return value
    if origin is typing.Literal:
        if value not in args:
            raise UserError(f"'{where}' must be one of {', '.join(map(repr, args))}, not {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        return value if value is None else convert(value, next(a for a in args if a is not type(None)), where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(convert(item, args[0], where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = origin or hint
    if inspect.isclass(expected) and isinstance(value, expected) and not (hint is int and isinstance(value, bool)):
        return value
    raise UserError(f"'{where}' must be {_words(hint)}, not {value!r}")


def _words(hint: Any) -> str:
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
    if typing.get_origin(hint) is tuple:
        return f"a list, each item {_words(typing.get_args(hint)[0])}"
    return names.get(hint, str(hint))
