"""The batch script for Slurm, with stand-ins for Slurm's programs: it trains, is queued again, and resumes."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.conftest import until
from tests.docs.forms import torchrun
from tests.docs.pages import ROOT

SCRIPT = ROOT / "containers" / "slurm" / "train.sbatch"
pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = '#!/bin/bash\nif [ "$1" = show ]; then echo localhost; echo other; else echo "$@" >> scontrol.log; fi\n'
# Writes its arguments, and begins a run as fedxl does; then it trains until it is stopped.
TORCHRUN = """#!/bin/bash
echo "$@" >> torchrun.log
mkdir -p run
touch run/config.toml
[ -z "$LONG" ] || sleep 3600
"""


def ended(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


class Job:
    """The script as Slurm starts it, in a folder of its own."""

    def __init__(self, folder: Path, torchrun: str = TORCHRUN) -> None:
        self.folder, self.log = folder, folder / "job.log"
        programs = folder / "bin"
        programs.mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": torchrun}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(stat.S_IRWXU)
        job = {"ID": str(os.getpid()), "NODELIST": "localhost,other", "NUM_NODES": "1"}
        slurm = {f"SLURM_JOB_{name}": value for name, value in job.items()} | {"SLURM_GPUS_ON_NODE": "2"}
        self.environment = {**os.environ, **slurm, "PATH": f"{programs}:{os.environ['PATH']}", "LONG": ""}

    @contextmanager
    def started(self, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                ["bash", str(SCRIPT), *arguments], cwd=self.folder, env={**self.environment, **environment},
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # as Slurm does in the end; torchrun then ends its ranks
            process.wait()
            until(lambda: ended(process.pid))

    def lines(self, name: str) -> list[str]:
        path = self.folder / f"{name}.log"
        return path.read_text().splitlines() if path.exists() else []


def test_a_job_trains_first_and_resumes_once_it_is_queued_again(tmp_path, monkeypatch):
    job = Job(tmp_path)
    with job.started("c.toml", "run", LONG="1") as process:
        assert until(lambda: job.lines("torchrun"), lambda: process.poll() is None), job.log.read_text()
        assert until((tmp_path / "run" / "config.toml").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert job.lines("scontrol") == [f"requeue {os.getpid()}"]
    with job.started("c.toml", "run") as process:
        assert process.wait() == 0, job.log.read_text()
    first, second = job.lines("torchrun")
    assert first.endswith("-m fedxl train c.toml --out run")
    assert second.endswith("-m fedxl resume run")
    for line in (first, second):
        assert line.startswith("--nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:2")
        torchrun(line.split(), monkeypatch)


def test_a_job_that_fails_says_so_and_is_not_queued_again(tmp_path):
    job = Job(tmp_path, "#!/bin/bash\nexit 2\n")
    with job.started("c.toml", "run") as process:
        assert process.wait() == 2
    assert not job.lines("scontrol")
    with job.started("c.toml") as process:
        assert process.wait() == 1
    assert "usage: sbatch train.sbatch CONFIG RUN_DIR" in job.log.read_text()
