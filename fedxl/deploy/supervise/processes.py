"""Starts, supervises and stops the processes of a server, of a site, or of a whole federation on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cryptography import x509

from fedxl.deploy import Say
from fedxl.deploy.provision import keys
from fedxl.deploy.provision.connection import HOME_FOLDER, read_connection
from fedxl.deploy.provision.members import FOLDER, Members
from fedxl.deploy.provision.settings import ServerFile, read_server, read_site
from fedxl.deploy.storage import offer_turns, take_lock
from fedxl.deploy.supervise import status
from fedxl.deploy.supervise.children import HOME, die_with_parent, stopping_all
from fedxl.deploy.supervise.supervisor import USER_ERROR, Child, Supervisor, command, environment, last_line
from fedxl.errors import UserError, printable, require

POLL = 0.5
MAX_CRASHES = 10  # of a server's app without a new checkpoint in between, then it gives up
RENEW_SERVER = "renew it: fedxl deploy renew"
RENEW_SITE = "request a new one: fedxl deploy request"


def serve(folder: Path, say: Say) -> ServerFile:
    """Run the server of a federation until its run has finished. Restarts processes that crash."""
    folder = folder.resolve()
    server = read_server(folder / "server.toml")
    host, port = read_connection(folder)
    require_private(folder, folder / FOLDER)
    keys.check_dates(keys.read_certificate(folder / "server.crt"), "the server", RENEW_SERVER)
    home = private(folder / HOME_FOLDER)
    status.forget(folder)
    children = [
        Child("superlink", command("superlink", folder), home),
        Child("gateway", command("gateway", folder, f"{server.settings.megabytes:g}"), home),
        Child("app", command("app", folder), home, needs="superlink", main=True, shown=True),
    ]

    def progress() -> object:
        return sorted(path.name for path in (server.out / "checkpoints").glob("round-*"))

    with locked(home), stopping_all([home]) as started:
        say(f"serving at {host}:{port} for {', '.join(server.settings.sites)}; logs are in {home}")
        remind = partial(server_reminders, folder)
        Supervisor(children, environment(home, HOME), say, progress, remind, MAX_CRASHES).run(started)
    return server


def server_reminders(folder: Path) -> Iterator[str]:
    """Lines about certificates that expire soon, and about sites that are not approved or cannot be read."""
    yield from _expiring(keys.read_certificate(folder / "server.crt"), "the server", RENEW_SERVER)
    members = Members(folder)
    members.refresh()
    yield from members.problems
    missing = [name for name in read_server(folder / "server.toml").settings.sites if name not in members.approved]
    if missing:
        yield f"not approved yet: {', '.join(missing)} (fedxl deploy approve)"
    for member in members.approved.values():
        newest = max(member.certificates, key=lambda each: each.not_valid_after_utc)
        yield from _expiring(newest, f"site {member.name}", f"the site can {RENEW_SITE}")


def _expiring(certificate: x509.Certificate, whose: str, remedy: str) -> Iterator[str]:
    """A line if a certificate has expired or expires soon."""
    try:
        warning = keys.check_dates(certificate, whose, remedy)
    except UserError as error:
        warning = str(error)
    if warning:
        yield warning


def join(folder: Path, say: Say) -> None:
    """Run a site of a federation until it is stopped."""
    folder = folder.resolve()
    file = read_site(folder / "site.toml")
    read_connection(folder)
    certificate = folder / "site.crt"
    name = file.settings.name
    require_private(folder)
    requested = (folder / "request.csr").exists()
    send = f"send request.csr to the server's operator, then fedxl deploy accept {folder} CERTIFICATE"
    step = send if requested else f"fedxl deploy request {folder}"
    require(certificate.exists(), f"{folder} has no certificate yet: {step}")
    shown = keys.read_certificate(certificate)
    keys.check_dates(shown, f"site {name}", RENEW_SITE)
    owner = keys.common_name(shown.subject)
    require(owner == name, f"site.toml names this site '{name}', but site.crt belongs to '{printable(owner)}'")
    say(prepared(folder))
    home = private(folder / HOME_FOLDER)

    def remind() -> Iterator[str]:
        return _expiring(keys.read_certificate(certificate), f"site {name}", RENEW_SITE)

    with locked(home), stopping_all([home]) as started:
        node = Child("node", command("node", folder), home, shown=True)
        Supervisor([node], environment(home, HOME), say, remind=remind).run(started)


def prepared(folder: Path) -> str:
    """Prepare a site's data if needed, in a process of its own, which frees its memory. Returns its last line."""
    work = command("prepare", folder)
    done = subprocess.run(work, stdout=subprocess.PIPE, text=True, errors="replace", preexec_fn=die_with_parent)
    last = (done.stdout.strip().splitlines() or [""])[-1].removeprefix("fedxl: ")
    if done.returncode == USER_ERROR:
        raise UserError(last)
    require(done.returncode == 0, f"the data were not prepared (code {done.returncode}); the reason stands above")
    return last


def local(folder: Path, say: Say, watch: Callable[[Path], None] = lambda run: None) -> ServerFile:
    """Run the whole federation on this machine, each party in its own process, until the run has finished."""
    folder = folder.resolve()
    server = read_server(folder / "server" / "server.toml")
    parties = [("serve", folder / "server"), *(("join", folder / "sites" / name) for name in server.settings.sites)]
    shared = {**os.environ, **offer_turns(folder / "turns", os.cpu_count() or 1)}
    with stopping_all([place / HOME_FOLDER for _, place in parties]) as started:
        for role, place in parties:
            require(place.is_dir(), f"there is no folder {place}; `fedxl deploy init` creates it")
            with (place / "fedxl.log").open("ab") as log:
                run = [sys.executable, "-m", "fedxl", "deploy", role, str(place)]
                started.append(subprocess.Popen(run, env=shared, stdout=log, stderr=log, preexec_fn=die_with_parent))
        main = started[0]
        while main.poll() is None:
            watch(server.out)
            time.sleep(POLL)
        watch(server.out)
        require(not main.returncode, f"the server stopped: {last_line(folder / 'server' / 'fedxl.log')}")
    return server


def require_private(*folders: Path) -> None:
    """Refuse folders that others can write to, and keys that others can read: copying may have changed the modes."""
    for folder in folders:
        if folder.exists():
            found = folder.stat()
            ours = found.st_uid == os.geteuid() and not found.st_mode & 0o022
            require(ours, f"others can write to {folder}: chown it to this user, then chmod 700 {folder}")
        for key in folder.glob("*.key"):
            require(not key.stat().st_mode & 0o077, f"others can read {key}: chmod 600 {key}")


def private(folder: Path) -> Path:
    """A folder that only its owner can enter."""
    folder.mkdir(exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    return folder


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Allow one server or site per folder: a second one would take over the socket, or the node, of the first."""
    with (home / ".lock").open("w") as lock:
        require(take_lock(lock), f"{home.parent} is already running; stop it first")
        yield
