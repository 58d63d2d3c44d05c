"""Compiled programs: which runs share one, where it is found again, and what it must not keep."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fedxl.engine.cuda.graph import GraphExecutor
from fedxl.engine.cuda.trace import fuse, trace
from fedxl.engine.executors import loop
from fedxl.models.functional import PRECISIONS, products
from tests.conftest import RAGGED, make_clients
from tests.engine.cuda.test_graph import Run
from tests.engine.cuda.traces import compiles
from tests.engine.test_executors import assert_agree
from tests.running import again


@pytest.fixture
def compiled(monkeypatch) -> list[Any]:
    """The traces that were given to the compiler, which leaves them as they are here."""
    given: list[Any] = []
    monkeypatch.setattr("fedxl.engine.cuda.trace._compiled", {})
    monkeypatch.setattr("fedxl.engine.cuda.trace.COMPILES_FROM", (0,))
    monkeypatch.setattr("fedxl.engine.cuda.trace._compile", lambda module, inputs: given.append(module) or module)
    return given


TUNED = {
    "fedxl2": {"lr": (0.1, 1.0), "beta": (0.2, 0.9), "gamma": (0.3, 0.8), "weight_decay": (0.02, 0.05)},
    "local_sgd": {"lr": (0.1, 0.3), "weight_decay": (0.02, 0.01)},
    "codasca": {"lr": (0.1, 0.3), "proximal": (50.0, 100.0), "stage_steps": (3, 8)},
}


@pytest.mark.parametrize("milestones", [None, ((2,), (7,))], ids=["one rate", "milestones"])
@pytest.mark.parametrize("layout", ["streams", "vectorised"])
@pytest.mark.parametrize("method", list(TUNED))
def test_what_a_search_changes_is_compiled_once(compiled, network, method, layout, milestones):
    """Two runs that differ in all that is tuned: one program, and each has the numbers of its loop."""
    for lam, at in ((1.0, 0), (3.0, 1)):
        options = {name: values[at] for name, values in TUNED[method].items()}
        options |= {"milestones": milestones[at]} if milestones else {}
        found, expected = (
            Run(executor, network(), method=method, options=options, lam=lam).state(0, 0, 0)
            for executor in (GraphExecutor(capture=again, layout=layout), loop)
        )
        assert_agree(expected, found)
    assert len(compiled) == 1


@compiles
def test_a_program_serves_the_next_run_and_keeps_no_data_and_another_process_finds_it_on_disk(
    monkeypatch, tmp_path, network
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("fedxl.engine.cuda.trace._compiled", {})
    counters["inductor"].clear()
    data = []

    def run(executor, seed: int, lr: float) -> dict:
        options = {"clients": make_clients(RAGGED, seed=seed), "options": {"lr": lr, "milestones": (4,)}}
        return Run(executor, network(), **options, lam=1 + lr).state(0, 0, 0)

    def run_both(seed: int, lr: float) -> tuple[int, int]:
        executor = GraphExecutor(capture=again)
        assert_agree(run(executor, seed, lr), run(loop, seed, lr))
        data.append(weakref.ref(max(executor.captured.plan.traced.constants, key=torch.Tensor.numel)))
        return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]

    assert run_both(0, 0.1) == (1, 0)
    assert run_both(1, 1.0) == (1, 0), "the compiler is not asked again"
    gc.collect()
    assert [found() for found in data] == [None, None]
    monkeypatch.setattr("fedxl.engine.cuda.trace._compiled", {})  # as in another process
    assert run_both(0, 0.3) == (1, 1)


def test_programs_of_other_precision_are_not_taken(monkeypatch):
    monkeypatch.setattr("fedxl.engine.cuda.trace._compiled", {})
    monkeypatch.setattr("fedxl.engine.cuda.trace._compile", lambda module, inputs: object())
    traced = trace(lambda x: x.copy_(x @ x), [torch.eye(3)])

    def program(precision: str, x: torch.Tensor) -> object:
        with products(PRECISIONS[precision]):
            return fuse(traced.module, traced.inputs([x]))

    x, other = torch.eye(3), torch.eye(3)
    assert program("fp32", x) is program("fp32", other)
    assert program("tf32", x) is not program("fp32", x)
    assert program("fp32", x.double()) is not program("fp32", x)
    assert program("fp32", torch.eye(6)[::2, ::2]) is not program("fp32", x)


def test_a_process_keeps_what_it_has_compiled(monkeypatch, network):
    compiled: list[Any] = []
    monkeypatch.setattr("fedxl.engine.cuda.trace._compiled", {})
    monkeypatch.setattr("fedxl.engine.cuda.trace.COMPILES_FROM", (0,))
    monkeypatch.setattr("fedxl.engine.cuda.trace.MOST_PROGRAMS", 2)
    monkeypatch.setattr("fedxl.engine.cuda.trace._compile", lambda module, inputs: compiled.append(module) or module)

    def run(executor, lr: float, **settings: Any) -> dict:
        options = {"lr": lr, "milestones": (4,)}
        return Run(executor, network(), options=options, **settings).state(0, 0, 0)

    for lr in (0.1, 0.3, 1.0):  # the others with the first one's program, and their own rates
        assert_agree(run(GraphExecutor(capture=again), lr), run(loop, lr))
    assert len(compiled) == 1
    run(GraphExecutor(capture=again), 0.1, clients_at_once=2)
    run(GraphExecutor(capture=again), 0.1, clients_at_once=3)
    assert len(compiled) == 3, "other sizes are other programs"
    run(GraphExecutor(capture=again), 0.1)
    assert len(compiled) == 4, "the oldest had to go"


@pytest.mark.parametrize("view", [torch.Tensor.view, torch.ops.aten._unsafe_view], ids=["view", "that says nothing"])
def test_a_number_that_a_step_writes_to_is_not_made_an_input(view):
    def step(x: torch.Tensor) -> None:
        total = torch.full((3,), 0.5)
        view(total, [3]).add_(x)
        x.copy_(torch.full((3,), 0.25) + total)

    traced = trace(step, [torch.zeros(3)])
    for _ in range(2):
        x = torch.ones(3)
        traced.module(*traced.inputs([x]))
        assert x.tolist() == [1.75] * 3
