"""Disks that fail: one line, nothing lost, and going on later comes to the same bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from fedxl import UserError, partial_auc, tree
from fedxl.deploy.site import cache, requests
from fedxl.training.result import Result
from fedxl.training.run_writer import load_checkpoint, load_latest, save_checkpoint
from fedxl.training.settings import Hooks
from tests.conftest import make_clients
from tests.deploy.federated import site_file
from tests.deploy.test_sites import train_request
from tests.running import fit_named
from tests.training.faults import Disk, failing

T = TypeVar("T")
BEGUN, ROUNDS = 2, 4
pytestmark = pytest.mark.usefixtures("impatient")


def run(out: Path | None, resume: bool = False, rounds: int = ROUNDS, **hooks: Any) -> Result:
    held = make_clients([(6, 9)], seed=9)[0]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Linear(5, 1).double()
    return fit_named(
        model, make_clients([(3, 4), (2, 5)]), partial_auc(), "fedxl2", rounds=rounds, local_steps=1, batch1=2,
        batch2=2, eval_every=1, checkpoint_every=1, executor="loop", dtype="float64", validation=held, test=held,
        out=out, resume=resume, hooks=Hooks(**{"say": lambda line: None, **hooks}),
    )  # fmt: skip


def outcome(result: Result, out: Path) -> tuple[dict[str, Tensor], Any, Any]:
    """All that a run came to, but for how long it took."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    records = [{key: value for key, value in line.items() if not key.endswith("seconds")} for line in lines]
    return tree.pack(result.server), (result.best_round, result.metrics["test"]), records


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert found[0].keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        torch.testing.assert_close(found[0][name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    assert found[1:] == expected[1:]


def assert_whole(out: Path) -> None:
    """What is there under its own name is whole; a crash may have cut off the last line of metrics, and only that."""
    files = sorted((out / "checkpoints").glob("*"))
    assert not [path for path in files if path.suffix == ".damaged"], "a disk that fails is no damage"
    for path in files:
        if not path.name.startswith("."):
            assert load_checkpoint(path.parent, int(path.stem.removeprefix("round-"))), path
    assert [path for path in files if path.suffix == ".safetensors"], "the last good state is still there"
    for line in (out / "metrics.jsonl").read_text().splitlines()[:-1]:
        json.loads(line)


def one_line(act: Callable[[], T]) -> T | None:
    """What comes of it, or nothing, and then the fault is told in one line."""
    told = ""
    try:
        return act()
    except UserError as error:
        told = str(error)
    assert len(told.splitlines()) == 1
    assert "Input/output error" in told or "No space left on device" in told
    return None


@pytest.mark.parametrize("full", [False, True], ids=["input/output errors", "a full disk"])
def test_whatever_access_fails_a_run_goes_on_to_the_same_bits(tmp_path, full):
    begun, whole = tmp_path / "begun", tmp_path / "whole"
    run(begun, rounds=BEGUN)
    shutil.copytree(begun, whole)
    expected = outcome(run(whole, resume=True), whole)
    fired: list[str] = []
    while True:
        out = tmp_path / f"fault-{len(fired)}"
        shutil.copytree(begun, out)
        with failing(Disk(out, at=len(fired), full=full)) as disk:
            result = one_line(lambda out=out: run(out, resume=True))
        if result:
            assert_same(outcome(result, out), expected)
        if not disk.fired:
            break
        fired.append(disk.fired)
        assert_whole(out)
        assert_same(outcome(run(out, resume=True), out), expected)
        shutil.rmtree(out)
    assert {"write", "fsync"} <= set(fired)
    assert full or {"read", "listdir", "replace", "unlink", "open to write"} <= set(fired)
    assert len(fired) > 20, "the run must have met with many"


def test_reads_and_writes_that_do_half_of_it_do_no_harm(tmp_path):
    run(tmp_path / "whole", rounds=BEGUN)
    shutil.copytree(tmp_path / "whole", tmp_path / "short")
    expected = outcome(run(tmp_path / "whole", resume=True), tmp_path / "whole")
    with failing(Disk(tmp_path / "short", short=True)) as disk:
        found = run(tmp_path / "short", resume=True)
    assert disk.count > 50, "it was read and written in pieces"
    assert_same(outcome(found, tmp_path / "short"), expected)


def test_a_checkpoint_that_cannot_be_read_is_not_damaged(tmp_path):
    run(tmp_path, rounds=BEGUN)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for number in range(1, 4):  # of the folder, of the newest, and in the middle of it
        with failing(Disk(tmp_path / "checkpoints", at=number - 1)), pytest.raises(UserError, match="cannot read"):
            run(tmp_path, resume=True)
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_metrics_that_cannot_be_read_are_not_written_over(tmp_path):
    run(tmp_path, rounds=BEGUN)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with failing(Disk(tmp_path / "metrics.jsonl", at=0)), pytest.raises(UserError, match=r"cannot read .*metrics"):
        run(tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("full", [False, True], ids=["input/output errors", "a full disk"])
def test_whatever_access_fails_a_site_answers_the_same_later(tmp_path, full):
    """A site's state is neither lost nor taken for lost."""
    _, asked = train_request(tmp_path / "begun")
    mine = site_file(tmp_path / "begun", 0)
    expected = requests.train(mine, asked)
    assert expected.facts["note"] == ""
    fired: list[str] = []
    while True:
        shutil.copytree(tmp_path / "begun", tmp_path / "fault")
        mine = site_file(tmp_path / "fault", 0)
        with failing(Disk(mine.state, at=len(fired), full=full)) as disk:
            meanwhile = one_line(lambda mine=mine: requests.train(mine, asked))
        for found in filter(None, (meanwhile, requests.train(mine, asked))):
            assert found.facts == expected.facts
            for name, tensor in expected.tensors.items():
                torch.testing.assert_close(found.tensors[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
        shutil.rmtree(tmp_path / "fault")
        if not disk.fired:
            break
        fired.append(disk.fired)
    assert {"write", "fsync"} <= set(fired)
    assert full or {"read", "replace", "open to write"} <= set(fired)


@pytest.mark.parametrize("full", [False, True], ids=["input/output errors", "a full disk"])
def test_whatever_access_fails_a_site_has_its_data_later(tmp_path, full):
    expected = cache.training_data(site_file(tmp_path / "whole", 0))
    fired: list[str] = []
    while True:
        mine = site_file(tmp_path / str(len(fired)), 0)
        mine.folder.mkdir(parents=True)
        with failing(Disk(mine.cache, at=len(fired), full=full)) as disk:
            one_line(lambda mine=mine: cache.prepare(mine))
        found = cache.training_data(mine)
        assert torch.equal(found.x, expected.x)
        assert torch.equal(found.y, expected.y)
        if not disk.fired:
            break
        fired.append(disk.fired)
    assert {"write", "fsync"} <= set(fired)


def test_of_two_checkpoints_a_fault_leaves_at_least_one(tmp_path):
    """Also where there was only one before."""
    save_checkpoint(tmp_path, 1, {"w": torch.ones(3)}, {"round": 1})
    number = 0
    while True:
        with failing(Disk(tmp_path, at=number)) as disk:
            try:
                save_checkpoint(tmp_path, 2, {"w": torch.zeros(3)}, {"round": 2})
            except OSError:
                assert disk.fired
        found, complaints = load_latest(tmp_path)
        assert found
        assert not complaints
        if not disk.fired:
            break
        number += 1
    assert number > 4
