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
from fedxl.data import DATASETS, published
from fedxl.data.check import Count, Findings, total
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
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(published.FILES)}.")],
    root: Annotated[Path, typer.Option(help="The folder to put it into; a config's data.root.")] = Path("data"),
) -> None:
    """Download a data set as its owners publish it; it is kept only if its checksum is right."""
    path = published.fetch(name, root)
    show(f"{path} is there, and its checksum is the published one")


@data.command()
def check(
    config: Annotated[Path, typer.Argument(help="An experiment, or a site's own site.toml.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: counts, problems, remarks, advice.")] = False,
) -> None:
    """Look at data before training: counts by site and split, gaps, copies; exit code 2 if it would be wrong."""
    from fedxl.config.experiment import check_config
    from fedxl.config.experiment import check_json as json_of

    advice = None
    if "site" in read_toml(config):
        from fedxl.deploy.provision.settings import read_site
        from fedxl.deploy.site.own_part import check_site

        require(not overrides, "--set is for experiments; change the settings in the site's own file")
        findings = check_site(read_site(config))
    else:
        findings, advice = check_config(configs.read(config, overrides or []))
    if as_json:
        print(json.dumps(json_of(findings, advice), indent=2))
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
        console.print("training on these data would be wrong", style="red", highlight=False)
    else:
        console.print("nothing here would make training wrong", style="green", highlight=False)


def _table(findings: Findings) -> Table:
    table = Table("site", box=None, header_style="bold", pad_edge=False)
    shown = [split for split in SPLITS if split == "train" or split in findings.held]
    for split in shown:
        table.add_column(split, justify="right")
        table.add_column("positive", justify="right")
    for at, name in enumerate(findings.names[:MOST_SITES]):
        cells = [_cells(findings.train[at])]
        cells += [_cells(by[at]) if (by := findings.held_by_site.get(split)) else ("", "") for split in shown[1:]]
        table.add_row(escape(printable(name, 40)), *(cell for pair in cells for cell in pair))
    left = len(findings.names) - MOST_SITES
    if left > 0:
        table.add_row(f"... and {left:,} more")
    totals = [_cells(total(findings.train)), *(_cells(findings.held[split]) for split in shown[1:])]
    table.add_row("all", *(cell for pair in totals for cell in pair), style="bold")
    return table


def _cells(count: Count) -> tuple[str, str]:
    return f"{count.examples:,}", f"{count.positives:,}"
