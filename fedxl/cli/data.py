"""`fedxl data`: what there is to train on, how to get it here, and what is wrong with it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated

import typer

from fedxl.cli import data_check
from fedxl.cli.consoles import Overrides, out
from fedxl.cli.known import listed
from fedxl.config import experiment as configs
from fedxl.data import DATASETS, published
from fedxl.errors import require
from fedxl.toml import read as read_toml
from fedxl.training.advice import Advice

data = typer.Typer(no_args_is_help=True, help="Data sets: what there is, and how to get it here.")


@data.command("list")
def datasets() -> None:
    """What there is to train on, one line each."""
    listed({name: (inspect.getdoc(load) or "").splitlines()[0] for name, load in DATASETS.items()})


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(published.FILES)}.")],
    root: Annotated[Path, typer.Option(help="The folder to put it into; a config's data.root.")] = Path("data"),
) -> None:
    """Download a data set as its owners publish it; it is kept only if its checksum is right."""
    path = published.fetch(name, root)
    out.print(f"{path} is there, and its checksum is the published one", highlight=False, soft_wrap=True)


@data.command()
def check(
    config: Annotated[Path, typer.Argument(help="An experiment, or a site's own site.toml.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: counts, problems, remarks, advice.")] = False,
) -> None:
    """Look at data before training: counts by site and split, gaps, copies; exit code 2 if it would be wrong."""
    from fedxl.config.check import as_json as json_of
    from fedxl.config.check import check_config

    advice: Advice | None = None
    if "site" in read_toml(config):
        from fedxl.deploy.provision.settings import read_site
        from fedxl.deploy.site.data_check import check_site

        require(not overrides, "--set is for experiments; change the settings in the site's own file")
        findings = check_site(read_site(config))
    else:
        findings, advice = check_config(configs.read(config, overrides or []))
    if as_json:
        print(json.dumps(json_of(findings, advice), indent=2))
    else:
        data_check.show(findings, advice, out)
    if findings.problems:
        raise typer.Exit(2)
