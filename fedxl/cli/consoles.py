"""Where commands print, and options that several of them have."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from fedxl.errors import UserError

out, err = Console(), Console(stderr=True)


def tell(error: UserError) -> None:
    """A user's mistake, in one line."""
    err.print(f"fedxl: {error}", style="red", highlight=False, soft_wrap=True, markup=False)


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; repeatable."),
]
