"""`fedxl deploy` and `fedxl site`: a federation of real machines."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from fedxl import toml
from fedxl.cli.output import interruptible, out, say, show
from fedxl.deploy.provision.settings import files_below
from fedxl.errors import UserError, require
from fedxl.reporting.text import evaluation_in_words
from fedxl.training.run_folder import read_run

deploy = typer.Typer(no_args_is_help=True, help="A federation of real machines, over TLS, on Flower.")
site = typer.Typer(no_args_is_help=True, help="What a site does on its own.")
Folder = Annotated[Path, typer.Argument(help="The party's folder.")]
ServerOut = Annotated[Path, typer.Argument(metavar="OUT", help="Where server/ is.")]
AuthorityOut = Annotated[Path, typer.Argument(metavar="OUT", help="Where server/ and authority/ are.")]
Authority = Annotated[Path | None, typer.Option(help="Its folder, if it is kept elsewhere.")]
Days = Annotated[int, typer.Option(min=1, max=3650, help="For which the certificate is valid.")]


@deploy.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    sites: Annotated[str, typer.Option(help="Names of the sites, separated by commas.")],
    host: Annotated[str, typer.Option(help="The server's name or address, as sites reach it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The only port that sites must reach.")] = 18000,
    config: Annotated[Path | None, typer.Option(help="The experiment; by default the demo's.")] = None,
    keys_at_sites: Annotated[
        bool, typer.Option("--keys-at-sites", help="Each site makes its own key and requests approval.")
    ] = False,
) -> None:
    """Create a folder for each party: certificates, settings, a start script and a README."""
    from fedxl.config.experiment import read, with_files

    folders = _needing_flower("provision.folders")
    experiment = read(config) if config else folders.DEMO
    if config and not keys_at_sites:  # all parties run on this machine, in folders of their own
        experiment = replace(experiment, data=files_below(Path.cwd(), with_files(experiment.data)))
    names = [name.strip() for name in sites.split(",") if name.strip()]
    folders.init(names, folder, host, port, experiment, keys_at_sites)
    show(f"created in {folder}: server/, sites/ and authority/ (keep authority/ offline)")
    if keys_at_sites:
        show("send sites/NAME to each site; the site makes its key: fedxl deploy request NAME")
        show(f"then approve its request here: fedxl deploy approve {folder} REQUEST --examples N")
        return
    show("all keys were made on this machine, which is for trials only. For real sites use --keys-at-sites")
    show(f"run the whole federation on this machine: fedxl deploy local {folder}")


@deploy.command()
def request(folder: Folder) -> None:
    """At a site: make its key, which never leaves the machine, and a request for a certificate."""
    file, fingerprint = _needing_flower("provision.approval").request(folder)
    show(f"send {file} to the server's operator, and read this fingerprint to them by telephone:")
    show(fingerprint)
    show(f"then install the certificate that they send back: fedxl deploy accept {folder} CERTIFICATE")


@deploy.command()
def approve(
    folder: AuthorityOut,
    file: Annotated[Path, typer.Argument(metavar="REQUEST", help="The request that the site has sent.")],
    examples: Annotated[int, typer.Option(help="The most examples that the site may claim.")],
    fingerprint: Annotated[
        str, typer.Option(help="As the site's staff read it to you; prompted for if missing.")
    ] = "",
    authority: Authority = None,
    days: Days = 365,
) -> None:
    """At the server: admit a site by its key's fingerprint. A running server need not be restarted."""

    def agreed(name: str, shown: str) -> bool:
        if fingerprint:
            return re.sub(r"[\s:]", "", fingerprint).lower() == shown.replace(":", "")
        show(f"the fingerprint of {name}'s key is")
        show(shown)
        return typer.confirm("Do the site's staff read the same fingerprint to you?")

    approval = _needing_flower("provision.approval")
    granted = approval.approve(folder, file, examples, agreed, authority, days)
    show(f"approved; send {granted} to the site")


@deploy.command()
def accept(
    folder: Folder,
    certificate: Annotated[Path, typer.Argument(help="The certificate that the server's operator has sent.")],
) -> None:
    """At a site: install its certificate."""
    found = _needing_flower("provision.approval").accept(folder, certificate)
    show(f"valid until {found.not_valid_after_utc:%Y-%m-%d}; start with: fedxl deploy join {folder}")


@deploy.command()
def revoke(folder: ServerOut, site: Annotated[str, typer.Argument(help="Its name.")]) -> None:
    """At the server: revoke a site, at once."""
    _needing_flower("provision.approval").revoke(folder, site)
    show(f"{site} is revoked")


@deploy.command()
def renew(folder: AuthorityOut, authority: Authority = None, days: Days = 365) -> None:
    """At the server: renew the server's own certificate. Sites renew theirs by a new request."""
    found = _needing_flower("provision.approval").renew(folder, authority, days)
    show(f"the server's certificate is valid until {found.not_valid_after_utc:%Y-%m-%d}")


@deploy.command("list")
def list_(folder: ServerOut) -> None:
    """At the server: list the approved sites, their keys, and until when these are valid."""
    for found in _needing_flower("provision.approval").approved(folder):
        show(f"{found.site}: until {found.end:%Y-%m-%d}, up to {found.examples} examples, key {found.fingerprint}")


@deploy.command()
def digest(config: Annotated[Path, typer.Argument(help="An experiment, or a server.toml.")]) -> None:
    """Print the digest of an experiment, for sites that want to pin it in their site.toml."""
    from fedxl.config.file import SECTIONS
    from fedxl.deploy.site.permission import digest as of

    show(of(toml.read(config, (*SECTIONS, "server"))))


@deploy.command()
def serve(folder: Folder) -> None:
    """Run the server of a federation until its run is done."""
    processes = _needing_flower("supervise.processes")
    with interruptible("stopped; started again, it resumes from its last checkpoint"):
        server = processes.serve(folder, say)
    _conclude(server.out)


@deploy.command()
def join(folder: Folder) -> None:
    """Run a site of a federation until it is stopped."""
    processes = _needing_flower("supervise.processes")
    with interruptible("stopped"):
        processes.join(folder, say)


@deploy.command()
def local(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder that `fedxl deploy init` created.")],
) -> None:
    """Run the whole federation on this machine, as separate processes over TLS: a rehearsal or a demonstration."""
    processes = _needing_flower("supervise.processes")
    seen = 0

    def watch(run: Path) -> None:
        nonlocal seen
        rows = read_run(run).rows
        for row in rows[seen:]:
            shown = evaluation_in_words(row, "validation")
            show(f"round {row['round']}  {shown}")
            for entry in row.get("dropped", []):
                line = f"  round {entry['round']}: nothing from {entry['site']}: {entry['reason']}"
                out.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)
        seen = len(rows)

    show("starting the server and its sites, each in its own process ...")
    with interruptible("stopped all processes"):
        server = processes.local(folder, say, watch)
    _conclude(server.out)


@site.command()
def prepare(folder: Folder) -> None:
    """Read a site's data once and cache them, so that they open at once."""
    from fedxl.deploy.provision.settings import read_site
    from fedxl.deploy.site import cache

    file = read_site(folder / "site.toml")
    show(f"{cache.prepare(file)} examples ready in {file.cache}")


def _needing_flower(name: str) -> ModuleType:
    """Import a module that needs Flower's dependencies."""
    runs = sys.platform == "linux" or not name.startswith("supervise")
    require(runs, "servers and sites run on Linux: they watch processes in /proc")
    try:
        return import_module(f"fedxl.deploy.{name}")
    except ImportError as error:
        raise UserError(f"this needs Flower ({error.name} is missing): pip install 'fedxl[flower]'") from None


def _conclude(run: Path) -> None:
    done = read_run(run).done or {}
    shown = evaluation_in_words(done, "test")
    show(f"best round {done.get('best_round')}, test: {shown or 'no test data'}")
    show(f"in {run}: model.safetensors, metrics.jsonl, checkpoints/")
