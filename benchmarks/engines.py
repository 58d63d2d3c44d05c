"""What the engines of real sites cost beside computation, with their real processes on this machine, in one run.

python benchmarks/engines.py [FOLDER] [--engines tls flower nvflare] [--sites 3] [--rounds 30]

For each engine: seconds per round of a small network (5,000 weights) and of one of ResNet18's size (45 MB each way),
CPU seconds per round of all processes but what the simulator needs for the same rounds, CPU of idle sites, and the
memory of the largest process of the server and of a site. Parties are started by the commands of their READMEs.
Flower needs nginx, FLARE `fedxl[nvflare]`. It prints its rows and writes engines.json.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import machine

from fedxl.cli.processes import free_port
from fedxl.config.experiment import Config, simulate
from fedxl.deploy.provision import folders
from fedxl.files import write_json
from fedxl.training.trainer import Hooks, train

HIDDEN = {"5,000 weights": [75], "45 MB each way": [3300, 3300]}
MARK = "FEDXL_BENCHMARK_PARTY"  # in the environment of all that a party starts
IDLE = 10.0  # seconds for which sites that wait are watched
TICKS = os.sysconf("SC_CLK_TCK")


def experiment(hidden: Sequence[int], sites: int, rounds: int) -> Config:
    """One step of four pairs, so that there is little to compute. FeDXL1 sends weights and nothing of their size."""
    every = {"eval_every": rounds, "checkpoint_every": 1}
    return Config(
        data={"name": "digits", "clients": sites, "one_class": 0},
        model={"name": "mlp", "hidden": list(hidden)},
        risk={"name": "auroc"},
        algorithm={"name": "fedxl1", "lr": 0.01},
        run={"rounds": rounds, "local_steps": 1, "batch1": 4, "batch2": 4} | every,
    )


@dataclass
class Party:
    """What runs in one folder, whoever started it."""

    name: str

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self.name}\0".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def cpu(self) -> float:
        """CPU seconds of its processes so far, and of their children that have ended."""
        total = 0
        for pid in self.processes():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += sum(int(word) for word in words[11:15])
        return total / TICKS

    def megabytes(self) -> dict[str, float]:
        """The largest memory that each of its processes has held."""
        found = {}
        for pid in self.processes():
            with suppress(OSError, ValueError):
                lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                found[str(pid)] = int(lines.get("VmHWM", "0 kB").split()[0]) / 1e3
        return found


class Federation:
    """Parties as their READMEs start them; `with` ends them all."""

    def __init__(self, engine: str, place: Path, config: Config, sites: int) -> None:
        self.place, self.engine = place, engine
        self.names = [f"s{number}" for number in range(sites)]
        folders.init(self.names, place, port=free_port(), config=config, engine=engine)
        if os.geteuid() == 0:  # nginx would give up the right to read these folders
            for file in place.rglob("nginx.conf"):
                file.write_text("user root;\n" + file.read_text())
        self.parties = {name: Party(f"{place}/{name}") for name in ("server", "run", *self.names)}

    def start(self, party: str, command: str, folder: str) -> subprocess.Popen[bytes]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        own = {"HOME": str(self.place), "OMP_NUM_THREADS": "1", "PATH": path, MARK: self.parties[party].name}
        environment = {**os.environ, **own, "PYTHONPATH": str(Path(__file__).parents[1])}
        with (self.place / f"{party}.log").open("ab") as log:
            return subprocess.Popen(
                ["sh", "-ec", command], cwd=self.place / folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def provision(self) -> None:
        """The keys that FLARE makes itself."""
        if self.engine != "nvflare":
            return
        steps = [("server", "sh setup.sh")]
        for name in self.names:
            signed = f"../sites/{name}/{name}.signed.zip"
            approve = f"nvflare cert approve ../sites/{name}/{name}/{name}.request.zip --out {signed}"
            steps += [
                (f"sites/{name}", "nvflare cert request -p participant.yml"),
                ("server", f"{approve} -c ../authority --profile project.yml"),
                (f"sites/{name}", f"nvflare package {name}.signed.zip -w kit"),
            ]
        for folder, command in steps:
            assert self.start("run", command, folder).wait() == 0, (command, self.log("run"))

    def join(self, names: Sequence[str]) -> None:
        for name in names:
            self.start(name, "fedxl deploy join ." if self.engine == "tls" else "sh start.sh", f"sites/{name}")

    def serve(self) -> Callable[[], int | None]:
        """Start the server and its run. Returns what tells whether it has ended."""
        if self.engine == "tls":
            return self.start("server", "fedxl deploy serve .", "server").poll
        self.start("server", "sh start.sh", "server")
        if self.engine == "flower":
            command = "sleep 5; until ./run.sh; do sleep 2; done"
            self.start("run", command, "server")
            return lambda: 0 if (self.place / "server/run/model.safetensors").exists() else None
        return self.start("run", f"sleep 5; fedxl deploy submit .. --kit {self.place}/admin", "server").poll

    def round(self) -> int:
        files = (self.place / "server/run/checkpoints").glob("round-*.safetensors")
        return max((int(file.stem.partition("-")[2]) for file in files), default=-1)

    def log(self, party: str) -> str:
        return (self.place / f"{party}.log").read_text(errors="replace")[-3000:]

    def sites(self) -> list[Party]:
        return [self.parties[name] for name in self.names]

    def __enter__(self) -> Federation:
        self.provision()
        return self

    def __exit__(self, *error: object) -> None:
        while found := [pid for party in self.parties.values() for pid in party.processes()]:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)


def measure(engine: str, config: Config, sites: int, rounds: int) -> dict[str, float]:
    """Numbers of one federation: its sites wait for the last one of them, then all do their rounds."""
    with tempfile.TemporaryDirectory() as folder, Federation(engine, Path(folder) / "f", config, sites) as found:
        ended = found.serve()
        found.join(found.names[:-1])
        quiet(found)
        before = sum(party.cpu() for party in found.sites())
        time.sleep(IDLE)
        idle = (sum(party.cpu() for party in found.sites()) - before) / IDLE / (sites - 1)
        small = max(max(found.parties[name].megabytes().values()) for name in found.names[:-1])
        found.join(found.names[-1:])
        parties = list(found.parties.values())
        began, spent, memory = dict[int, float](), dict[int, float](), dict[str, dict[str, float]]()
        while ended() is None and found.round() < rounds:
            time.sleep(0.02)
            now = found.round()
            if now >= 0 and now not in began:
                began[now], spent[now] = time.monotonic(), sum(party.cpu() for party in parties)
                for party in (found.parties["server"], found.parties["run"], *found.sites()):
                    memory[party.name] = {**memory.get(party.name, {}), **party.megabytes()}
        last = found.round()
        assert last >= rounds, (found.log("server"), found.log("run"))
        began.setdefault(last, time.monotonic())
        first = min((each for each in began if each > 0), default=0)  # the first loads torch
        counted = max(began) - first
        largest = {name: max(each.values(), default=0.0) for name, each in memory.items()}
        return {
            "seconds per round": (began[max(began)] - began[first]) / counted,
            "CPU seconds per round": (spent[max(spent)] - spent[first]) / (max(spent) - first),
            "idle site, share of a core": idle,
            "idle site, MB": small,
            "site, MB": max(largest[party.name] for party in found.sites()),
            "server, MB": max(largest[found.parties[name].name] for name in ("server", "run")),
        }


def quiet(found: Federation) -> None:
    """Wait until the sites have prepared their data and do nothing more, half a minute at most."""
    deadline, before = time.monotonic() + 60, -1.0
    while time.monotonic() < deadline:
        time.sleep(3)
        now = sum(party.cpu() for party in found.sites())
        if before > 0 and now - before < 0.1:
            return
        before = now


def simulated(config: Config, rounds: int) -> float:
    """Seconds per round of the same sites one after the other in one process, on one thread."""
    torch.set_num_threads(1)
    simulation = simulate(config, lambda line: None)
    began = time.perf_counter()
    train(simulation, Hooks(), None)
    return (time.perf_counter() - began) / rounds


def torch_alone() -> float:
    """MB of a process that has taken a gradient with torch and does nothing else."""
    gradient = "import torch; out, back = torch.func.vjp(torch.sin, torch.ones(1)); back(out)"
    code = gradient + "; print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."))
    parser.add_argument("--engines", nargs="+", default=["tls", "flower", "nvflare"])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sizes", nargs="+", default=list(HIDDEN), choices=list(HIDDEN))
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for size in given.sizes:
        rounds = given.rounds if size == next(iter(HIDDEN)) else max(3, given.rounds // 5)
        config = experiment(HIDDEN[size], given.sites, rounds)
        rows.append({"size": size, "engine": "simulator", "seconds per round": simulated(config, rounds)})
        print(rows[-1], flush=True)
        for engine in given.engines:
            rows.append({"size": size, "engine": engine, **measure(engine, config, given.sites, rounds)})
            print(rows[-1], flush=True)
    about = {"machine": machine(), "sites": given.sites, "torch alone, MB": torch_alone()}
    given.folder.mkdir(parents=True, exist_ok=True)
    write_json(given.folder / "engines.json", {**about, "rows": rows})
    print(about)


if __name__ == "__main__":
    main()
