"""Where commands print, and options that several of them have."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

out, err = Console(), Console(stderr=True)
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; repeatable."),
]
