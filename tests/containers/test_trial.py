"""The trial of compose.yaml with processes instead of containers: its own commands make it, train and stop."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")
pytest.importorskip("pandas", reason="the example makes its tables with it")
pytest.importorskip("PIL", reason="and its images")

from fedxl.cli.processes import free_port
from tests.conftest import until
from tests.containers.test_files import COMPOSE, instructions
from tests.docs.pages import ROOT

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="servers and sites run on Linux")
pytestmark = [pytest.mark.deploy, ON_LINUX]
SERVICES = COMPOSE["services"]


def hear_interrupts() -> None:
    """As in a container, also if these tests run in the background of a shell, which ignores SIGINT there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Containers:
    """Starts the processes of compose's services, with a folder for the volume and localhost for the network."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.volume, programs = folder, folder / "volume", folder / "bin"
        programs.mkdir()
        self.volume.mkdir()
        for name, module in (("fedxl", "-m fedxl"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
            (programs / name).chmod(stat.S_IRWXU)
        self.environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}

    def command(self, name: str) -> list[str]:
        service = SERVICES[name]
        words = [*service.get("entrypoint", json.loads(instructions("ENTRYPOINT")[0])), *service["command"]]
        paths = {"/src/": f"{ROOT}/", "/srv/fedxl": str(self.volume)}
        for inside, outside in paths.items():
            words = [word.replace(inside, outside) if word.startswith(inside) else word for word in words]
        return words

    def start(self, name: str, command: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        environment = {**self.environment, **SERVICES[name]["environment"]}
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command or self.command(name), env=environment, stdout=log, stderr=log, preexec_fn=hear_interrupts
            )

    def log(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("*.log"))


def test_the_trial_of_compose_trains_and_stops(tmp_path):
    containers = Containers(tmp_path)
    making = containers.command("init")
    assert making[-1] == "server"
    with_port = [*making[:-1], "localhost", "--port", str(free_port())]
    assert containers.start("init", with_port).wait() == 0, containers.log()
    assert containers.start("init", with_port).wait() == 0, "a second time it keeps what is there"
    experiment = containers.volume / "trial" / "server" / "server.toml"
    experiment.write_text(experiment.read_text().replace("rounds = 10\n", "rounds = 4\n"))
    running = {name: containers.start(name) for name in SERVICES if name != "init"}
    server, sites = running["server"], [running[name] for name in running if name != "server"]
    try:
        until(lambda: server.poll() is not None, lambda: all(site.poll() is None for site in sites))
        assert server.poll() == 0, containers.log()
        for site in sites:
            site.send_signal(signal.Signals[instructions("STOPSIGNAL")[0]])
        assert [site.wait() for site in sites] == [130] * 3, containers.log()
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    assert 'host = "localhost"' in (containers.volume / "trial" / "sites" / "north" / "connection.toml").read_text()
    run = containers.volume / "trial" / "server" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["test"]["auroc"] > 0.8, "it has learnt something"
    assert rows[-1]["test_from"] == "metrics of east, north, south"
    assert (run / "model.safetensors").exists()
