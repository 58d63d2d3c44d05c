"""The hospitals example on four machines, network namespaces of this one, by the commands of docs/deployment.md."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")
pytest.importorskip("pandas", reason="the example makes its tables with it")
pytest.importorskip("PIL", reason="and its images")

from tests.conftest import until

ROOT = Path(__file__).parents[2]
HOSPITALS = ("east", "north", "south")
SERVER = "10.99.0.1"
# What a hospital runs after `pip install`.
AT_A_HOSPITAL = (
    "fedxl deploy request .",
    # edits
    'sed -i \'s|change this|../data/patients.csv|; s/evaluate = "none"/evaluate = "metrics"\\nfewest=5/\' site.toml',
    "fedxl deploy accept . {name}.crt",
    "./start.sh",
)
pytestmark = pytest.mark.deploy


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def names() -> Iterator[dict[str, str]]:
    """Namespaces by machine, and one for the switch that joins them: this machine's own network does not change."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and ip")
    found = {name: f"fedxl-{os.getpid()}-{name}" for name in ("switch", "server", *HOSPITALS)}
    try:
        try:
            ip("netns", "add", found["switch"])
            ip("-n", found["switch"], "link", "add", "bridge", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        ip("-n", found["switch"], "link", "set", "bridge", "up")
        for number, name in enumerate(("server", *HOSPITALS), 1):
            ip("netns", "add", found[name])
            cable = ["-n", found["switch"], "link"]
            ip(*cable, "add", name, "type", "veth", "peer", "name", "eth0", "netns", found[name])
            ip(*cable, "set", name, "master", "bridge", "up")
            ip("-n", found[name], "address", "add", f"10.99.0.{number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", found[name], "link", "set", device, "up")
        yield found
    finally:
        for name in found.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


class Machine:
    def __init__(self, namespace: str, folder: Path, programs: Path) -> None:
        self.folder, self.commands = folder, ["ip", "netns", "exec", namespace, "bash", "-euc"]
        self.environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        folder.mkdir()

    def run(self, command: str, where: str = ".", told: str = "") -> str:
        done = subprocess.run([*self.commands, command], cwd=self.folder / where, env=self.environment, input=told,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, command: str, where: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                [*self.commands, f"exec {command}"], cwd=self.folder / where, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip


def test_three_hospitals_and_a_server_on_machines_of_their_own(tmp_path, names):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "fedxl").write_text(f'#!/bin/sh\nexec {sys.executable} -m fedxl "$@"\n')
    (programs / "fedxl").chmod(stat.S_IRWXU)
    machines = {name: Machine(names[name], tmp_path / name, programs) for name in ("server", *HOSPITALS)}
    server = machines["server"]
    subprocess.run([sys.executable, ROOT / "examples" / "make_hospitals.py"], cwd=tmp_path, check=True)
    shutil.copy(ROOT / "examples" / "table.toml", server.folder)
    server.run(
        f"fedxl deploy init f --sites {','.join(HOSPITALS)} --host {SERVER} --config table.toml --keys-at-sites"
    )
    running = [server.start("./start.sh", "f/server")]
    try:
        for name in HOSPITALS:
            site = machines[name]
            shutil.move(tmp_path / "hospitals" / name, site.folder / "data")
            shutil.move(server.folder / "f" / "sites" / name, site.folder / "fedxl")  # sent to the hospital
            request, edit, accept, start = (command.format(name=name) for command in AT_A_HOSPITAL)
            site.run(request, "fedxl")
            shutil.copy(site.folder / "fedxl" / "request.csr", server.folder)  # sent back
            server.run("fedxl deploy approve f request.csr --examples 500", told="y\n")
            shutil.copy(server.folder / "f" / "approved" / f"{name}.crt", site.folder / "fedxl")
            site.run(edit, "fedxl")
            site.run(accept, "fedxl")
            running.append(site.start(start, "fedxl"))
        ended = until(lambda: running[0].poll() is not None, lambda: all(each.poll() is None for each in running[1:]))
        logs = {name: (machine.folder / "log").read_text() for name, machine in machines.items()}
        assert ended, logs
        assert running[0].returncode == 0, logs
    finally:
        for process in running:
            process.kill()
            process.wait()
    rows = [json.loads(line) for line in (server.folder / "f/server/run/metrics.jsonl").read_text().splitlines()]
    print(rows[-1])
    assert rows[-1]["test"]["auroc"] > 0.9
    took_part = [entry for row in rows for entry in row.get("participants", [])]
    assert {tuple(entry["sites"]) for entry in took_part} == {HOSPITALS}
