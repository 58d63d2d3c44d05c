"""The command line. Each command is a function of its own module, which is loaded when it is called."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedxl import __version__
from fedxl.cli.output import tell
from fedxl.errors import UserError

HELP = (
    "Train across data holders who cannot pool their data, for AUROC, partial AUC, time to event and other X-risks."
)
# Functions, and groups of commands. Most load torch, which takes a second; servers and sites must not wait for that.
COMMANDS: Mapping[str, str] = {
    "demo": "experiments:demo",
    "train": "train:train",
    "resume": "train:resume",
    "report": "report:report",
    "predict": "predict:predict",
    "export": "predict:export",
    "advise": "advise:advise",
    "watch": "report:watch",
    "tune": "experiments:tune",
    "algorithms": "advise:algorithms",
    "risks": "advise:risks",
    "metrics": "advise:metrics",
    "data": "data:data",
    "deploy": "deploy:deploy",
    "site": "deploy:site",
}
# Commands that this package had, and what does their work since.
MOVED = {
    "paper": "python -m studies paper",
    "theory": "python -m studies theory",
    "bench": "python -m benchmarks.step",
}


class Commands(TyperGroup):
    """The commands of `COMMANDS`, each loaded when it is looked up. The list of all of them loads none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.listing = False
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # names, which mistyped ones are compared with

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in MOVED:
            raise UserError(f"fedxl {cmd_name} is `{MOVED[cmd_name]}` in a checkout since version 0.4")
        if self.listing:
            return click.Command(cmd_name, help=_summary(COMMANDS[cmd_name]))
        return _loaded(COMMANDS[cmd_name], cmd_name) if cmd_name in COMMANDS else None

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False


def _summary(place: str) -> str:
    """What a command says of itself: the docstring of its function, or the help of its group, as the file has it."""
    module, _, attribute = place.partition(":")
    for node in ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == attribute:
            assert isinstance(node.value, ast.Call)
            given = {option.arg: option.value for option in node.value.keywords}
            return str(ast.literal_eval(given["help"]))
    raise LookupError(place)


@cache
def _loaded(place: str, name: str) -> click.Command:
    module, _, attribute = place.partition(":")
    found = getattr(import_module(f"fedxl.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        group = typer.main.get_group(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(found)
    return typer.main.get_command(alone)


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP)


def _version(asked: bool) -> None:
    if asked:
        print(f"fedxl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What all commands share."""


def main() -> None:
    """Run a command. Wrong input ends with one line and code 2; anything else is a bug and keeps its traceback."""
    try:
        app()
    except UserError as error:
        tell(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
