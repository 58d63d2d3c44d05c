"""`fedxl advise`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedxl.cli.consoles import Overrides
from fedxl.config import experiment as configs


def advise(
    config: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: facts, settings, lines and flags.")] = False,
) -> None:
    """Which algorithm, weighting, norm, local steps and rate fit the sites of a config, by their counts."""
    found = configs.advise(configs.read(config, overrides or []))
    print(json.dumps(found.as_json(), indent=2) if as_json else found)
