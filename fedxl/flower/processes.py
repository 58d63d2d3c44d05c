"""Flower's processes, started, watched, started again and stopped: a server's, a site's, or all of them here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fedxl.checkpoint import write_atomically
from fedxl.errors import UserError, require
from fedxl.flower import cache, status, turns
from fedxl.flower.directory import KEYS
from fedxl.flower.family import HOME, die_with_parent, stopping_all
from fedxl.flower.settings import Server, read_server, read_site

Say = Callable[[str], None]
POLL = 0.5
RESTARTS = 10  # of a server's app that dies, then it is given up
NAME = "fedxl"  # of the connection in Flower's own files


def serve(folder: Path, say: Say) -> Server:
    """The server of a federation, until its run has finished; whatever dies meanwhile is started again."""
    folder = folder.resolve()
    server = read_server(folder / "server.toml")
    host, port = _connection(folder)
    status.forget(folder)
    environment = _flower_home(folder, port)
    with stopping_all([_home(folder)]) as started:
        link: subprocess.Popen[bytes] | None = None
        for restart in range(RESTARTS):
            if link is None or link.poll() is not None:
                link = _superlink(folder, host, port, environment, started)
                _register(folder, environment)
                say(f"listening at {host}:{port} for {', '.join(server.settings.sites)}")
            _flower(["run", "app", NAME, "--format", "json"], folder / "flower", environment)
            found = _watch(folder, link)
            if found and found.state == status.FINISHED:
                return server
            require(not found or found.state != status.FAILED, found.message if found else "")
            say(f"the server's process has died; starting it again ({restart + 1})")
    raise UserError(f"the server's process has died {RESTARTS} times; see {folder / 'flower' / 'superlink.log'}")


def join(folder: Path, say: Say) -> NoReturn:
    """A site of a federation, until it is stopped."""
    folder = folder.resolve()
    file = read_site(folder / "site.toml")
    host, port = _connection(folder)
    environment = _environment(folder)
    say(f"site {file.settings.name}: {cache.count(file)} examples ready")
    with stopping_all([_home(folder)]) as started:
        while True:
            with (folder / "flower.log").open("ab") as log:
                node = subprocess.Popen(
                    [
                        _command("flower-supernode"), "--superlink", f"{host}:{port}",
                        "--root-certificates", "ca.crt", "--auth-supernode-private-key", "node.key",
                        "--node-config", f'site="{folder / "site.toml"}"', "--port", str(free_port()),
                    ],
                    cwd=folder, env=environment, stdout=log, stderr=log, preexec_fn=die_with_parent,
                )  # fmt: skip
            started.append(node)
            say(f"site {file.settings.name}: connecting to {host}:{port}")
            node.wait()
            started.remove(node)
            # The server may be down, or still take us for connected, for up to a minute after a crash of ours.
            say(f"site {file.settings.name}: disconnected (details in flower.log); trying again")
            time.sleep(5)


def local(folder: Path, say: Say, watch: Callable[[Path], None] = lambda run: None) -> Server:
    """The whole federation on this machine, each party a process of its own, until the run has finished."""
    folder = folder.resolve()
    server = read_server(folder / "server" / "server.toml")
    parties = [("serve", folder / "server"), *(("join", folder / "sites" / name) for name in server.settings.sites)]
    environment = {**os.environ, **turns.offered(folder / "turns", os.cpu_count() or 1)}
    with stopping_all([_home(place) for _, place in parties]) as started:
        for role, place in parties:
            require(place.is_dir(), f"there is no folder {place}; `fedxl deploy init` makes it")
            with (place / "fedxl.log").open("ab") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "fedxl.cli", "deploy", role, str(place)],
                        env=environment,
                        stdout=log,
                        stderr=log,
                        preexec_fn=die_with_parent,
                    )
                )
        main = started[0]
        while main.poll() is None:
            watch(server.out)
            time.sleep(POLL)
        watch(server.out)
        if main.returncode:
            said = (folder / "server" / "fedxl.log").read_text(errors="replace").strip().splitlines()
            raise UserError(f"the server stopped: {said[-1] if said else 'without a word'}")
    return server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _superlink(
    folder: Path, host: str, port: int, environment: Mapping[str, str], started: list[subprocess.Popen[bytes]]
) -> subprocess.Popen[bytes]:
    require(not _listening(port), f"something listens on port {port} already; stop it, or change connection.toml")
    bind = host if host in ("127.0.0.1", "localhost") else "0.0.0.0"
    with (folder / "flower" / "superlink.log").open("ab") as log:
        link = subprocess.Popen(
            [
                _command("flower-superlink"), "--host", bind, "--port", str(port),
                "--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key",
                "--enable-supernode-auth", "--disable-runtime-dependency-installation",
            ],
            cwd=folder, env=environment, stdout=log, stderr=log, preexec_fn=die_with_parent,
        )  # fmt: skip
    started.append(link)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and link.poll() is None:
        if _listening(port):
            return link
        time.sleep(POLL)
    raise UserError(f"Flower's SuperLink did not start on port {port}; see {folder / 'flower' / 'superlink.log'}")


def _listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _register(folder: Path, environment: Mapping[str, str]) -> None:
    """Let the sites' keys in, and note which number Flower gives to whose: a node must be who its key says."""
    nodes = {}
    for key in sorted((folder / "keys").glob("*.pub")):
        said = _flower(["supernode", "register", str(key), NAME, "--format", "json"], folder / "flower", environment)
        try:
            nodes[key.stem] = int(json.loads(said)["node-id"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"flwr supernode register did not say a node's number: {said.strip()[:200]}") from None
    write_atomically(folder / KEYS, json.dumps(nodes).encode())


def _flower(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    try:
        found = subprocess.run(
            [_command("flwr"), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"flwr {arguments[0]} has not come back within 120 s") from None
    if found.returncode:
        said = (found.stderr or found.stdout).strip().splitlines()
        raise UserError(f"flwr {arguments[0]} failed: {said[-1] if said else 'it says nothing'}")
    return found.stdout


def _watch(folder: Path, link: subprocess.Popen[bytes]) -> status.Status | None:
    """Until the app has finished or failed; None if it has died, or Flower's server has."""
    begun = time.monotonic()
    while link.poll() is None:
        found = status.read(folder)
        if found and found.state != status.RUNNING:
            return found
        if found and not found.alive:
            status.forget(folder)
            return None
        require(bool(found) or time.monotonic() < begun + 120, "Flower did not start the server's app within 120 s")
        time.sleep(POLL)
    status.forget(folder)
    return None


def _flower_home(folder: Path, port: int) -> dict[str, str]:
    """Flower's own files for a server: how to reach it from here, and an app that is nothing but our package."""
    home = folder / "flower"
    (home / "app").mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{folder / "ca.crt"}"\n'
    )
    (home / "app" / "pyproject.toml").write_text(
        '[project]\nname = "fedxl-run"\nversion = "1.0.0"\ndescription = "fedxl"\nlicense = "Apache-2.0"\n'
        'dependencies = []\n\n[tool.flwr.app]\npublisher = "fedxl"\n\n[tool.flwr.app.components]\n'
        'serverapp = "fedxl.flower.apps:server"\nclientapp = "fedxl.flower.apps:client"\n\n[tool.flwr.app.config]\n'
        f'server = "{folder / "server.toml"}"\n'
    )
    return _environment(folder)


def _home(folder: Path) -> Path:
    """Where Flower's own files of a party are; all of its processes have it in their environment."""
    return folder / "flower"


def _environment(folder: Path) -> dict[str, str]:
    home = _home(folder)
    home.mkdir(exist_ok=True)
    mine = {HOME: str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    # Flower's processes are found beside this one's Python, whether or not its environment is active.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **mine, "PATH": path}


def _connection(folder: Path) -> tuple[str, int]:
    try:
        table: dict[str, Any] = tomllib.loads((folder / "connection.toml").read_text())
        return str(table["host"]), int(table["port"])
    except (OSError, tomllib.TOMLDecodeError, KeyError, ValueError) as error:
        raise UserError(f"cannot read {folder / 'connection.toml'}: {error}") from None


def _command(name: str) -> str:
    found = Path(sys.executable).parent / name
    require(found.exists(), f"there is no {name}: pip install 'fedxl[flower]'")
    return str(found)
