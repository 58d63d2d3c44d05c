"""Things by name: those of fedxl's own tables, and "package.module:attribute" from a user's package."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedxl.errors import UserError, first_line, require, unknown


def find(
    kind: str,
    name: str,
    table: Mapping[str, Any],
    right: Callable[[Any], bool] = callable,
    wanted: str = "a function or a class",
) -> Any:
    """The thing of this name: a row of the table, or an attribute of a module of the user's own.

    kind: what it is, for messages ("risk", "data set"). right: whether an attribute can be such a thing; `wanted`
    says in words what would be. The current folder is importable meanwhile. An error that the user's module raises
    keeps its traceback. Mistakes in the name, and in the module's imports and syntax, are one line.

    >>> find("shape", "square", {"square": 4, "triangle": 3})
    4
    >>> find("shape", "squares", {"square": 4, "triangle": 3})
    Traceback (most recent call last):
    fedxl.errors.UserError: unknown shape 'squares'; did you mean 'square'?
    >>> find("function", "math:sqrt", {})(9)
    3.0
    """
    if not own(name):
        if name not in table:
            raise unknown(kind, name, table)
        return table[name]
    module, _, attribute = name.partition(":")
    told = f"cannot import the {kind} '{name}'"
    proper = all(part.isidentifier() for part in (*module.split("."), attribute))
    require(proper, f"{told}: a name of your own reads package.module:attribute")
    loaded = _imported(module, told)
    require(hasattr(loaded, attribute), f"{told}: the module '{module}' has no '{attribute}'")
    found = getattr(loaded, attribute)
    suits = right(found) and not (callable(found) and _unreadable(found))
    require(suits, f"'{name}' is of type {type(found).__name__}; a {kind} must be {wanted}")
    return found


def own(name: str) -> bool:
    """Whether a name is one of the user's own: "package.module:attribute"."""
    return ":" in name


def require_type(found: Any, wanted: type, name: str) -> None:
    """One line if what `name` was called for gave something else."""
    right = isinstance(found, wanted)
    require(right, f"'{name}' gave a {type(found).__name__}, not a {wanted.__module__}.{wanted.__qualname__}")


def _unreadable(function: Callable[..., Any]) -> bool:
    """Of some built-in functions Python does not know what they take."""
    try:
        inspect.signature(function)
    except (ValueError, TypeError):
        return True
    return False


def _imported(module: str, told: str) -> Any:
    with _current_folder_importable():
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and f"{module}.".startswith(f"{error.name}."):
                raise UserError(f"{told}: there is no module '{error.name}' here or among those installed") from None
            raise UserError(f"{told}: {_where(error)}{first_line(error)}") from error
        except (ImportError, SyntaxError) as error:
            raise UserError(f"{told}: {_where(error)}{first_line(error)}") from error


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    """As under `python -m`, so that a file in the current folder is found, also one written just now."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module may have changed the path itself
            sys.path.remove(folder)


def _where(error: BaseException) -> str:
    """The line of the user's module that failed; a syntax error says so itself."""
    if isinstance(error, SyntaxError):
        return ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    last = frames[-1] if frames else None
    return f"{last.filename}, line {last.lineno}: " if last and last.filename != __file__ else ""
