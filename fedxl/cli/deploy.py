"""`fedxl deploy` and `fedxl site`: a federation of real machines."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from fedxl.config.experiment import read
from fedxl.errors import UserError
from fedxl.reporting.report import in_words
from fedxl.training.rundir import read_metrics

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
    keys_at_sites: Annotated[
        bool, typer.Option("--keys-at-sites", help="Each site makes its own key and asks for approval.")
    ] = False,
) -> None:
    """One folder for each party: certificates, settings, a start script and a page to read."""
    folders = _needing_flower("provision.folders")
    experiment = read(config) if config else folders.DEMO
    names = [name.strip() for name in sites.split(",") if name.strip()]
    folders.init(names, folder, host, port, experiment, keys_at_sites)
    _print(f"in {folder}: server/ and sites/, each with what it needs to start; authority/, to be kept offline")
    if keys_at_sites:
        _print(f"send sites/NAME to each site, which makes its key: fedxl deploy request NAME; then approve it here: "
               f"fedxl deploy approve {folder} REQUEST --examples N")  # fmt: skip
        return
    _print("all keys were made here, in one place: for a trial on this machine. For real sites use --keys-at-sites")
    _print(f"try it all on this machine: fedxl deploy local {folder}")


@deploy.command()
def request(folder: Folder) -> None:
    """At a site: make its key, which never leaves, and a request for a certificate."""
    file, fingerprint = _needing_flower("provision.approval").request(folder)
    _print(f"send {file} to the server's operator, and read this fingerprint to them over the telephone:")
    _print(fingerprint)
    _print(f"then put what they send back in its place: fedxl deploy accept {folder} CERTIFICATE")


@deploy.command()
def approve(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Where server/ and authority/ are.")],
    file: Annotated[Path, typer.Argument(metavar="REQUEST", help="What the site has sent.")],
    examples: Annotated[int, typer.Option(help="The most examples that the site may say it has.")],
    fingerprint: Annotated[str, typer.Option(help="As the site's people read it to you; asked for if missing.")] = "",
    authority: Annotated[Path | None, typer.Option(help="Its folder, if it is kept elsewhere.")] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="That the certificate is good for.")] = 365,
) -> None:
    """At the server: let a site in, by its key's fingerprint. A server that runs need not be restarted."""

    def agreed(name: str, shown: str) -> bool:
        if fingerprint:
            return re.sub(r"[\s:]", "", fingerprint).lower() == shown.replace(":", "")
        _print(f"the key of {name} has the fingerprint")
        _print(shown)
        return typer.confirm("Do the site's people read the same to you?")

    approval = _needing_flower("provision.approval")
    granted = approval.approve(folder, file, examples, agreed, authority, days)
    _print(f"approved; send {granted} to the site")


@deploy.command()
def accept(
    folder: Folder,
    certificate: Annotated[Path, typer.Argument(help="What the server's operator has sent back.")],
) -> None:
    """At a site: put its certificate in its place."""
    found = _needing_flower("provision.approval").accept(folder, certificate)
    _print(f"good until {found.not_valid_after_utc:%Y-%m-%d}; start with: fedxl deploy join {folder}")


@deploy.command()
def revoke(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Where server/ is.")],
    site: Annotated[str, typer.Argument(help="Its name.")],
) -> None:
    """At the server: take a site out, at once."""
    _needing_flower("provision.approval").revoke(folder, site)
    _print(f"{site} is no longer let in")


@deploy.command()
def renew(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Where server/ and authority/ are.")],
    authority: Annotated[Path | None, typer.Option(help="Its folder, if it is kept elsewhere.")] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="That the certificate is good for.")] = 365,
) -> None:
    """At the server: a new certificate for the server itself. Sites renew theirs by a new request."""
    found = _needing_flower("provision.approval").renew(folder, authority, days)
    _print(f"the server's certificate is good until {found.not_valid_after_utc:%Y-%m-%d}")


@deploy.command("list")
def list_(folder: Annotated[Path, typer.Argument(metavar="OUT", help="Where server/ is.")]) -> None:
    """At the server: the approved sites, their keys, and until when they are good."""
    for found in _needing_flower("provision.approval").approved(folder):
        _print(f"{found.site}: until {found.end:%Y-%m-%d}, up to {found.examples} examples, key {found.fingerprint}")


@deploy.command()
def digest(config: Annotated[Path, typer.Argument(help="An experiment, or a server.toml.")]) -> None:
    """The digest of an experiment, for sites that want to pin it in their site.toml."""
    from fedxl.config.experiment import SECTIONS, read_tables
    from fedxl.deploy.site.permission import digest as of

    _print(of(read_tables(config, (*SECTIONS, "server"))))


@deploy.command()
def serve(folder: Folder) -> None:
    """Run the server of a federation until its run is done."""
    processes = _needing_flower("supervise.processes")
    try:
        server = processes.serve(folder, _say)
    except KeyboardInterrupt:
        _say("stopped; started again, it goes on from its last checkpoint")
        sys.exit(130)
    _conclude(server.out)


@deploy.command()
def join(folder: Folder) -> None:
    """Keep a site in its federation until it is stopped."""
    processes = _needing_flower("supervise.processes")
    try:
        processes.join(folder, _say)
    except KeyboardInterrupt:
        _say("stopped")
        sys.exit(130)


@deploy.command()
def local(folder: Annotated[Path, typer.Argument(metavar="OUT", help="What `fedxl deploy init` has made.")]) -> None:
    """The whole federation on this machine, as separate processes over TLS: a rehearsal, or a demonstration."""
    processes = _needing_flower("supervise.processes")
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
    from fedxl.deploy.provision.settings import read_site
    from fedxl.deploy.site import cache

    file = read_site(folder / "site.toml")
    out.print(f"{cache.prepare(file)} examples ready in {file.cache}", highlight=False, soft_wrap=True)


def _needing_flower(name: str) -> ModuleType:
    """A module that needs what comes with Flower."""
    try:
        return import_module(f"fedxl.deploy.{name}")
    except ImportError as error:
        raise UserError(f"this needs Flower ({error.name} is missing): pip install 'fedxl[flower]'") from None


def _print(line: str) -> None:
    out.print(line, highlight=False, soft_wrap=True, markup=False)


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
