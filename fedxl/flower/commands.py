"""`fedxl deploy` and `fedxl site`: a federation of real machines."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from fedxl.config import read
from fedxl.errors import UserError
from fedxl.report import in_words
from fedxl.rundir import read_metrics

deploy = typer.Typer(no_args_is_help=True, help="A federation of real machines, over TLS, on Flower.")
site = typer.Typer(no_args_is_help=True, help="What a site does on its own.")
out, err = Console(), Console(stderr=True)
Folder = Annotated[Path, typer.Argument(help="The party's folder.")]


@deploy.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    sites: Annotated[str, typer.Option(help="Names, with commas between them.")],
    host: Annotated[str, typer.Option(help="The server's name or address, as sites know it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The one port that sites must reach.")] = 18000,
    config: Annotated[Path | None, typer.Option(help="The experiment; the demo's by default.")] = None,
) -> None:
    """One folder for each party: certificates, keys, settings, a start script and a page to read."""
    folders = _folders()
    experiment = read(config) if config else folders.DEMO
    folders.init([name.strip() for name in sites.split(",") if name.strip()], folder, host, port, experiment)
    line = f"in {folder}: server/ and sites/, each with what it needs to start; authority/, to be kept offline"
    out.print(line, highlight=False, soft_wrap=True)
    out.print(f"try it all on this machine: fedxl deploy local {folder}", soft_wrap=True)


@deploy.command()
def serve(folder: Folder) -> None:
    """Run the server of a federation until its run is done."""
    from fedxl.flower import processes

    try:
        server = processes.serve(folder, _say)
    except KeyboardInterrupt:
        _say("stopped; started again, it goes on from its last checkpoint")
        sys.exit(130)
    _conclude(server.out)


@deploy.command()
def join(folder: Folder) -> None:
    """Keep a site in its federation until it is stopped."""
    from fedxl.flower import processes

    try:
        processes.join(folder, _say)
    except KeyboardInterrupt:
        _say("stopped")
        sys.exit(130)


@deploy.command()
def local(folder: Annotated[Path, typer.Argument(metavar="OUT", help="What `fedxl deploy init` has made.")]) -> None:
    """The whole federation on this machine, as separate processes over TLS: a rehearsal, or a demonstration."""
    from fedxl.flower import processes

    seen = 0

    def watch(run: Path) -> None:
        nonlocal seen
        records = [record for record in read_metrics(run)[0] if "test" not in record]
        for record in records[seen:]:
            shown = in_words(record.get("validation") or {})
            out.print(f"round {record['round']}  {shown}", highlight=False, soft_wrap=True)
            for entry in record.get("dropped", []):
                line = f"  round {entry['round']}: nothing from {entry['site']}: {entry['reason']}"
                out.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)
        seen = len(records)

    out.print("starting the server and its sites, each a process of its own ...", highlight=False)
    try:
        server = processes.local(folder, _say, watch)
    except KeyboardInterrupt:
        _say("stopped, and everything that was started with it")
        sys.exit(130)
    _conclude(server.out)


@site.command()
def prepare(folder: Folder) -> None:
    """Read a site's data once, and keep them ready to be opened at once."""
    from fedxl.flower import cache
    from fedxl.flower.settings import read_site

    file = read_site(folder / "site.toml")
    out.print(f"{cache.prepare(file)} examples ready in {file.cache}", highlight=False, soft_wrap=True)


def _folders() -> ModuleType:
    try:
        from fedxl.flower import folders
    except ImportError:
        raise UserError("this needs Flower: pip install 'fedxl[flower]'") from None
    return folders


def _conclude(run: Path) -> None:
    records, _ = read_metrics(run)
    done = next((record for record in records if "test" in record), {})
    shown = in_words(done.get("test") or {})
    out.print(
        f"best round {done.get('best_round')}, test: {shown or 'no test data'}", highlight=False, soft_wrap=True
    )
    out.print(f"in {run}: model.safetensors, metrics.jsonl, checkpoints/", highlight=False, soft_wrap=True)


def _say(line: str) -> None:
    err.print(line, style="dim", highlight=False, soft_wrap=True, markup=False)
