"""Two ranks that talk by NCCL: each on a card of its own, or, where there is one card, as two machines that share it.

NCCL refuses two ranks on one card of one machine. It tells machines apart by a name, which a test may choose.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedxl.cli.processes import free_port
from fedxl.config import experiment as configs
from fedxl.training.run_folder import checkpointed
from fedxl.training.settings import Hooks
from tests.conftest import PATIENCE, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).parents[3]
FEDXL = [sys.executable, "-m", "fedxl"]
CONFIG = """
data = {name = "digits", clients = 6}
model = {name = "mlp", hidden = [8]}
risk = {name = "pauc"}
algorithm = {name = "fedxl2", lr = 0.3}

[run]
rounds = 6
local_steps = 4
batch1 = 4
batch2 = 4
eval_every = 3
cohort = 4
dtype = "float64"
compile = false
"""
CASES = {
    "FeDXL2, one graph": (),
    "FeDXL2, loop": ("run.executor='loop'",),
    "states as large as the model": ("algorithm.name='codasca'", "algorithm.lr=0.1"),
    "trimmed means": ("algorithm.aggregation='trimmed'",),
    "one rank is idle": ("run.cohort=1",),
}


def train(folder: Path, out: str, options: Any, **environment: Any) -> subprocess.Popen[str]:
    (folder / "c.toml").write_text(CONFIG)
    chosen = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR", "NCCL_DEBUG": "ERROR"}
    named = {name: str(value) for name, value in environment.items()}
    return subprocess.Popen(
        [*FEDXL, "train", "c.toml", "--out", out, *(f"--set={option}" for option in options)],
        cwd=folder, env={**chosen, **named}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def two_ranks(folder: Path, out: str, options: Any = ()) -> list[subprocess.Popen[str]]:
    port, cards = free_port(), torch.cuda.device_count()
    together = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    one = [{"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2} for rank in range(2)]
    alone = [{"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NCCL_HOSTID": f"machine{rank}"} for rank in range(2)]
    seats = one if cards > 1 else alone
    return [train(folder, out, options, RANK=rank, **together, **seats[rank]) for rank in range(2)]


def ended(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    return out


@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_come_to_what_one_process_does(name, tmp_path):
    alone, *several = train(tmp_path, "one", CASES[name]), *two_ranks(tmp_path, "two", CASES[name])
    for process in (alone, *several):
        ended(process)
    one, two = (load_file(tmp_path / run / "model.safetensors") for run in ("one", "two"))
    assert one.keys() == two.keys()
    for key, expected in one.items():
        torch.testing.assert_close(two[key], expected, rtol=0, atol=1e-10, msg=key)
    rows = [json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[-1]) for run in ("one", "two")]
    assert rows[0]["test"]["auroc"] == pytest.approx(rows[1]["test"]["auroc"], abs=1e-12)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other_in_one_line_and_the_run_is_resumed(victim, tmp_path):
    long = ("run.rounds=100000", "run.checkpoint_every=1", "run.eval_every=100000")
    ranks = two_ranks(tmp_path, "run", long)
    assert until(lambda: checkpointed(tmp_path / "run") >= 2, lambda: all(rank.poll() is None for rank in ranks))
    os.kill(ranks[victim].pid, signal.SIGKILL)
    told = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks][1 - victim]
    assert ranks[1 - victim].returncode == 2, told
    if victim == 1 or torch.cuda.device_count() == 1:  # of those on one machine the first one speaks
        assert "continue with: fedxl resume run" in told
        assert len(told.strip().splitlines()) == 1, told
    begun = configs.read(tmp_path / "run" / "config.toml")
    again = replace(begun, run={**begun.run, "rounds": checkpointed(tmp_path / "run") + 2})
    quiet = Hooks(say=lambda line: None)
    resumed, whole = configs.execute(again, tmp_path / "run", True, quiet), configs.execute(again, hooks=quiet)
    for name, leaf in whole.weights.params.items():
        torch.testing.assert_close(resumed.weights.params[name], leaf, rtol=0, atol=1e-10)


def test_ranks_that_share_a_named_card_talk_by_gloo(tmp_path):
    option = ("run.device='cuda:0'",)
    ended(train(tmp_path, "one", option))
    (tmp_path / "c.toml").write_text(CONFIG)
    done = subprocess.run(
        [*FEDXL, "train", "c.toml", "--out", "two", "--devices", "2", "--set", option[0]],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = (load_file(tmp_path / run / "model.safetensors") for run in ("one", "two"))
    for key, expected in one.items():
        torch.testing.assert_close(two[key], expected, rtol=0, atol=1e-10, msg=key)
