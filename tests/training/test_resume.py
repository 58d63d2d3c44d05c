"""Nothing is lost: runs killed at random moments end with the same bits, and damaged checkpoints are noticed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedxl import ALGORITHMS, UserError, auroc, partial_auc, tree
from fedxl.data.examples import Examples
from fedxl.training.run_writer import STATES, load_latest, save_checkpoint
from fedxl.training.settings import Hooks
from tests.conftest import RAGGED, Clients, make_clients, until
from tests.running import fit_named

KILLS = 20
ROUNDS = 400


def settings() -> dict:
    return {
        "rounds": ROUNDS, "local_steps": 2, "batch1": 2, "batch2": 3, "cohort": 4, "lr": 0.05,
        "eval_every": 20, "checkpoint_every": 3, "executor": "vmap", "dtype": "float64", "seed": 5,
        "pool_rounds": 2,
    }  # fmt: skip


def model() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def run(out: Path | None, resume: bool = False, **changes):
    torch.set_num_threads(1)
    validation = make_clients([(20, 30)], seed=9)[0]
    say = changes.pop("say", lambda line: None)
    return fit_named(
        model(), make_clients(RAGGED), partial_auc(), validation=validation, test=validation,
        out=out, resume=resume, hooks=Hooks(say=say), **{**settings(), **changes},
    )  # fmt: skip


def in_child(out: Path) -> multiprocessing.Process:
    """A real process, forked so that it need not import torch again."""
    process = multiprocessing.get_context("fork").Process(target=run, args=(out, True))
    process.start()
    return process


def rounds_done(out: Path) -> int:
    return max((int(path.stem.split("-")[-1]) for path in out.glob("checkpoints/*.safetensors")), default=0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_at_random_moments_the_run_ends_with_the_same_bits(tmp_path):
    whole = run(tmp_path / "whole")
    chance = random.Random(0)
    out, progress = tmp_path / "killed", set()
    for kill in range(KILLS):
        # Each kill waits for the run to have got somewhere, then for a random part of a few rounds: however fast the
        # machine has become since the undisturbed run, the run is not over before its last kill.
        process, somewhere = in_child(out), ROUNDS * kill // (KILLS + 10)
        until(lambda somewhere=somewhere: rounds_done(out) >= somewhere, process.is_alive)
        process.join(chance.uniform(0, 5) * whole.seconds / ROUNDS)
        assert process.is_alive(), f"the run ended by itself before kill {kill}, with exit code {process.exitcode}"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        checkpoint, complaints = load_latest(out / "checkpoints")
        assert not complaints, "a kill must not leave a damaged checkpoint"
        progress.add(checkpoint.info["round"] if checkpoint else 0)
    assert len(progress) > KILLS // 2, "kills must have hit different stages of the run"

    resumed = run(out, resume=True)
    for name, expected in tree.pack(whole.server).items():
        assert torch.equal(tree.pack(resumed.server)[name], expected), name
    assert all(torch.equal(resumed.weights.params[n], w) for n, w in whole.weights.params.items())
    assert resumed.best_round == whole.best_round
    assert resumed.metrics["test"] == whole.metrics["test"]

    def records(path: Path) -> list[dict]:
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if not key.endswith("seconds")} for line in lines]

    assert records(out) == records(tmp_path / "whole"), "each round is recorded once"


DAMAGE = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "a flipped bit": lambda content: content[:-20] + bytes([content[-20] ^ 1]) + content[-19:],
    "rubbish": lambda content: os.urandom(len(content)),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_used(tmp_path, damage):
    expected = run(None, rounds=9)
    run(tmp_path, rounds=9)
    newest = sorted((tmp_path / "checkpoints").glob("*.safetensors"))[-1]
    newest.write_bytes(DAMAGE[damage](newest.read_bytes()))
    lines: list[str] = []
    resumed = run(tmp_path, resume=True, rounds=9, say=lines.append)
    assert any(newest.name in line and "damaged" in line for line in lines), lines
    assert newest.with_suffix(".damaged").exists(), "it is set aside, not counted among the good ones"
    assert all(torch.equal(resumed.weights.params[n], w) for n, w in expected.weights.params.items())


def test_with_no_whole_checkpoint_it_starts_again(tmp_path):
    expected = run(tmp_path, rounds=6)
    for path in (tmp_path / "checkpoints").glob("*.safetensors"):
        path.write_bytes(b"rubbish")
    lines: list[str] = []
    resumed = run(tmp_path, resume=True, rounds=6, say=lines.append)
    assert any("from the beginning" in line for line in lines)
    assert all(torch.equal(resumed.weights.params[n], w) for n, w in expected.weights.params.items())


def test_stopping_finishes_the_round_and_resuming_goes_on(tmp_path):
    expected = run(None, rounds=12)
    asked = iter([False, False, False, False, True])
    stopped = fit_named(
        model(), make_clients(RAGGED), partial_auc(), validation=make_clients([(20, 30)], seed=9)[0], out=tmp_path,
        hooks=Hooks(should_stop=lambda: next(asked)), **{**settings(), "rounds": 12},
    )  # fmt: skip
    assert stopped.interrupted
    assert load_latest(tmp_path / "checkpoints")[0].info["round"] == 4
    resumed = run(tmp_path, resume=True, rounds=12)
    assert all(torch.equal(resumed.weights.params[n], w) for n, w in expected.weights.params.items())


def test_a_resumed_run_knows_what_its_rounds_have_cost(tmp_path):
    expected = run(tmp_path, rounds=20).traffic
    assert expected is not None
    assert run(tmp_path, resume=True, rounds=20).traffic == expected, "with no round left to measure it in"


@pytest.mark.parametrize("seed", range(3))
def test_a_finished_run_can_be_extended(tmp_path, seed):
    """Evaluated after 6 rounds because it ended there, it is not chosen when the run turns out longer."""
    run(tmp_path, rounds=6, eval_every=4, seed=seed)
    changes = {"rounds": 11, "eval_every": 4, "seed": seed}
    longer, straight = run(tmp_path, resume=True, **changes), run(None, **changes)
    assert all(torch.equal(longer.weights.params[n], w) for n, w in straight.weights.params.items())
    assert longer.best_round == straight.best_round
    assert [record["round"] for record in longer.history] == [4, 8, 11]


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_takes_up_its_state(tmp_path, algorithm, buffers):
    parts = (model(), make_clients([(6, 14), (3, 9), (5, 7)]), auroc())
    options = {"local_steps": 2, "batch1": 2, "batch2": 3, "dtype": "float64", "buffers": buffers, "executor": "loop"}
    fit_named(*parts, algorithm, rounds=2, out=tmp_path, **options)
    resumed = fit_named(*parts, algorithm, rounds=5, out=tmp_path, resume=True, **options)
    straight = fit_named(*parts, algorithm, rounds=5, **options)
    for name, expected in tree.pack(straight.server).items():
        found = tree.pack(resumed.server)[name]
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=name)


def test_a_hyper_parameter_at_its_default_may_be_given_or_left_out(tmp_path):
    run(tmp_path, rounds=3)
    run(tmp_path, resume=True, rounds=4, gamma=0.1, buffers="average")
    with pytest.raises(UserError, match=r"algorithm.gamma was 0\.1 and is now 0\.2"):
        run(tmp_path, resume=True, rounds=5, gamma=0.2)


def test_other_settings_are_refused(tmp_path):
    run(tmp_path, rounds=6)
    with pytest.raises(UserError, match=r"lr was 0\.05 and is now 0\.1"):
        run(tmp_path, resume=True, rounds=12, lr=0.1)


@pytest.mark.parametrize(
    ("model_", "clients", "risk", "named"),
    [
        (nn.Linear(5, 1).double(), None, None, "task.model"),
        (None, make_clients([(5, 5), (6, 6)]), None, "task.clients"),
        (None, None, partial_auc(lam=0.3), "task.risk"),
        (
            None,
            None,
            partial_auc(margin=2.0),
            r"task.risk_name was 'partial_auc\(\)' and is now 'partial_auc\(margin=2.0\)'",
        ),
    ],
    ids=["another model", "other clients", "another risk", "another margin"],
)
def test_another_task_is_refused(tmp_path, model_, clients, risk, named):
    run(tmp_path, rounds=3)
    options = {**settings(), "rounds": 6, "cohort": min(4, len(clients or RAGGED))}
    parts = (model_ or model(), clients or make_clients(RAGGED), risk or partial_auc())
    with pytest.raises(UserError, match=named):
        fit_named(*parts, out=tmp_path, resume=True, **options)


def turned(clients: Clients) -> Clients:
    """The same labels and the same first examples; one number of the last one is another."""
    (*others, (x, y)) = clients
    x = x.clone()
    x[-1, -1] += 1e-6
    return [*others, (x, y)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"clients": turned(make_clients(RAGGED))}, "task.examples"),
        ({"validation": turned(make_clients([(20, 30)], seed=9))[0]}, "task.validation"),
        ({"test": turned(make_clients([(20, 30)], seed=9))[0]}, None),
    ],
    ids=["training data", "validation data", "test data, by which nothing is decided"],
)
def test_one_number_that_has_changed_is_noticed(tmp_path, changes, named):
    run(tmp_path, rounds=3)
    held = make_clients([(20, 30)], seed=9)[0]
    data = {"clients": make_clients(RAGGED), "validation": held, "test": held, **changes}

    def again() -> None:
        fit_named(model(), risk=partial_auc(), out=tmp_path, resume=True, **data, **{**settings(), "rounds": 4})

    if named:
        with pytest.raises(UserError, match=f"{named} was '[0-9a-f]+' and is now"):
            again()
    else:
        again()


def rewritten(out: Path, change: Callable[[dict, dict], None]) -> None:
    """The newest checkpoint with other contents, and a checksum that is right."""
    checkpoint = load_latest(out / "checkpoints")[0]
    tensors, info = dict(checkpoint.tensors), dict(checkpoint.info)
    change(tensors, info)
    save_checkpoint(out / "checkpoints", checkpoint.info["round"], tensors, info)


@pytest.mark.parametrize("before", [None, 3], ids=["of a version that did not say", "of one that did"])
def test_a_checkpoint_of_an_older_version_is_refused(before, tmp_path):
    run(tmp_path, rounds=3)

    def older(tensors: dict, info: dict) -> None:
        del info["settings"][STATES]
        info["settings"] |= {STATES: before} if before else {"run.cohorts_by_size": True}

    rewritten(tmp_path, older)
    with pytest.raises(UserError, match="began with another version of fedxl, whose states differ") as error:
        run(tmp_path, resume=True, rounds=6)
    assert "\n" not in str(error.value)


def test_data_that_are_mapped_from_a_file_are_never_held_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(tree, "PIECE", 1000)
    np.save(tmp_path / "x.npy", np.arange(6000, dtype=np.float32).reshape(60, 100))
    mapped = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    sizes: list[int] = []

    class Recording:
        def update(self, content) -> None:
            sizes.append(len(content))

    tree.add_tensor(Recording(), "x", mapped)
    assert sum(sizes[1:]) == 24000
    assert max(sizes) <= 1000


def test_every_example_counts():
    x, y = torch.randn(3000, 2), torch.zeros(3000, 1, dtype=torch.int64)
    changed, flipped = x.clone(), y.clone()
    changed[2999, 1] += 1
    flipped[2999] = 1
    whole = Examples(x, y).fingerprint()
    assert Examples(x.clone(), y.clone()).fingerprint() == whole
    assert Examples(changed, y).fingerprint() != whole
    assert Examples(x, flipped).fingerprint() != whole


STRANGE = {
    "a tensor too few": (lambda t, i: t.pop("server.step"), "it lacks server.step"),
    "a tensor too many": (lambda t, i: t.update(more=torch.ones(1)), "it holds more, which is unexpected"),
    "another shape": (lambda t, i: t.update({"best.params.0.bias": torch.ones(9).double()}), r"\[9\] instead of"),
    "another type": (lambda t, i: t.update({"server.step": torch.tensor(3.0)}), "float32 .* instead of int64"),
    "a pool of two lengths": (lambda t, i: t.update({"server.pool.first.age": torch.zeros(3).long()}), "pool.first"),
    "a client too many": (lambda t, i: t.update({"population.rounds.9": torch.tensor(1)}), "not among these 6"),
    "a client that is none": (lambda t, i: t.update({"population.rounds.x": torch.tensor(1)}), "not among these 6"),
    "half a client": (lambda t, i: t.pop("population.states.0.u"), "it lacks states.0.u"),
    "another client's state": (lambda t, i: t.update({"population.states.0.u": torch.ones(2)}), "states.0.u is"),
    "rounds of no number": (lambda t, i: t.update({"population.rounds.0": torch.ones(2)}), "rounds.0 is float32"),
    "no round": (lambda t, i: i.pop("round"), "'checkpoint.round' is missing"),
    "a round that is none": (lambda t, i: i.update(round="3"), "'checkpoint.round' must be a whole number"),
    "a negative round": (lambda t, i: i.update(round=-3), "its round is -3"),
    "settings that are none": (lambda t, i: i.update(settings=[]), "'checkpoint.settings' must be"),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(STRANGE))
def test_a_whole_checkpoint_of_something_else_is_one_line(tmp_path, kind):
    change, line = STRANGE[kind]
    run(tmp_path, rounds=3)
    rewritten(tmp_path, change)
    with pytest.raises(UserError, match=line) as refused:
        run(tmp_path, resume=True, rounds=4)
    assert len(str(refused.value).splitlines()) == 1
    assert not list(tmp_path.glob("checkpoints/*.damaged"))


ODD = [
    "5", "{}", '{"rou', "null", '"round"', '["round"]', "[" * 5000, '{"round": 1e400}', '{"round": NaN}',
    '{"round": 2.5}', '{"round": "2"}', '{"round": true}', f'{{"round": {10**300}}}', f'{{"round": {"9" * 5000}}}',
    '{"round": 2, "validation": 3}', '{"round": 2, "validation": {"auroc": "high"}}', '{"round": 2, "test": [1]}',
    f'{{"round": 2, "validation": {{"auroc": {10**400}}}}}', '{"round": 2, "seconds": "long"}',
    '{"round": 2, "best_round": [], "test": {}}', '{"round": 2, "validation_by_site": {"a": {"positives": null}}}',
]  # fmt: skip


def test_metrics_that_were_tampered_with(tmp_path):
    """Rubbish among the lines is left out and told; the good lines stay."""
    run(tmp_path, rounds=8, eval_every=2)
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_bytes("\n".join([lines[0], *ODD, *lines[1:]]).encode() + b"\n\xff\xfe\n")
    said: list[str] = []
    resumed = run(tmp_path, resume=True, rounds=10, eval_every=2, say=said.append)
    assert [record["round"] for record in resumed.history] == [2, 4, 6, 8, 10]
    assert any(f"{len(ODD) + 1} unreadable" in line for line in said)


def test_no_bit_of_a_checkpoint_can_flip_unnoticed(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"w": torch.arange(3.0)}, {"round": 1, "settings": {"lr": 0.1}})
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        checkpoint, complaints = load_latest(tmp_path)
        path.with_suffix(".damaged").unlink(missing_ok=True)
        same = (
            checkpoint and torch.equal(checkpoint.tensors["w"], torch.arange(3.0)) and checkpoint.info["round"] == 1
        )
        assert complaints or same, f"byte {position}"


def test_only_one_process_at_a_time(tmp_path):
    process = in_child(tmp_path)
    try:
        until(lambda: (tmp_path / "checkpoints").exists(), process.is_alive)
        with pytest.raises(UserError, match="another process"):
            run(tmp_path, resume=True)
    finally:
        process.kill()
        process.join()


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, monkeypatch):
    run(tmp_path, rounds=6)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        run(tmp_path, resume=True, rounds=12)
    monkeypatch.undo()
    assert load_latest(tmp_path / "checkpoints")[0].info["round"] == 6


def test_checkpoints_hold_every_dtype(tmp_path):
    tensors = {
        "half": torch.ones(3, dtype=torch.bfloat16), "scalar": torch.tensor(3), "none": torch.empty(0, 2),
        "nan": torch.tensor([float("nan")]), "view": torch.arange(4.0).expand(2, 4), "flag": torch.tensor([True]),
    }  # fmt: skip
    save_checkpoint(tmp_path, 1, tensors, {"round": 1})
    checkpoint, complaints = load_latest(tmp_path)
    assert not complaints
    for name, tensor in tensors.items():
        torch.testing.assert_close(checkpoint.tensors[name], tensor, equal_nan=True, rtol=0, atol=0)
