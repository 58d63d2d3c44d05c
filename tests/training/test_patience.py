"""Early stopping: when it comes, that the result is complete, and that stopping and resuming changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fedxl import Result, UserError, auroc, tree
from fedxl.training.settings import Hooks
from tests.conftest import make_clients
from tests.running import fit_named

VALIDATION = make_clients([(25, 30)], seed=9)[0]


def run(out: Path | None = None, hooks: Hooks | None = None, resume: bool = False, **changes) -> Result:
    torch.manual_seed(0)
    settings = {
        "rounds": 60, "local_steps": 2, "batch1": 2, "batch2": 2, "lr": 0.5, "eval_every": 2, "checkpoint_every": 3,
        "executor": "vmap", "dtype": "float64", "device": "cpu", "validation": VALIDATION, "test": VALIDATION,
        **changes,
    }  # fmt: skip
    hooks = hooks or Hooks(say=lambda line: None)
    return fit_named(
        nn.Linear(5, 1), make_clients([(8, 8)] * 3), auroc(), out=out, resume=resume, hooks=hooks, **settings
    )


def stop_by(history: list[dict], patience: int) -> int | None:
    """The rule said again, from the whole history: the round of the evaluation that ends the run."""
    best, waited = -1.0, 0
    for row in history:
        value = row["validation"]["auroc"]
        best, waited = (value, 0) if value > best else (best, waited + 1)
        if waited == patience:
            return row["round"]
    return None


def rows(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith("seconds")} for line in lines]


def same_bits(first: Result, second: Result) -> bool:
    packed = tree.pack(second.server)
    return all(
        torch.allclose(tensor, packed[name], rtol=0, atol=0, equal_nan=True)
        for name, tensor in tree.pack(first.server).items()
    )


@pytest.mark.parametrize("patience", [1, 2, 4])
def test_it_stops_where_the_whole_run_says(patience):
    whole = run()
    expected = stop_by(whole.history, patience)
    assert expected is not None, "the run must have something to stop for"
    lines: list[str] = []
    early = run(patience=patience, hooks=Hooks(say=lines.append))
    assert early.stopped_early
    assert not early.interrupted
    assert early.history[-1]["round"] == expected
    assert early.metrics["test"], "the result is complete"
    assert any(f"stopped early after round {expected}" in line for line in lines)
    assert not whole.stopped_early


def test_a_patient_run_is_the_whole_run():
    whole, patient = run(rounds=8), run(rounds=8, patience=30)
    assert patient.best_round == whole.best_round
    assert not patient.stopped_early


def test_resumed_anywhere_it_stops_in_the_same_round_with_the_same_bits(tmp_path):
    straight = run(tmp_path / "straight", patience=2)
    last = straight.history[-1]["round"]
    for stop in (1, last // 2, last - 1):
        out, seen = tmp_path / str(stop), iter(range(last))
        run(out, Hooks(say=lambda line: None, should_stop=lambda s=stop, i=seen: next(i) == s), patience=2)
        resumed = run(out, resume=True, patience=2)
        assert resumed.stopped_early
        assert rows(out) == rows(tmp_path / "straight")
        assert same_bits(resumed, straight)
    assert rows(tmp_path / "straight")[-1]["stopped_early"] is True


def test_a_run_that_stopped_stays_stopped_until_it_may_be_more_patient(tmp_path):
    first = run(tmp_path, patience=2)
    again = run(tmp_path, resume=True, patience=2, rounds=90)
    assert again.stopped_early, "more rounds alone do not make it more patient"
    assert (again.best_round, again.metrics) == (first.best_round, first.metrics)
    longer, straight = run(tmp_path, resume=True, rounds=20), run(rounds=20)
    assert not longer.stopped_early
    assert same_bits(longer, straight)
    assert "stopped_early" not in rows(tmp_path)[-1]


def test_patience_needs_validation_data():
    with pytest.raises(UserError, match="patience = 2 needs validation data"):
        run(patience=2, validation=None)
    with pytest.raises(UserError, match="patience must not be negative"):
        run(patience=-1)
