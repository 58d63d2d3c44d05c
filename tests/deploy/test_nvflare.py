"""FLARE as the transport, with its stock processes on this machine: the same numbers as the simulator."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs fedxl[nvflare]")


from fedxl.cli.processes import free_port
from fedxl.config.experiment import Config, dump
from fedxl.deploy.provision import folders
from fedxl.deploy.provision.settings import ServerSettings
from fedxl.deploy.transport.nvflare import project
from tests.deploy.federated import STILL, assert_equals_simulator, config, file_sizes

SITES = ("a", "b", "c")
HOST = "127.0.0.1"
ROUNDS = 20


def three(experiment: Config) -> Config:
    return replace(experiment, data={**experiment.data, "clients": len(SITES)})


def write(folder: Path, texts: Mapping[str, str]) -> None:
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


class Federation:
    """FLARE's server and clients as their READMEs start them; `with` ends all that came of them."""

    def __init__(self, folder: Path, experiment: Config, **settings: Any) -> None:
        self.folder, self.experiment = folder, three(experiment)
        chosen = ServerSettings(SITES, minimum=2, private_draws=True, **settings)
        texts = {"server/server.toml": folders.server_toml(chosen, dump(self.experiment))}
        for number, name in enumerate(SITES):
            text = folders.site_toml(name, number, self.experiment)
            texts[f"sites/{name}/site.toml"] = re.sub(r"(?m)^rounds = .*$", "rounds = 10000", text)
        write(folder, {**texts, **project.files(SITES, HOST, free_port(), True)})
        self.output = folder / "output.log"
        # FLARE's commands write to the home folder.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1", "PATH": path}

    def do(self, place: str, *command: str) -> None:
        done = subprocess.run(
            command, cwd=self.folder / place, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)

    def provision(self) -> None:
        """The steps of the READMEs."""
        self.do("server", "sh", "setup.sh")
        for name in SITES:
            site = f"sites/{name}"
            self.do(site, "nvflare", "cert", "request", "-p", "participant.yml")
            request = f"../{site}/{name}/{name}.request.zip"
            signed = f"../{site}/{name}.signed.zip"
            self.do("server", "nvflare", "cert", "approve", request, "--out", signed, "-c", "../authority", *PROFILE)
            self.do(site, "nvflare", "package", f"{name}.signed.zip", "-w", "kit")

    def start(self) -> None:
        for place in ("server", *(f"sites/{name}" for name in SITES)):
            with (self.folder / place / "flare.log").open("ab") as log:
                subprocess.run(
                    ["sh", "start.sh"], cwd=self.folder / place, env=self.environment, check=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip

    def python(self, code: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A process of its own: FLARE's sessions leave threads and sockets behind."""
        command = [sys.executable, "-c", code, str(self.folder / "admin"), *arguments]
        with self.output.open("wb") as output:
            return subprocess.Popen(
                command, cwd=Path(__file__).parents[2], env=self.environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output,
            )  # fmt: skip

    def submit(self) -> subprocess.Popen[bytes]:
        return self.python(SUBMIT, str(self.folder))

    def ended(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for the end of a process: what it has printed."""
        self.until(lambda: process.poll() is not None, "the end of a process")
        return self.output.read_text()

    @property
    def run(self) -> Path:
        return self.folder / "server" / "run"

    def round(self) -> int:
        """The last one on disk."""
        files = (self.run / "checkpoints").glob("round-*.safetensors")
        return max((int(path.stem.partition("-")[2]) for path in files), default=-1)

    def processes(self, *words: str) -> list[int]:
        """All processes of this federation whose command lines hold these words."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
                if str(self.folder) in line and all(word in line for word in words):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != os.getpid()]

    def kill(self, *words: str) -> list[int]:
        found = self.processes(*words)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait for as long as anything happens: a loaded machine is slow, but a stuck one stands still."""
        seen, since = file_sizes(self.folder), time.monotonic()
        while not reached():
            now = file_sizes(self.folder)
            seen, since = (now, time.monotonic()) if now != seen else (seen, since)
            assert time.monotonic() - since < STILL, f"{what} did not happen; {self.log()[-3000:]}"
            time.sleep(0.2)

    def log(self) -> str:
        texts = []
        for path in file_sizes(self.folder):
            with suppress(FileNotFoundError):  # FLARE removes the folders of jobs that have ended
                texts += [path.read_text(errors="replace")] if path.suffix == ".log" else []
        return "\n".join(texts)

    def __enter__(self) -> Federation:
        self.provision()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        while self.kill():  # a parent may have just started another
            time.sleep(0.1)


KILLED = {
    "a site's job": ("/sites/a/", "worker_process"),
    "the server's job": ("/server/", "runner_process"),
    "the server's FLARE": ("/server/", "server_train"),
    "a site's FLARE": ("/sites/b/", "client_train"),
}
PROFILE = ("--profile", "project.yml")
SUBMIT = """
import sys
from pathlib import Path
from fedxl.deploy import say
from fedxl.deploy.transport.nvflare.job import submit
submit(Path(sys.argv[2]), Path(sys.argv[1]), say)
"""
OUTCOMES = """
import sys
from contextlib import closing
from nvflare.fuel.flare_api.flare_api import new_secure_session
with closing(new_secure_session("admin@fedxl.org", sys.argv[1])) as session:
    for number in [session.submit_job(folder) for folder in sys.argv[2:]]:
        print("ended", session.wait_for_job(number)["status"])
"""


@pytest.mark.deploy
def test_flare_runs_nothing_but_fedxl_and_a_run_equals_the_simulators_whoever_is_killed(tmp_path):
    """One federation for all of it: FLARE's processes take longer to start than to do this."""
    experiment = config("fedxl1", rounds=ROUNDS, eval_every=ROUNDS)
    with Federation(tmp_path / "flare", experiment) as federation:
        the_policy_refuses_other_classes_and_code(federation, tmp_path)
        a_run_ends_equal_to_the_simulators_whoever_is_killed(federation)
        a_users_error_ends_the_submitting(federation)


def with_class(part: str, path: str, name: str = "") -> dict[str, str]:
    """Our job with another class in it."""
    texts = project.job(SITES, len(SITES))
    file = f"app/config/config_fed_{part}.json"
    content = json.loads(texts[file])
    if name == "filter":
        content["task_result_filters"] = [{"tasks": ["train"], "filters": [{"path": path, "args": {}}]}]
    elif part == "server":
        content["workflows"][0]["path"] = path
    else:
        content["executors"][0]["executor"]["path"] = path
    return {**texts, file: json.dumps(content)}


def the_policy_refuses_other_classes_and_code(federation: Federation, tmp_path: Path) -> None:
    # All of them are among the classes that FLARE allows by default.
    classes = {
        "executor": ("client", "nvflare.app_common.np.np_trainer.NPTrainer"),
        "filter": ("client", "nvflare.app_common.filters.exclude_vars.ExcludeVars"),
        "controller": ("server", "nvflare.app_common.workflows.fedavg.FedAvg"),
    }
    jobs = {name: with_class(*found, name) for name, found in classes.items()}
    jobs["code"] = {**project.job(SITES, len(SITES)), "app/custom/code.py": "print('here')"}
    for name, texts in jobs.items():
        write(tmp_path / name, texts)
    process = federation.python(OUTCOMES, *(str(tmp_path / name) for name in jobs))
    found = federation.ended(process)
    assert process.returncode == 0, found
    assert found.count("ended FINISHED") == len(jobs), found
    assert "COMPLETED" not in found
    assert "ended FINISHED:FAILED_TO_RUN" in found, "code is not even deployed"
    assert not (federation.run / "sites.json").exists(), "no run has begun"
    log = federation.log()
    for _, path in classes.values():
        assert re.search(rf"Component '{re.escape(path)}' at config path \S+ is not in allow_list", log), path


def a_run_ends_equal_to_the_simulators_whoever_is_killed(federation: Federation) -> None:
    submitting = federation.submit()
    for number, party in enumerate(KILLED):
        federation.until(lambda least=3 * number: federation.round() > least, "a round")
        assert federation.kill(*KILLED[party]), party
        federation.until(lambda least=number + 1: federation.log().count("has joined") > 3 * least, "another job")
    found = federation.ended(submitting)
    assert submitting.returncode == 0, found
    assert found.count("submitted job") == len(KILLED) + 1
    assert_equals_simulator(federation.folder, federation.experiment)


def a_users_error_ends_the_submitting(federation: Federation) -> None:
    shutil.rmtree(federation.run, ignore_errors=True)
    file = federation.folder / "server" / "server.toml"
    file.write_text(file.read_text().replace('"fedxl1"', '"fedxl2"'))  # which the sites do not allow
    submitting = federation.submit()
    found = federation.ended(submitting)
    assert submitting.returncode == 1
    assert "this site does not allow the algorithm 'fedxl2'" in found
    assert found.count("submitted job") == 1
