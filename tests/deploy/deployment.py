"""A federation of real processes for tests: a server, its sites, TLS and keys, on ports of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedxl.cli.processes import free_port
from fedxl.config.experiment import Config
from fedxl.deploy.provision import folders
from fedxl.deploy.provision.settings import read_server
from fedxl.deploy.supervise import status
from fedxl.deploy.supervise.children import descendants, kill_leftovers
from fedxl.training.run_folder import read_metrics
from fedxl.training.run_writer import Checkpoint, load_latest

STILL = 600.0  # seconds without anything happening


class Deployment:
    """`fedxl deploy init`, then one process a party; `with` stops them all, and what they have started."""

    def __init__(self, folder: Path, sites: tuple[str, ...], config: Config, **settings: Any) -> None:
        self.folder, self.port, self.sites = folder, free_port(), sites
        # The evaluation is the simulator's business; here it would only be another thing to wait for.
        folders.init(sites, folder, port=self.port, config=replace(config, run={**config.run, "executor": "auto"}))
        file = folder / "server" / "server.toml"
        text = "\n".join(
            line for line in file.read_text().splitlines() if line.split(" ")[0] not in settings or "=" not in line
        )
        added = "\n".join(f"{name} = {value}" for name, value in settings.items())
        file.write_text(text.replace("[server]", f"[server]\n{added}", 1))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def run(self) -> Path:
        return read_server(self.folder / "server" / "server.toml").out

    def start(self, name: str, **environment: str) -> None:
        """The server, or a site by its name."""
        role = "serve" if name == "server" else "join"
        place = self.folder / "server" if name == "server" else self.folder / "sites" / name
        with (place / "fedxl.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "fedxl", "deploy", role, str(place)],
                stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """kill -9, of the party's process and of all that came of it."""
        process = self.processes[name]
        for pid in [process.pid, *descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait for as long as anything happens: a loaded machine is slow, but a stuck one stands still."""
        seen, since = self.standing(), time.monotonic()
        while not reached():
            server = self.processes.get("server")
            now = self.standing()
            seen, since = (now, time.monotonic()) if now != seen else (seen, since)
            if time.monotonic() - since > STILL or (server and server.poll() not in (None, 0)):
                raise AssertionError(f"{what} did not happen; {self.log('server')[-3000:]}")
            time.sleep(0.2)

    def standing(self) -> object:
        """What changes as long as anything happens: logs, metrics, checkpoints."""
        sizes = {}
        for path in self.folder.rglob("*"):
            if path.suffix in (".log", ".jsonl", ".safetensors"):
                with suppress(FileNotFoundError):
                    sizes[path] = path.stat().st_size
        return sizes

    def finished(self) -> Checkpoint:
        """Wait for the end of the run: its last checkpoint."""
        self.until(lambda: self.processes["server"].poll() == 0, "the end of the run")
        found, complaints = load_latest(self.run / "checkpoints")
        assert found
        assert not complaints
        return found

    def round(self) -> int:
        """The last one on disk."""
        files = sorted((self.run / "checkpoints").glob("round-*.safetensors"))
        return int(files[-1].stem.partition("-")[2]) if files else -1

    def log(self, name: str) -> str:
        place = self.folder / "server" if name == "server" else self.folder / "sites" / name
        logs = [place / "flower" / f"{child}.log" for child in ("superlink", "gateway", "app", "node")]
        files = [*logs, place / "fedxl.log"]
        return "\n".join(file.read_text(errors="replace") for file in files if file.exists())

    def records(self) -> list[dict[str, Any]]:
        return read_metrics(self.run)[0]

    def dropped(self) -> list[dict[str, Any]]:
        return [entry for record in self.records() for entry in record.get("dropped", [])]

    def child(self, party: str, role: str) -> int | None:
        """The process of a party's that plays a role (superlink, gateway, app, node), if it is there."""
        for pid in descendants(self.processes[party].pid):
            with suppress(OSError):
                if f"fedxl.deploy\0{role}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def replace(self, party: str, role: str) -> None:
        """kill -9 of one process of a party's; waits until there is another in its place."""
        known: list[int | None] = [None]
        self.until(lambda: self.child(party, role) not in known, f"a {role} to kill")
        known.append(self.child(party, role))
        os.kill(known[1] or 0, signal.SIGKILL)
        self.until(lambda: self.child(party, role) not in known, f"a new {role}")

    def app(self) -> int:
        """The process of the server's app."""
        found = status.read(self.folder / "server")
        assert found
        return found.pid

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.processes:
            self.kill(name)
        # Killed, they have not cleaned up behind them.
        kill_leftovers(
            [self.folder / "server" / "flower", *(self.folder / "sites" / name / "flower" for name in self.sites)]
        )
