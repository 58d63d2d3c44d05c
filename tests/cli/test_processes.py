"""`--devices`: real processes, one of which is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedxl.cli.processes import free_port
from fedxl.config import experiment as configs
from fedxl.training.run_folder import checkpointed
from fedxl.training.settings import Hooks
from tests.cli.test_errors import CONFIG, command
from tests.conftest import PATIENCE, until

FEDXL = [sys.executable, "-m", "fedxl"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LONG = [
    "--set=run.rounds=100000",
    "--set=run.checkpoint_every=1",
    "--set=run.eval_every=100000",
    "--set=run.dtype=float64",
]

MISTAKES = {
    "none": (["--devices=0"], "--devices must be at least 1, got 0"),
    "far too many": (["--devices=5000"], "--devices must be at most 1024"),
    "no time": (["--devices=2", "--limit=0"], "--limit must be positive"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_one_line(mistake, tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    options, expected = MISTAKES[mistake]
    code, _, err = command(monkeypatch, capsys, "train", "c.toml", "--out", "run", *options)
    assert code == 2
    assert expected in err
    assert len(err.strip().splitlines()) == 1, err
    assert not Path("run").exists()


def test_devices_are_not_for_processes_of_torchrun(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = command(monkeypatch, capsys, "train", "c.toml", "--devices", "2")
    assert code == 2
    assert "torchrun has started this one" in err


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that it has started, in their order."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(int(pid) for pid in found)


@pytest.mark.deploy
@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_in_one_line_and_it_can_be_resumed(victim, tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG)
    run = tmp_path / "run"
    started = subprocess.Popen(
        [*FEDXL, "train", "c.toml", "--out", "run", "--devices", "2", *LONG],
        cwd=tmp_path, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert until(lambda: checkpointed(run) >= 2, lambda: started.poll() is None)
    children = ranks_of(started)
    os.kill(children[victim], signal.SIGKILL)
    _, err = started.communicate(timeout=PATIENCE)
    assert started.returncode == 2
    assert len(err.strip().splitlines()) == 1, err
    assert "continue with: fedxl resume run" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    begun = configs.read(run / "config.toml")
    again = replace(begun, run={**begun.run, "rounds": checkpointed(run) + 2})
    quiet = Hooks(say=lambda line: None)
    resumed, whole = configs.execute(again, run, True, quiet), configs.execute(again, hooks=quiet)
    for name, leaf in whole.weights.params.items():
        torch.testing.assert_close(resumed.weights.params[name], leaf, rtol=0, atol=1e-12)


@pytest.mark.deploy
def test_torchrun_itself_starts_ranks_that_come_to_what_one_process_does(tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*torchrun, "-m", "fedxl", "train", "c.toml", "--out", "run", "--set=run.dtype=float64"],
        cwd=tmp_path, env=ENVIRONMENT, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("best round") == 1, "the first rank alone speaks"
    config = configs.read(tmp_path / "c.toml", ["run.dtype=float64"])
    whole = configs.execute(config, hooks=Hooks(say=lambda line: None))
    found = load_file(tmp_path / "run" / "model.safetensors")
    for name, leaf in whole.weights.params.items():
        torch.testing.assert_close(found[name], leaf, rtol=0, atol=1e-12)
