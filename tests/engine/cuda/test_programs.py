"""Compiled programs: which runs share one, where it is found again, and what it must not keep."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fedxl.engine.cuda.capture import again
from fedxl.engine.cuda.graph import GraphExecutor
from fedxl.engine.cuda.trace import fuse, trace
from fedxl.engine.executors import loop
from fedxl.models.precision import PRECISIONS, products
from tests.conftest import RAGGED, make_clients
from tests.engine.cuda.test_graph import Run
from tests.engine.cuda.traces import compiles
from tests.engine.test_executors import assert_agree


@pytest.fixture
def compiled(monkeypatch) -> list[Any]:
    """The traces that were given to the compiler, which leaves them as they are here."""
    given: list[Any] = []
    monkeypatch.setattr("fedxl.engine.cuda.trace._compiled", {})
    monkeypatch.setattr("fedxl.engine.cuda.trace.COMPILES_FROM", (0,))
    monkeypatch.setattr("fedxl.engine.cuda.trace._compile", lambda module, inputs: given.append(module) or module)
    return given


@pytest.mark.parametrize("layout", ["streams", "vectorised"])
@pytest.mark.parametrize("method", ["fedxl2", "local_sgd", "codasca"])
def test_runs_that_differ_in_what_is_tuned_share_one_program(compiled, network, layout, method):
    def run(executor, lam: float, **rates: Any) -> dict:
        return Run(executor, network(), method=method, options=rates, lam=lam).state(0, 0, 0)

    settings = ((1.0, 0.1, 2), (3.0, 0.3, 4), (2.0, 1.0, 7))
    for lam, lr, step in settings:
        stages = {"stage_steps": step + 1} if method == "codasca" else {}
        tuned = {"lam": lam, "lr": lr, "milestones": (step,), **stages}
        assert_agree(run(GraphExecutor(capture=again, layout=layout), **tuned), run(loop, **tuned))
    assert len(compiled) == 1


@pytest.mark.parametrize("layout", ["streams", "vectorised"])
@pytest.mark.parametrize(
    ("method", "others"),
    [
        ("fedxl2", {"lr": 1.0, "beta": 0.9, "gamma": 0.8, "weight_decay": 0.05}),
        ("local_sgd", {"lr": 0.3, "weight_decay": 0.01}),
        ("codasca", {"lr": 0.3, "proximal": 100.0}),
    ],
)
def test_what_a_search_changes_is_compiled_once(compiled, network, layout, method, others):
    """Each number of these alone, and all together, without milestones: one program, and the numbers of the loop."""
    first = {
        "fedxl2": {"lr": 0.1, "beta": 0.2, "gamma": 0.3, "weight_decay": 0.02},
        "local_sgd": {"lr": 0.1, "weight_decay": 0.02},
        "codasca": {"lr": 0.1},
    }[method]
    for options in (first, *({**first, name: value} for name, value in others.items()), {**first, **others}):
        executor = GraphExecutor(capture=again, layout=layout)
        found = Run(executor, network(), method=method, options=options).state(0, 0)
        assert_agree(Run(loop, network(), method=method, options=options).state(0, 0), found)
    assert len(compiled) == 1


@compiles
def test_what_was_compiled_once_is_found_on_disk_by_a_run_tuned_otherwise(monkeypatch, tmp_path, network):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters["inductor"].clear()
    for lr, lam in ((0.1, 2.0), (0.3, 1.0)):
        monkeypatch.setattr("fedxl.engine.cuda.trace._compiled", {})  # as in another process
        Run(GraphExecutor(capture=again), network(), options={"lr": lr, "milestones": (4,)}, lam=lam).state(0, 0)
    assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (1, 1)


@compiles
def test_a_program_that_was_kept_serves_the_next_run_and_keeps_no_data(monkeypatch, tmp_path, network):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("fedxl.engine.cuda.trace._compiled", {})
    counters["inductor"].clear()
    data = []
    for seed, lr in ((0, 0.1), (1, 1.0)):
        options = {"clients": make_clients(RAGGED, seed=seed), "options": {"lr": lr, "milestones": (4,)}}
        executor = GraphExecutor(capture=again)
        assert_agree(
            Run(executor, network(), **options).state(0, 0, 0), Run(loop, network(), **options).state(0, 0, 0)
        )
        data.append(weakref.ref(max(executor.captured.plan.traced.constants, key=torch.Tensor.numel)))
    assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (1, 0)
    del executor, options
    gc.collect()
    assert [found() for found in data] == [None, None]


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
