"""Calls a function with a user's options, after checking their names and types against its signature."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from fedxl.errors import REMOVED, UserError, kind_of, unknown, was_removed

R = TypeVar("R")
EXAMPLES = {"XRisk": "fedxl.partial_auc()"}  # of a type's objects, where they are not made by its name


def call(fn: Callable[..., R], options: Mapping[str, Any], where: str, ours: Mapping[str, Any] | None = None) -> R:
    """`fn(**options, **ours)`, if every option is known and has the right type. Users cannot set what is in `ours`.

    A parameter may stand for a group of options, so that functions can share them: if its default is a dataclass,
    the options are the fields of that; if it is a dataclass field with "options" in its metadata, which names a
    function as "module:name", they are the parameters of that function, which builds the value.

    >>> def power(base: float, times: int = 2) -> float:
    ...     return base**times
    >>> call(power, {"base": 3}, "maths")
    9.0
    >>> call(power, {"base": 3, "tmies": 4}, "maths")
    Traceback (most recent call last):
    fedxl.errors.UserError: unknown setting 'maths.tmies'; did you mean 'maths.times'?
    """
    parameters = inspect.signature(fn).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    given: dict[str, Any] = dict(ours or {})
    known = {name: hint for name, hint in accepted(fn).items() if name not in given}
    for name, value in options.items():
        if name not in known and (name in given or not takes_any):
            raise unknown("setting", name, known, section=f"{where}.")
        given[name] = convert(value, known.get(name, Any), f"{where}.{name}")
    for name in known:
        if name in parameters and parameters[name].default is inspect.Parameter.empty and name not in given:
            raise UserError(f"the setting '{where}.{name}' is missing")
    try:
        for name, group in groups_of(fn).items():
            inner = {option: given.pop(option) for option in group.hints if option in given}
            if inner:
                given[name] = group.build(**inner)
        return fn(**given)
    except UserError as error:
        raise UserError(f"[{where}] {error}") from None


def require_types(fn: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises UserError if one of these arguments is a text where a number should be, and the like.

    Only plain types are checked (numbers, texts, booleans, choices, lists of them), and groups of options.

    >>> def power(base: float, times: int = 2) -> float: ...
    >>> require_types(power, {"base": "3"})
    Traceback (most recent call last):
    fedxl.errors.UserError: 'power.base' must be a number, not '3'
    """
    try:
        hints = _hints(fn)
    except NameError:  # of an annotation that only type checkers can read
        return
    for name, value in given.items():
        hint = hints.get(name)
        each = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
        if each in (int, float, bool, str) or typing.get_origin(each) is typing.Literal:
            convert(value, hint, f"{fn.__name__}.{name}")
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type) and not isinstance(value, hint):
            such = EXAMPLES.get(hint.__name__, f"{hint.__name__}(...)")
            what = repr(value) if isinstance(value, str) else kind_of(value)
            kind = f"'{fn.__name__}.{name}' must be {_words(hint)}, such as {such}, not {what}"
            raise UserError(f"{kind}; fedxl.build takes settings by their flat names")


def accepted(fn: Callable[..., Any]) -> dict[str, Any]:
    """The options that a function takes by name, and their types.

    >>> def power(base: float, times: int = 2) -> float: ...
    >>> accepted(power)
    {'base': <class 'float'>, 'times': <class 'int'>}
    """
    hints = _hints(fn)
    groups = groups_of(fn)
    names: dict[str, Any] = {}
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for name, parameter in inspect.signature(fn).parameters.items():
        if name in groups:
            names |= groups[name].hints
        elif parameter.kind not in variadic:
            names[name] = hints.get(name, Any)
    return names


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    """Of a dataclass, its fields, those it inherits included; a partial or an object with __call__ has none."""
    try:
        return typing.get_type_hints(fn)
    except TypeError:
        return {}


class Group(typing.NamedTuple):
    """Options that together make one argument."""

    hints: dict[str, Any]  # the type of each option
    build: Callable[..., Any]
    defaults: dict[str, Any]
    source: Callable[..., Any]  # the function or the dataclass whose options these are


def groups_of(fn: Callable[..., Any]) -> dict[str, Group]:
    """The parameters that stand for a group of options."""
    found: dict[str, Group] = {}
    own = {field.name: field for field in dataclasses.fields(fn)} if dataclasses.is_dataclass(fn) else {}
    for name, parameter in inspect.signature(fn).parameters.items():
        default, source = parameter.default, own[name].metadata.get("options") if name in own else None
        if source:
            build = _load(source)
            parameters = inspect.signature(build).parameters
            defaults = {key: parameter.default for key, parameter in parameters.items()}
            hints = {key: hint for key, hint in _hints(build).items() if key in defaults}
            found[name] = Group(hints, build, defaults, build)
        elif dataclasses.is_dataclass(default) and not isinstance(default, type):
            hints = typing.get_type_hints(type(default))
            fields = [field.name for field in dataclasses.fields(default)]
            hints = {key: hints[key] for key in fields}
            defaults = {key: getattr(default, key) for key in fields}
            found[name] = Group(hints, functools.partial(dataclasses.replace, default), defaults, type(default))
    return found


def _load(source: str) -> Callable[..., Any]:
    module, _, name = source.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def defaults(fn: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of options, by their flat names."""
    found: dict[str, Any] = {}
    groups = groups_of(fn)
    for name, parameter in inspect.signature(fn).parameters.items():
        found |= groups[name].defaults if name in groups else {name: parameter.default}
    return {name: value for name, value in found.items() if value is not inspect.Parameter.empty}


def without_defaults(obj: Any) -> str:
    """A dataclass as the call that makes it, without the arguments that are defaults.

    >>> import fedxl
    >>> without_defaults(fedxl.LocalSGD(fedxl.auroc(), lr=0.5))
    'LocalSGD(risk=auroc(), lr=0.5)'
    """
    each = [(item, getattr(obj, item.name)) for item in dataclasses.fields(obj)]
    given = [f"{item.name}={value!r}" for item, value in each if value != item.default]
    return f"{type(obj).__name__}({', '.join(given)})"


def flatten(obj: Any) -> dict[str, Any]:
    """A dataclass as its options by their flat names. An argument that no option can describe keeps its own name.

    >>> import fedxl
    >>> flatten(fedxl.LocalSGD(lr=0.5))["weight_decay"]
    0.0
    """
    found: dict[str, Any] = {}
    groups = groups_of(type(obj))
    for field in dataclasses.fields(obj):
        value, describe = getattr(obj, field.name), field.metadata.get("describe")
        if describe:
            found |= {**groups[field.name].defaults, **_load(describe)(value)}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type) and field.name in groups:
            found |= {inner.name: getattr(value, inner.name) for inner in dataclasses.fields(value)}
        else:
            found[field.name] = value
    return found


def convert(value: Any, hint: Any, where: str) -> Any:
    """The value in the hinted type: integers become floats and lists become tuples; all else must have the type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    value = value.item() if isinstance(value, np.generic) else value
    if hint is Any:
        return value
    if origin is typing.Literal:
        if value not in args:
            removed = f"{where.rpartition('.')[2]}={value}"
            if removed in REMOVED:
                raise was_removed(f"{where} = {value!r}", REMOVED[removed])
            raise UserError(f"'{where}' must be one of {', '.join(map(repr, args))}, not {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        return value if value is None else _either(value, [a for a in args if a is not type(None)], hint, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(convert(item, args[0], where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = origin or hint
    if inspect.isclass(expected) and isinstance(value, expected) and not (hint is int and isinstance(value, bool)):
        return value
    raise UserError(f"'{where}' must be {_words(hint)}, not {value!r}")


def _either(value: Any, kinds: list[Any], hint: Any, where: str) -> Any:
    for kind in kinds:
        try:
            return convert(value, kind, where)
        except UserError:
            if len(kinds) == 1:
                raise
    raise UserError(f"'{where}' must be {_words(hint)}, not {value!r}")


def _words(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_words(kind) for kind in typing.get_args(hint) if kind is not type(None))
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
    if typing.get_origin(hint) is tuple:
        return f"a list, each item {_words(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is Callable:
        return "a function"
    if not inspect.isclass(hint) or hint in names:
        return names.get(hint, str(hint))
    return f"{'an' if hint.__name__[0] in 'AEIOUX' else 'a'} {hint.__name__}"
