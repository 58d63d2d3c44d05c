"""Runs are done once, whoever is killed between them; methods are tuned alike; rows say all that a table needs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedxl import UserError
from fedxl.config.experiment import Config
from fedxl.errors import DivergedError
from fedxl.experiments import demo
from studies import harness
from studies.harness import Harness, Outcome, Planned, best, cell, group, key_of, read, train, tune
from tests.conftest import PATIENCE, until
from tests.studies.running import made

QUIET = {"say": lambda line: None}
PLANNED = [Planned({"method": method, "seed": seed}) for method in "ab" for seed in range(3)]


def square(planned: Planned, folder: Path | None = None) -> Outcome:
    """Work that leaves a mark each time that it is done."""
    if folder:
        with (folder / "done.txt").open("a") as file:
            file.write(f"{json.dumps(planned.case)}\n")
    return {"test": {"auroc": planned.case["seed"] ** 2}}, {"scores": np.arange(3.0)}


def test_runs_with_a_row_are_not_repeated(tmp_path):
    work, path = partial(square, folder=tmp_path), tmp_path / "study.jsonl"
    with Harness(path, work, **QUIET) as do:
        do(PLANNED[:2])
    with Harness(path, work, **QUIET) as do:
        rows = do(PLANNED)
        assert [row.case for row in rows] == [run.case for run in PLANNED], "in the order of the plan"
        assert do(PLANNED[::-1]) == rows[::-1]
        assert do.arrays(rows[0])["scores"].tolist() == [0, 1, 2]
    done = (tmp_path / "done.txt").read_text().splitlines()
    assert len(done) == len(set(done)) == 6
    assert read(path) == rows
    assert len(path.read_text().splitlines()) == 6, "one line per run"


SCRIPT = """
import sys, time
from functools import partial
from pathlib import Path
from studies.harness import Harness
from tests.studies.test_harness import PLANNED, square

def slow(planned):
    time.sleep(0.05)
    return square(planned, Path(sys.argv[1]))

with Harness(Path(sys.argv[1], "study.jsonl"), slow) as do:
    do(PLANNED)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_study_that_is_stopped_goes_on_where_it_was(tmp_path, how):
    """A real process that is stopped between runs, then the rest."""
    path = tmp_path / "study.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # pytest's caller may ignore it
    )  # fmt: skip
    until(lambda: len(read(path)) >= 2, lambda: process.poll() is None)
    os.kill(process.pid, how)
    _, said = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in said
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    kept = read(path)
    assert 2 <= len(kept) <= 6
    with Harness(path, partial(square, folder=tmp_path), **QUIET) as do:
        rows = do(PLANNED)
    assert rows[: len(kept)] == kept
    done = (tmp_path / "done.txt").read_text().splitlines()
    assert len(set(done)) == 6
    assert len(done) - 6 <= 1, "at most the run that it was stopped in is done again"


def test_processes_come_to_the_same(tmp_path):
    with (
        Harness(tmp_path / "one.jsonl", square, **QUIET) as one,
        Harness(tmp_path / "two.jsonl", square, 2, **QUIET) as two,
    ):
        assert one(PLANNED) == two(PLANNED)
        assert two.pool is not None, "which keeps what it has compiled for the next runs"
    assert two.pool is None


@pytest.mark.parametrize("content", ["{", "[]", '{"runs": []}', '{"case": 1}'])
def test_a_file_of_something_else_is_not_overwritten(tmp_path, content):
    path = tmp_path / "study.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match="holds no rows of a study"), Harness(path, square, **QUIET) as do:
        do(PLANNED)
    assert path.read_text() == content


def by_rate(value: dict[float, float]):
    """Runs whose validation metric is a function of their learning rate."""

    def do(planned):
        return [made(dict(run.case), validation={"auroc": value[run.case["lr"]]}) for run in planned]

    return do


def choices(*rates: float) -> dict[float, list[Planned]]:
    return {lr: [Planned({"lr": lr, "seed": seed}) for seed in (100, 101)] for lr in rates}


def test_tuning_chooses_on_validation_data_and_all_methods_have_as_many_trials():
    do = by_rate({0.1: 0.6, 0.3: 0.8, 1.0: 0.7, 3.0: math.nan})
    tuned = tune(do, {"a": choices(0.1, 0.3), "b": choices(1.0, 3.0)}, "auroc")
    assert {name: best(trials) for name, trials in tuned.items()} == {"a": 0.3, "b": 1.0}
    assert [trial.value for trial in tuned["b"]] == [pytest.approx(0.7), -math.inf]
    assert best(tune(do, {"a": choices(0.1, 0.3)}, "-auroc")["a"]) == 0.1, "less is better"
    with pytest.raises(UserError, match=r"not tuned alike.*'a': 2, 'b': 1"):
        tune(do, {"a": choices(0.1, 0.3), "b": choices(1.0)}, "auroc")
    with pytest.raises(UserError, match="every choice of settings that was tried diverged"):
        best(tune(do, {"a": choices(3.0)}, "auroc")["a"])


def config(lr: float, seed: int = 0, **data) -> Config:
    entry = demo.ENTRIES[0]
    small = demo.experiment(entry._replace(algorithm={**entry.algorithm, "lr": lr}), seed)
    small.run.update(rounds=10, local_steps=4, batch1=4, batch2=4, eval_every=2)
    small.data.update(data)
    return small


def test_a_run_is_its_config_wherever_its_data_lie():
    one, other = (Planned({}, config(0.1, root=root)) for root in ("here", "/home/me"))
    assert one.key == other.key != Planned({}, config(0.3, root="here")).key
    assert "/home/me" not in str(harness.without_paths(config(0.1, root="/home/me")))
    assert key_of({"a": 1}) == Planned({"a": 1}).key != Planned({"a": 2}).key


def test_runs_that_share_a_program_are_of_one_kind():
    assert Planned({}, config(0.1)).kind == Planned({}, config(0.3, seed=2)).kind
    assert Planned({}, config(0.1)).kind != Planned({}, config(0.1, clients=4)).kind


def test_a_trial_that_has_collapsed_ends_there_and_a_run_goes_on():
    trial, arrays = train(Planned({}, config(1e3), trial=True))
    whole, kept = train(Planned({}, config(1e3)))
    assert trial["collapsed"] == whole["collapsed"] == 2
    assert (trial["test"], arrays) == ({}, {}), "it was not tested"
    assert set(kept) == {"scores", "labels"}
    assert whole["test"]["auroc"] > 0
    assert {"validation", "best_round", "seconds", "on"} <= whole.keys()


def test_divergence_is_an_outcome(monkeypatch):
    def explode(*args, **kwargs):
        raise DivergedError("the weights were no longer finite")

    monkeypatch.setattr(harness, "execute", explode)
    found, arrays = train(Planned({}, config(1.0)))
    row = made({}, **found)
    assert row.diverged
    assert arrays == {}
    assert row.validation("auroc") == -math.inf
    assert cell([row], "auroc") == "diverged"


def test_tables_are_made_of_groups_of_rows():
    rows = [
        made({"method": m, "seed": s}, test={"auroc": v}) for m, s, v in (("a", 0, 0.5), ("b", 0, 1), ("a", 1, 0.7))
    ]
    assert {name: cell(own, "auroc") for name, own in group(rows, "method").items()} == {
        "a": "0.6000 ± 0.1414", "b": "1.0000",
    }  # fmt: skip
    assert list(group(rows, "method", "seed")) == [("a", 0), ("b", 0), ("a", 1)]
