"""`fedxl data`: what there is to train on, how to get it here, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedxl.cli.advise import list_summaries
from fedxl.cli.output import Overrides, out, show
from fedxl.config import experiment as configs
from fedxl.data import DATASETS
from fedxl.data.check import Count, Findings, total
from fedxl.data.sets import download
from fedxl.errors import printable, require
from fedxl.toml import read as read_toml
from fedxl.training.advice import Advice

data = typer.Typer(no_args_is_help=True, help="Data sets: what there is, and how to get it here.")


@data.command("list")
def datasets() -> None:
    """What there is to train on, one line each."""
    list_summaries(DATASETS)


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(download.FILES)}.")],
    root: Annotated[Path, typer.Option(help="The folder to put it into; a config's data.root.")] = Path("data"),
) -> None:
    """Download a data set as its owners publish it; it is kept only if its checksum is right."""
    path = download.fetch(name, root)
    show(f"{path} is there, and its checksum is the published one")


@data.command()
def check(
    config: Annotated[Path, typer.Argument(help="An experiment, or a site's own site.toml.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: counts, problems, remarks, advice.")] = False,
) -> None:
    """Look at data before training: counts by site and split, gaps, copies; exit code 2 if it would be wrong."""
    advice = None
    if "site" in read_toml(config):
        from fedxl.deploy.provision.settings import read_site
        from fedxl.deploy.site.cache import check_site

        require(not overrides, "--set is for experiments; change the settings in the site's own file")
        findings = check_site(read_site(config))
    else:
        findings, advice = configs.check_config(configs.read(config, overrides or []))
    if as_json:
        print(json.dumps(configs.check_json(findings, advice), indent=2))
    else:
        print_findings(findings, advice, out)
    if findings.problems:
        raise typer.Exit(2)


MOST_SITES = 20  # rows of the table; with thousands of sites nobody would read them all
MOST_LINES = 50  # problems, or remarks
SPLITS = ("train", "validation", "test")


def print_findings(findings: Findings, advice: Advice | None, console: Console) -> None:
    """A table of sites, then problems, remarks and advice."""
    if findings.train:
        console.print(_table(findings))
    for lines, style, word in ((findings.problems, "red", "problem"), (findings.remarks, "yellow", "remark")):
        for line in lines[:MOST_LINES]:
            console.print(f"[{style}]{word}:[/] {escape(printable(line, 1000))}", highlight=False, soft_wrap=True)
        if len(lines) > MOST_LINES:
            console.print(f"[{style}]{word}:[/] and {len(lines) - MOST_LINES:,} more of them", highlight=False)
    if advice:
        console.print(escape(str(advice)), highlight=False, soft_wrap=True)
    if findings.problems:
        console.print("Training on these data would be wrong.", style="red", highlight=False)
    else:
        console.print("No problems found.", style="green", highlight=False)


def _table(findings: Findings) -> Table:
    table = Table("site", box=None, header_style="bold", pad_edge=False)
    shown = [split for split in SPLITS if split == "train" or split in findings.held]
    for split in shown:
        table.add_column(split, justify="right")
        table.add_column("positive", justify="right")
    for at, name in enumerate(findings.names[:MOST_SITES]):
        held = [by[at] if (by := findings.held_by_site.get(split)) else None for split in shown[1:]]
        table.add_row(escape(printable(name, 40)), *_cells(findings.train[at], *held))
    left = len(findings.names) - MOST_SITES
    if left > 0:
        table.add_row(f"... and {left:,} more")
    held_by_all = (findings.held[split] for split in shown[1:])
    table.add_row("all", *_cells(total(findings.train), *held_by_all), style="bold")
    return table


def _cells(*counts: Count | None) -> list[str]:
    """Examples and positives of each split, as far as they are known."""
    return [f"{number:,}" if each else "" for each in counts for number in each or ("", "")]
