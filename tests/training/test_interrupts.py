"""Ctrl-C in `fit`: the round is finished, and the result so far is returned."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn

from fedxl import FeDXL2, Result, auroc, fit
from fedxl.training.settings import Hooks, Progress
from tests.conftest import make_clients


@pytest.fixture(autouse=True)
def pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler, "put back after every run"


def fitted(presses: dict[int, int], **more) -> tuple[Result, list[str]]:
    """A run of six rounds in which Ctrl-C is pressed so many times after some of them, and what it said."""
    lines = list[str]()

    def press(now: Progress) -> None:
        for _ in range(presses.get(now.round, 0)):
            os.kill(os.getpid(), signal.SIGINT)

    clients = [(x.float(), y) for x, y in make_clients([(4, 4)] * 2)]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Linear(5, 1)
    hooks = Hooks(on_progress=press, say=lines.append)
    settings = {
        "rounds": 6,
        "local_steps": 2,
        "batch_size": 2,
        "device": "cpu",
        "eval_every": 1,
        "checkpoint_every": 9,
    }
    algorithm = FeDXL2(auroc(), lr=0.1)
    return fit(model, clients, algorithm, validation=clients[0], hooks=hooks, **settings, **more), lines


def test_one_ctrl_c_returns_the_result_so_far_and_another_run_goes_on_from_it(tmp_path):
    whole, _ = fitted({})
    assert not whole.interrupted
    found, lines = fitted({2: 1}, out=tmp_path / "run")
    assert found.interrupted
    assert [row["round"] for row in found.history] == [1, 2, 3], "the round in which it was pressed is finished"
    assert found.history[-1]["validation"] == whole.history[2]["validation"]
    assert lines.count("finishing the round, then stopping (again: stop at once) ...") == 1
    resumed, _ = fitted({}, out=tmp_path / "run", resume=True)
    assert not resumed.interrupted
    assert torch.equal(resumed.weights.params["weight"], whole.weights.params["weight"])


def test_a_second_ctrl_c_stops_at_once():
    with pytest.raises(KeyboardInterrupt):
        fitted({2: 2})


def test_a_handler_of_the_callers_own_stays():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        assert not fitted({2: 1})[0].interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert heard == [1]


def test_a_run_in_another_thread_is_none_of_signals_business():
    found = []
    thread = threading.Thread(target=lambda: found.append(fitted({})[0]))
    thread.start()
    thread.join()
    assert not found[0].interrupted
