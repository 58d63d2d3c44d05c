"""The server of a federation, and a site: one process each. systemd restarts them, or `fedxl deploy local` does.

The latter runs the whole federation on this machine, each party in its own process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from fedxl.deploy import Say, named
from fedxl.deploy.provision import keys
from fedxl.deploy.provision.approval import CERTIFICATE, FOLDER, REQUEST, Members
from fedxl.deploy.provision.connection import read_connection
from fedxl.deploy.provision.settings import ServerFile, read_server, read_site
from fedxl.deploy.storage import offer_turns, take_lock
from fedxl.errors import UserError, first_line, printable, require

REMINDER = 12 * 3600.0  # seconds
SERVER = ("the server", "renew it: fedxl deploy renew")  # whose certificate it is, and what to do if it expires
RENEW_SITE = "request a new one: fedxl deploy request"
POLL = 0.2
PATIENCE = 20.0  # seconds from SIGTERM to SIGKILL
PAUSE = (0.5, 30.0)  # seconds before a restart: the first, and the longest
STABLE = 60.0  # seconds after which a process counts as stable: earlier crashes no longer count
MAX_CRASHES = 10  # of one process in a row
USER_ERROR = 2  # exit code of a process that has said what its user must do


def serve(folder: Path, say: Say) -> ServerFile:
    """Run the server of a federation until its run has finished, from the last checkpoint if there is one."""
    folder = folder.resolve()
    os.umask(0o077)  # every file we write is readable by our user alone
    server = read_server(folder / "server.toml")
    connection = read_connection(folder)
    require_private(folder, folder / FOLDER)
    keys.check_dates(keys.read_certificate(folder / "server.crt"), *SERVER)
    # Loaded once the settings are known to be right: it takes seconds.
    from fedxl.deploy.server.serve import run
    from fedxl.deploy.transport.tls.hub import Hub, open_hub
    from fedxl.deploy.transport.tls.listener import listen

    say = named("server", say)
    with (
        only_process(folder),
        listen(connection.host, connection.port) as listening,
        open_hub(Hub(folder, server.settings.megabytes, say=say), listening) as hub,
    ):
        say(f"serving at {connection.host}:{connection.port} for {', '.join(server.settings.sites)}")
        with reminding(lambda: server_reminders(folder), say):
            run(server, hub, say)
    return server


def server_reminders(folder: Path) -> Iterator[str]:
    """Lines about certificates that expire soon, and about sites that are not approved or cannot be read."""
    yield from _expiring(keys.read_certificate(folder / "server.crt"), *SERVER)
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


def join(folder: Path, say: Say, done: Callable[[], bool] = lambda: False) -> None:
    """Run a site of a federation until it is stopped, or `done`."""
    from fedxl.deploy.transport.tls.site import work

    folder = folder.resolve()
    os.umask(0o077)
    name = read_site(folder / "site.toml").settings.name
    read_connection(folder)
    require_private(folder)
    file, own = folder / CERTIFICATE, (f"site {name}", RENEW_SITE)
    send = f"send {REQUEST} to the server's operator, then fedxl deploy accept {folder} CERTIFICATE"
    step = send if (folder / REQUEST).exists() else f"fedxl deploy request {folder}"
    require(file.exists(), f"{folder} has no certificate yet: {step}")
    certificate = keys.read_certificate(file)
    keys.check_dates(certificate, *own)
    owner = keys.common_name(certificate.subject)
    require(owner == name, f"site.toml names this site '{name}', but {CERTIFICATE} belongs to '{printable(owner)}'")
    say = named(f"site {name}", say)
    with only_process(folder):
        prepare(folder)
        with reminding(lambda: _expiring(keys.read_certificate(file), *own), say):
            work(folder, say, done)


def prepare(folder: Path) -> None:
    """Prepare a site's data if needed, in a process of its own, which frees its memory."""
    work = [sys.executable, "-m", "fedxl", "site", "prepare", str(folder), "--if-needed"]
    seen = sys.stderr.isatty()  # otherwise it may go to a file, and the last line to whoever runs this site
    told = subprocess.run(work, stderr=None if seen else subprocess.PIPE, text=True, preexec_fn=die_with_parent)
    print(told.stderr or "", end="", file=sys.stderr, flush=True)
    if told.returncode == USER_ERROR:
        sys.exit(USER_ERROR)  # it has said why
    lines = (told.stderr or "").strip().splitlines()
    why = "the reason stands above" if seen else lines[-1] if lines else "it said nothing; is there enough memory?"
    require(told.returncode == 0, f"the data were not prepared (code {told.returncode}): {why}")


def die_with_parent() -> None:
    """Called in a child before exec: it gets SIGTERM when its parent dies, even by kill -9 (Linux)."""
    set_parent_death_signal = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


@contextmanager
def reminding(lines: Callable[[], Iterable[str]], say: Say) -> Iterator[None]:
    """Print these lines now, and twice a day until exit."""
    done = threading.Event()

    def work() -> None:
        while True:
            try:
                for line in lines():
                    say(line)
            except (OSError, UserError) as error:  # a file that is just being replaced, for example
                say(first_line(error))
            if done.wait(REMINDER):
                return

    thread = threading.Thread(target=work, name="reminders", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def require_private(*folders: Path) -> None:
    """Refuse folders that others can write to, and keys that others can read: copying may have changed the modes."""
    for folder in folders:
        if folder.exists():
            found = folder.stat()
            ours = found.st_uid == os.geteuid() and not found.st_mode & 0o022
            require(ours, f"others can write to {folder}: chown it to this user, then chmod 700 {folder}")
        for key in folder.glob("*.key"):
            require(not key.stat().st_mode & 0o077, f"others can read {key}: chmod 600 {key}")


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Allow one server or site per folder: two would write the same state."""
    with (folder / ".lock").open("w") as lock:
        require(take_lock(lock), f"{folder} is already running; stop it first")
        yield


@dataclass
class Party:
    """The server or a site: a process that should be running."""

    name: str
    folder: Path
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    crashes: int = 0  # since it was last stable
    started: float = 0.0
    restart_at: float = 0.0

    @property
    def log(self) -> Path:
        return self.folder / "fedxl.log"

    def start(self, environment: dict[str, str]) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        self.started = time.monotonic()

    def keep_running(self, environment: dict[str, str], say: Say) -> bool:
        """Start or restart the process if needed. Returns whether it has finished its work."""
        if self.process is None:
            if time.monotonic() >= self.restart_at:
                self.start(environment)
            return False
        code = self.process.poll()
        if code == USER_ERROR:
            raise UserError(f"{self.name} stopped: {last_line(self.log)}")
        if code:
            self.process = None
            self.crashes = 1 if time.monotonic() - self.started > STABLE else self.crashes + 1
            many = f"{self.name} crashed {self.crashes} times, the last time with code {code}"
            require(self.crashes <= MAX_CRASHES, f"{many}: {last_line(self.log)}; see {self.log}")
            pause = min(PAUSE[0] * 2 ** (self.crashes - 1), PAUSE[1])
            self.restart_at = time.monotonic() + pause
            say(f"{self.name} crashed (code {code}); restarting it in {pause:g} s")
        return code == 0


def local(folder: Path, say: Say, watch: Callable[[Path], None] = lambda run: None) -> ServerFile:
    """Run the whole federation until its run has finished. Ends with the reason of a party that gives up."""
    folder = folder.resolve()
    server = read_server(folder / "server" / "server.toml")
    places = {"the server": ("serve", folder / "server")}
    places |= {f"site {name}": ("join", folder / "sites" / name) for name in server.settings.sites}
    for _, place in places.values():
        require(place.is_dir(), f"there is no folder {place}; `fedxl deploy init` creates it")
    environment = {**os.environ, **offer_turns(folder / "turns", os.cpu_count() or 1)}
    parties = [
        Party(name, place, [sys.executable, "-m", "fedxl", "deploy", role, str(place)])
        for name, (role, place) in places.items()
    ]
    with stopping(parties):
        while not parties[0].keep_running(environment, say):
            for site in parties[1:]:
                site.keep_running(environment, say)
            watch(server.out)
            time.sleep(POLL)
    watch(server.out)
    return server


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].removeprefix("fedxl: ") if lines else "its log is empty"


@contextmanager
def stopping(parties: Sequence[Party]) -> Iterator[None]:
    """On exit, however it comes about, stop all processes."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        # A second Ctrl-C must not interrupt the cleanup.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop([party.process for party in parties if party.process])
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM, wait, then SIGKILL."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
