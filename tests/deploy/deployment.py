"""A federation of real processes for tests: a server, its sites, TLS and keys, on ports of its own."""

from __future__ import annotations

import os
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
from fedxl.training.run_folder import read_metrics
from fedxl.training.run_writer import Checkpoint, load_latest
from tests.deploy.federated import STILL, file_sizes


def processes_in(folder: Path) -> list[str]:
    """Command lines of running processes that name this folder, or one below it."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_bytes().decode(errors="replace").split("\0")
            found += [" ".join(words)] if any(word.startswith(str(folder)) for word in words) else []
    return found


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
        settings = {"deliver": 5.0, **settings}
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
        """kill -9: a party is one process."""
        self.processes[name].kill()
        self.processes[name].wait()

    def kill_and_restart(self, name: str) -> None:
        self.kill(name)
        self.start(name)

    def pause(self, seconds: float) -> None:
        """Let them work for a moment: what they are doing afterwards is left to chance."""
        time.sleep(seconds)

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
        sizes = file_sizes(self.folder)
        return {path: size for path, size in sizes.items() if path.suffix in (".log", ".jsonl", ".safetensors")}

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
        return (place / "fedxl.log").read_text(errors="replace")

    def records(self) -> list[dict[str, Any]]:
        return read_metrics(self.run)[0]

    def dropped(self) -> list[dict[str, Any]]:
        return [entry for record in self.records() for entry in record.get("dropped", [])]

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.processes:
            self.kill(name)
