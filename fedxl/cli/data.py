"""`fedxl data`: list, download, check and prepare data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedxl.cli.advise import list_summaries
from fedxl.cli.output import Overrides, out, show, writing
from fedxl.config import experiment as configs
from fedxl.data import DATASETS
from fedxl.data.check import Findings
from fedxl.data.sets import download
from fedxl.errors import UserError, printable, require
from fedxl.files import write_atomically
from fedxl.toml import read as read_toml
from fedxl.training.advice import Advice

data = typer.Typer(no_args_is_help=True, help="List, download, check and prepare data sets.")


@data.command("list")
def datasets() -> None:
    """List the data sets (data.name in a config)."""
    list_summaries(DATASETS)


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(download.FILES)}.")],
    root: Annotated[Path, typer.Option(help="Folder to download into (data.root in a config).")] = Path("data"),
) -> None:
    """Download a data set from its publisher and verify its checksum."""
    path = download.fetch(name, root)
    show(f"downloaded {path}; checksum verified")


@data.command()
def check(
    config: Annotated[Path, typer.Argument(help="An experiment, or a site's own site.toml.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: counts, problems, remarks, advice.")] = False,
) -> None:
    """Check data before training: counts, missing values, duplicates. Exits with code 2 if it finds a problem."""
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
        _show(findings, advice)
    if findings.problems:
        raise typer.Exit(2)


@data.command()
def prepare(
    config: Annotated[Path, typer.Argument(help="A config whose [data] is a table of public rows.")],
    overrides: Overrides = None,
    target: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("preparation.json"),
) -> None:
    """Fit a table's preparation and write it: what private training on other rows of these columns needs."""
    require(not target.exists(), f"{target} exists already; choose another file")
    raw = configs.load_unfitted(configs.read(config, overrides or []))
    if raw is None:
        raise UserError(f"the [data] of {config} must be a table of numbers and categories, without a preparation")
    made = raw.fitted()
    with writing(target, "nothing was written"):
        write_atomically(target, made.to_text().encode())
    show(f"preparation of {len(made.columns):,} columns in {target}; name it in [data]: preparation = '{target}'")


MOST_SITES = 20  # rows of the table; with thousands of sites nobody would read them all
MOST_LINES = 50  # problems, or remarks


def _show(findings: Findings, advice: Advice | None) -> None:
    """A table of sites, then problems, remarks and advice."""
    if findings.names:
        out.print(_table(findings))
    for lines, style, word in ((findings.problems, "red", "problem"), (findings.remarks, "yellow", "remark")):
        more = [f"and {len(lines) - MOST_LINES:,} more of them"] if len(lines) > MOST_LINES else []
        for line in [*(printable(line, 1000) for line in lines[:MOST_LINES]), *more]:
            show(Text.assemble((f"{word}:", style), f" {line}"))
    if advice:
        show(str(advice))
    if findings.problems:
        show("Fix the problems above before training.", "red")
    else:
        show("No problems found.", "green")


def _table(findings: Findings) -> Table:
    names, rows = findings.site_table(MOST_SITES)
    table = Table(names[0], box=None, header_style="bold", pad_edge=False)
    for name in names[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(escape, row), style="bold" if row is rows[-1] else None)
    return table
