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
from fedxl.cli.output import interruptible, say, show, writing
from fedxl.deploy import named
from fedxl.deploy import say as log
from fedxl.deploy.provision.settings import files_below
from fedxl.errors import UserError, require
from fedxl.reporting.text import evaluation_in_words, sites_in_words
from fedxl.training.run_folder import read_run

deploy = typer.Typer(no_args_is_help=True, help="Set up and run a federation of real machines.")
site = typer.Typer(no_args_is_help=True, help="Commands for a site alone.")
Folder = Annotated[Path, typer.Argument(help="The party's folder.")]
ServerOut = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that holds server/.")]
AuthorityOut = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that holds server/ and authority/.")]
Authority = Annotated[Path | None, typer.Option(help="The authority's folder, if not in FOLDER.")]
Days = Annotated[int, typer.Option(min=1, max=3650, help="Days that the certificate is valid.")]


@deploy.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    sites: Annotated[str, typer.Option(help="Names of the sites, separated by commas.")],
    host: Annotated[str, typer.Option(help="The server's name or address, as sites reach it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The only port that sites must reach.")] = 18000,
    config: Annotated[Path | None, typer.Option(help="The experiment; by default the demo's.")] = None,
    keys_at_sites: Annotated[
        bool, typer.Option("--keys-at-sites", help="Let each site make its own key and request approval.")
    ] = False,
    engine: Annotated[str, typer.Option(help="Transport: tls (fedxl's own), flower or nvflare.")] = "tls",
    evaluate: Annotated[
        str,
        typer.Option(
            help="Who evaluates: server or sites. Default: sites if the data files are theirs, else server."
        ),
    ] = "",
) -> None:
    """Create a folder for each party: certificates, settings, a start script and a README."""
    from fedxl.config.experiment import read, with_files

    folders = _module("provision.folders")
    experiment = read(config) if config else folders.DEMO
    if config and not keys_at_sites:  # all parties run on this machine, in folders of their own
        experiment = replace(experiment, data=files_below(Path.cwd(), with_files(experiment.data)))
    names = [name.strip() for name in sites.split(",") if name.strip()]
    with writing(folder, "free some space, remove the folder and run it again"):
        lines = folders.init(names, folder, host, port, experiment, keys_at_sites, engine=engine, evaluate=evaluate)
    for line in lines:
        show(line)


@deploy.command()
def request(folder: Folder) -> None:
    """At a site: make its key, which never leaves the machine, and a request for a certificate."""
    file, fingerprint = _module("provision.approval").request(folder)
    show(f"send {file} to the server's operator, and read this fingerprint to them by telephone, as words or digits:")
    show(_both(fingerprint))
    show(f"then install the certificate that they send back: fedxl deploy accept {folder} CERTIFICATE")


@deploy.command()
def approve(
    folder: AuthorityOut,
    file: Annotated[Path, typer.Argument(metavar="REQUEST", help="The request that the site has sent.")],
    examples: Annotated[int, typer.Option(help="Most examples that the site may claim.")],
    fingerprint: Annotated[
        str,
        typer.Option(help="The fingerprint, words or digits, that the site's staff read to you. By default it asks."),
    ] = "",
    authority: Authority = None,
    days: Days = 365,
) -> None:
    """At the server: admit a site by its key's fingerprint. A running server need not be restarted."""

    def agreed(name: str, shown: str) -> bool:
        if fingerprint:
            return re.sub(r"[\s:-]", "", fingerprint).lower() in re.sub(r"[:-]", "", _both(shown)).split()
        show(f"the fingerprint of {name}'s key is")
        show(_both(shown))
        return typer.confirm("Do the site's staff read the same fingerprint to you?")

    approval = _module("provision.approval")
    granted = approval.approve(folder, file, examples, agreed, authority, days)
    show(f"approved; send {granted} to the site")


@deploy.command()
def accept(
    folder: Folder,
    certificate: Annotated[Path, typer.Argument(help="The certificate that the server's operator has sent.")],
) -> None:
    """At a site: install its certificate."""
    found = _module("provision.approval").accept(folder, certificate)
    show(f"valid until {found.not_valid_after_utc:%Y-%m-%d}; start with ./start.sh in {folder}")


@deploy.command()
def revoke(folder: ServerOut, site: Annotated[str, typer.Argument(help="The site's name.")]) -> None:
    """At the server: revoke a site, at once."""
    _module("provision.approval").revoke(folder, site)
    show(f"{site} is revoked")


@deploy.command()
def renew(folder: AuthorityOut, authority: Authority = None, days: Days = 365) -> None:
    """At the server: renew the server's own certificate. Sites renew theirs by a new request."""
    found = _module("provision.approval").renew(folder, authority, days)
    show(f"the server's certificate is valid until {found.not_valid_after_utc:%Y-%m-%d}")


@deploy.command("list")
def list_(folder: ServerOut) -> None:
    """At the server: list the approved sites, their keys and the keys' last days of validity."""
    for found in _module("provision.approval").approved(folder):
        key = _both(found.fingerprint).replace("\n", " ")
        show(f"{found.site}: until {found.end:%Y-%m-%d}, up to {found.examples} examples, key {key}")


@deploy.command()
def digest(config: Annotated[Path, typer.Argument(help="An experiment, or a server.toml.")]) -> None:
    """Print the digest of an experiment; sites may pin it in site.toml."""
    from fedxl.config.file import SECTIONS
    from fedxl.deploy.site.permission import digest as of

    show(of(toml.read(config, (*SECTIONS, "server"))))


@deploy.command()
def status(
    folder: ServerOut,
    port: Annotated[int, typer.Option(help="At 127.0.0.1; 0: any that is free.")] = 0,
) -> None:
    """At the server: show rounds, sites, metrics and refusals in a browser on this machine, until Ctrl-C."""
    from fedxl.reporting.status import Status

    with interruptible("stopped"), Status(folder, port) as page:
        show(f"open {page.address}")
        page.serve_forever()


@deploy.command()
def serve(folder: Folder) -> None:
    """Run the server of a federation until training ends."""
    processes = _module("processes")
    with interruptible("stopped; run the command again to resume from the last checkpoint"):
        server = processes.serve(folder, log)
    _conclude(server.out)


@deploy.command()
def join(folder: Folder) -> None:
    """Run a site of a federation until it is stopped."""
    processes = _module("processes")
    with interruptible("stopped"):
        processes.join(folder, log)


@deploy.command()
def fetch(folder: Folder) -> None:
    """At a site: get the final model into FOLDER/model, then stop."""
    processes, model = _module("processes"), folder / "model"
    arrived = (model / "model.json").exists
    with interruptible("stopped"):
        if not arrived():
            processes.join(folder, log, arrived)
    show(f"the model is in {model}: fedxl predict {model} FILE")


@deploy.command()
def local(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that `fedxl deploy init` created.")],
) -> None:
    """Run the whole federation on this machine, as separate processes over TLS: a rehearsal or a demonstration."""
    processes = _module("processes")
    seen, told = 0, set[tuple[str, str]]()

    def watch(run: Path) -> None:
        nonlocal seen
        rows = read_run(run).rows
        for row in rows[seen:]:
            shown = evaluation_in_words(row, "validation")
            show(f"round {row['round']}{sites_in_words(row)}  {shown}")
            for entry in row.get("dropped", []):
                if (entry["site"], entry["reason"]) in told:
                    continue
                told.add((entry["site"], entry["reason"]))
                show(f"  round {entry['round']}: nothing from {entry['site']}: {entry['reason']}", "yellow")
        seen = len(rows)

    show("starting the server and its sites, each in its own process ...")
    with interruptible("stopped all processes"):
        server = processes.local(folder, say, watch)
    _conclude(server.out)


@deploy.command()
def submit(
    folder: ServerOut,
    kit: Annotated[Path, typer.Option(help="Folder with the startup kit of FLARE's admin.")],
) -> None:
    """On NVIDIA FLARE: submit the job. If it ends early, submit it again from the last checkpoint."""
    job = _module("transport.nvflare.job")
    with interruptible("stopped; the job keeps running. Run the command again to follow it"):
        server = job.submit(folder, kit, named("job"))
    _conclude(server.out)


@site.command()
def prepare(
    folder: Folder,
    if_needed: Annotated[bool, typer.Option("--if-needed", help="Only if the data have changed.")] = False,
) -> None:
    """Prepare a site's data and cache them."""
    from fedxl.deploy.provision.settings import read_site
    from fedxl.deploy.site import cache

    file = read_site(folder / "site.toml")
    (cache.refresh if if_needed else cache.prepare)(file)
    show(f"site {file.settings.name}: {cache.holding(file).count('all')} examples ready in {file.cache}")


def _both(fingerprint: str) -> str:
    """A fingerprint as people compare it: as words or in hexadecimal digits."""
    return f"{_module('provision.keys').words(fingerprint)}\n{fingerprint}"


def _module(name: str) -> ModuleType:
    """A module of deployments, loaded when a command needs it."""
    runs = sys.platform == "linux" or name != "processes"
    require(runs, "servers and sites run on Linux")
    try:
        return import_module(f"fedxl.deploy.{name}")
    except ImportError as error:
        raise UserError(f"this needs {error.name}: pip install 'fedxl[deploy]'") from None


def _conclude(run: Path) -> None:
    done = read_run(run).done or {}
    shown = evaluation_in_words(done, "test")
    show(f"best round {done.get('best_round')}, test: {shown or 'no test data'}")
    show(f"in {run}: model.safetensors, metrics.jsonl, checkpoints/")
