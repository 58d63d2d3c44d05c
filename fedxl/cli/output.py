"""Where commands print, and options that several of them have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from fedxl.errors import UserError

out, err = Console(), Console(stderr=True)
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; repeatable.")
]


def show(line: str | Text, style: str = "") -> None:
    """A line of a command's result."""
    out.print(line, style=style, highlight=False, soft_wrap=True, markup=False)


def say(line: str, style: str = "dim") -> None:
    """A line beside the result, on stderr."""
    err.print(line, style=style, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def interruptible(told: str) -> Iterator[None]:
    """Ctrl-C ends the command with this line, and the exit code that shells have for it."""
    try:
        yield
    except KeyboardInterrupt:
        say(told)
        sys.exit(130)


@contextmanager
def writing(folder: Path, kept: str) -> Iterator[None]:
    """A disk that is full or fails ends the command with one line, which says what is kept."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}; {kept}") from error


def tell(error: UserError) -> None:
    """Print an error for wrong input, in one line."""
    say(f"fedxl: {error}", "red")
