"""The graph executor by its stand-in for CUDA: memory, parts, fallbacks, layouts and what is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fedxl import auroc, partial_auc, sampling, tree
from fedxl.algorithms import LocalSGD, build
from fedxl.data.inputs import from_arrays
from fedxl.engine.cuda import lanes
from fedxl.engine.cuda.graph import GraphExecutor
from fedxl.engine.cuda.lanes import Play, divisor
from fedxl.engine.drawing import Drawing
from fedxl.engine.executors import Group, loop
from fedxl.models import cnn, mlp, resnet18, weights_of
from tests.conftest import EXECUTORS, RAGGED, make_clients, replaying
from tests.engine.cuda.traces import compiles
from tests.engine.test_executors import Branches, assert_agree
from tests.running import again, engine_for, fit_named, play


class Run:
    """Rounds of an algorithm on small ragged clients."""

    def __init__(
        self, executor, model: nn.Module, clients=None, method: Any = "fedxl2", options: Any = None,
        lam: float = 1.0, **engine: Any,
    ) -> None:  # fmt: skip
        federation = from_arrays(clients or make_clients(RAGGED))
        self.model, self.clients = model, len(federation.parts)
        make = partial(build, method) if isinstance(method, str) else method
        algorithm = make(partial_auc(lam), **(options or {"lr": 0.1}))
        settings = {"local_steps": 3, "batch1": 4, "batch2": 5} | engine
        self.engine = engine_for(algorithm, model, federation, executor, **settings)
        self.algorithm = self.engine.algorithm
        self.server = self.algorithm.init(weights_of(model))
        self.number = 0

    def round(self, cohort: int = 0) -> None:
        members = sampling.cohort(0, self.number, self.clients, cohort)
        self.server = play(self.algorithm, self.engine, self.server, self.number, members)
        self.number += 1

    def state(self, *cohorts: int) -> dict:
        for cohort in cohorts:
            self.round(cohort)
        return tree.pack({"server": self.server, "population": self.engine.population})


def images(clients: int = 3, size: int = 8) -> list:
    generator = torch.Generator().manual_seed(0)
    y = (torch.arange(12) % 3 == 0).long()
    return [(torch.randn(12, 3, size, size, generator=generator).double(), y) for _ in range(clients)]


def strided() -> nn.Module:
    """All that convolutional networks are made of, on maps down to one pixel."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, 2, 1, bias=False),
        nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 1),
    ).double()  # fmt: skip


def shallow() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 1)
    ).double()  # fmt: skip


def test_draws_are_the_same_bits_in_every_executor(network):
    def feeds(name: str) -> list[dict]:
        seen: list[dict] = []
        inner = EXECUTORS[name]()

        def spy(algorithm, server, group: Group):
            seen.append(tree.pack(tree.map(torch.clone, group.feed.draws)))
            return inner(algorithm, server, group)

        Run(spy, network()).state(0, 4, 4, 3)
        return seen

    expected = feeds("loop")
    assert len(expected) == 4
    for name in EXECUTORS:
        for found, wanted in zip(feeds(name), expected, strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted), name


@pytest.mark.parametrize("layout", ["streams", "vectorised"])
def test_a_step_is_captured_once(layout, network):
    executor = replaying(layout)
    run = Run(executor, network())
    run.state(0, 4)
    captured = executor.captured
    run.state(4, 3, 4)
    assert executor.captured is captured, "a smaller cohort is filled up, not captured anew"
    run.state(5)
    assert executor.at_once == 4, "a larger one goes in parts"
    assert executor.captured is captured
    assert_agree(run.state(), Run(loop, network()).state(0, 4, 4, 3, 4, 5))


@pytest.mark.parametrize("steps", [1, 7, 12])
@pytest.mark.parametrize("layout", ["streams", "vectorised"])
def test_any_number_of_steps(steps, layout, network):
    states = [Run(executor, network(), local_steps=steps).state(0, 0, 4) for executor in (loop, replaying(layout))]
    assert_agree(*states)


@pytest.mark.parametrize("layout", ["streams", "vectorised"])
def test_a_run_that_was_stopped_draws_the_same_dropout(layout):
    """Capturing draws, too; a round must not depend on whether it was the first after a start."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    whole, stopped = Run(replaying(layout), model), Run(replaying(layout), model)
    stopped.state(0, 0)
    stopped.engine.executor = replaying(layout)
    assert_agree(whole.state(0, 0, 0), stopped.state(0), tolerance=0)


def test_clients_that_do_not_fit_go_in_parts(network):
    lines: list[str] = []

    def small(work, repeats, large):
        if len(work) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return again(work, repeats, large)

    executor = GraphExecutor(capture=small, compiled=False, layout="streams", say=lines.append)
    found = Run(executor, network()).state(0, 0, 0, 5)
    assert_agree(Run(loop, network()).state(0, 0, 0, 5), found)
    assert [line for line in lines if "do not fit" in line] == [
        "executor: 6 clients do not fit in the device's memory together, trying 3",
        "executor: 3 clients do not fit in the device's memory together, trying 2",
    ]
    assert executor.at_once == 2


def test_memory_for_not_even_one_is_the_loop(network):
    lines: list[str] = []

    def none(work, repeats, large):
        raise torch.OutOfMemoryError("CUDA out of memory")

    executor = GraphExecutor(capture=none, compiled=False, layout="streams", say=lines.append)
    found = Run(executor, network()).state(0, 0, 3)
    assert_agree(Run(loop, network()).state(0, 0, 3), found)
    assert "not even for one client" in lines[-1]


class Counts(nn.Module):
    """A model whose result has as many numbers as it finds positive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        return self.layer(x) + x[x > 0].mean()


@pytest.mark.parametrize("model", [Branches, Counts])
def test_what_cannot_be_traced_is_looped_over_and_says_why(model):
    lines: list[str] = []
    torch.manual_seed(0)
    network = model().double()
    executor = GraphExecutor(capture=again, compiled=False, say=lines.append)
    found = Run(executor, network).state(0, 0, 4)
    assert_agree(Run(loop, network).state(0, 0, 4), found, tolerance=0)
    assert len(lines) == 1, "told once"
    assert lines[0].startswith("executor: loop, because graph cannot trace this step")
    assert "depends on the numbers it sees" in lines[0]


def test_graph_on_a_cpu_is_the_loop_and_says_so(network):
    lines: list[str] = []
    from fedxl import Hooks

    settings = {"rounds": 1, "local_steps": 2, "batch1": 2, "batch2": 2, "device": "cpu", "executor": "graph"}
    fit_named(network(), make_clients(RAGGED), auroc(), dtype="float64", hooks=Hooks(say=lines.append), **settings)
    assert lines == ["executor: loop (graph needs a CUDA device, and this is cpu)"]


def test_lanes_are_shared_where_maps_are_small(monkeypatch):
    def described(model: nn.Module, clients: list) -> str:
        executor = GraphExecutor(capture=again, compiled=False)
        Run(executor, model.double(), clients).state(0, 0)
        return executor.captured.description

    assert "one vectorised program" in described(mlp((5,)), make_clients(RAGGED)), "no convolution, no windows"
    assert "a stream each" in described(cnn((3, 8, 8)), images())
    monkeypatch.setattr(lanes, "SHARED_WINDOWS_NOT_COMPILED", 2**25)
    assert "one vectorised program" in described(cnn((3, 8, 8)), images())
    monkeypatch.setattr(lanes, "SHARED_WINDOWS_NOT_COMPILED", 1000)
    assert "a stream each" in described(cnn((3, 8, 8)), images())


@pytest.mark.parametrize(("pictures", "large"), [(3, True), (20, False)])
def test_kernels_are_large_by_the_convolution_and_not_by_the_network(pictures, large, monkeypatch):
    """A deep network of small maps has as many windows as a flat one of large maps, in kernels that fill no GPU."""
    seen: list[bool] = []

    def capture(plays: Sequence[Play], repeats: int, large: bool) -> Play:
        seen.append(large)
        return again(plays, repeats, large)

    layers = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * 8 * 8, 1)).double()
    # A step's images are 4 and 5, of 8 x 8 pixels with windows of 27 numbers: more than 20 images in all layers.
    monkeypatch.setattr(lanes, "LARGE_WINDOWS", pictures * 64 * 27)
    Run(GraphExecutor(capture=capture, compiled=False, layout="streams"), model, images()).state(0, 0)
    assert set(seen) == {large}


class NoVmap(nn.Module):
    """A layer with a kernel of its own, of which vmap knows nothing."""

    class Double(torch.autograd.Function):
        generate_vmap_rule = False

        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, upstream):
            return 2 * upstream

    def forward(self, x):
        return self.Double.apply(x)


def test_what_cannot_be_vectorised_has_streams():
    lines: list[str] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), NoVmap(), nn.Linear(4, 1)).double()
    executor = GraphExecutor(capture=again, compiled=False, say=lines.append)
    found = Run(executor, model).state(0, 0, 4)
    assert_agree(Run(loop, model).state(0, 0, 4), found)
    assert lines[0].startswith("executor: one stream per client, because the model cannot be vectorised:")
    assert "with a stream each" in lines[1]


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("layout", ["streams", "vectorised"])
def test_compiled_steps_are_the_same_steps(layout):
    """The compiler's own back end for CPUs stands in for that for GPUs: tracing, rewriting and writing in place."""
    lines: list[str] = []
    executor = GraphExecutor(capture=again, layout=layout, say=lines.append)
    settings = {"local_steps": 2, "batch1": 3, "batch2": 4}
    # Two steps of all clients are one program where they are vectorised: a small network takes long enough.
    build = strided if layout == "streams" else shallow
    found = Run(executor, build(), images(), **settings).state(0, 0, 0)
    assert_agree(Run(loop, build(), images(), **settings).state(0, 0, 0), found)
    assert lines[-1].endswith("compiled, 2 steps per launch"), lines
    assert "not compiled" not in lines[-1]
    assert executor.captured.plan.at_a_time == (2 if layout == "vectorised" else 1)


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("name", ["local_sgd", "codasca"])
def test_compiled_updates_have_the_right_rate(name):
    """Inductor merges w + alpha (A B) into one product and forgets alpha; steps of linear layers are just that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    options = {"lr": 0.1, "weight_decay": 0.03}
    executor = GraphExecutor(capture=again, layout="streams")
    found = Run(executor, model, None, name, options).state(0, 0)
    assert "not compiled" not in executor.captured.description
    assert_agree(Run(loop, model, None, name, options).state(0, 0), found)


class HeavyBall(LocalSGD):
    """Momentum by the last iterate, whose Work hands an old leaf on under another name."""

    def start(self, server, client, share):
        return super().start(server, client, share), server.weights.params

    def step(self, score, server, work, batch):
        now, last = work
        after, trace = super().step(score, server, now, batch)
        ahead = tree.map(
            lambda new, old, older: new + 0.5 * (old - older), after.weights.params, now.weights.params, last
        )
        return (after._replace(weights=after.weights._replace(params=ahead)), now.weights.params), trace

    def finish(self, server, share, work, trace):
        return super().finish(server, share, work[0], trace)


@pytest.mark.parametrize("layout", ["streams", "vectorised"])
def test_a_state_that_crosses_over_is_looped_over(layout, network):
    lines: list[str] = []
    method = HeavyBall
    executor = GraphExecutor(capture=again, compiled=False, layout=layout, say=lines.append)
    found = Run(executor, network(), None, method).state(0, 0)
    assert_agree(Run(loop, network(), None, method).state(0, 0), found)
    assert "its new 1.0.weight is its old 0.weights.params.0.weight" in lines[0]


class Standardised(nn.Module):
    """A convolution whose weights are flattened and standardised first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(self, x):
        flat = self.weight.view(4, -1)
        flat = (flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)
        return nn.functional.conv2d(x, flat.view_as(self.weight), padding=1).mean((1, 2, 3)).unsqueeze(-1)


@pytest.mark.parametrize("layout", ["streams", "vectorised"])
def test_weights_may_be_reshaped(layout):
    torch.manual_seed(0)
    model = Standardised().double()
    states = [Run(executor, model, images()).state(0, 0) for executor in (loop, replaying(layout))]
    assert_agree(*states)


def test_what_a_server_holds_is_its_own(network):
    run = Run(replaying("vectorised"), network())
    run.state(0, 0)
    held = run.server
    before = tree.map(torch.clone, held)
    run.state(0)
    assert_agree(tree.pack(before), tree.pack(held), tolerance=0)


@pytest.mark.parametrize("settings", [{"weighting": "samples"}, {}])
def test_a_pool_may_turn_uneven(settings, network):
    """What was drawn ahead for a pool of equal weights is not used for another."""
    clients = make_clients([(5, 5), (5, 5), (7, 9), (5, 5)])
    states = [
        Run(executor, network(), clients, **settings).state(2, 2, 2, 3, 2, 1, 2)
        for executor in (loop, replaying("vectorised"))
    ]
    assert_agree(*states)


def test_the_next_round_is_drawn_ahead(network, monkeypatch):
    run = Run(loop, network())
    run.state(0, 0)
    calls: list[int] = []
    own = Drawing._own
    monkeypatch.setattr(
        Drawing,
        "_own",
        lambda self, client, round, visits: calls.append(round) or own(self, client, round, visits),
    )
    run.state(0)
    assert set(calls) == {3}, "round 2 was drawn before, round 3 is now"


def test_flags_of_the_library_are_restored(network):
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit
    Run(replaying("streams"), network()).state(0, 0)
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit) == before


def test_a_compiler_that_fails_is_done_without(monkeypatch, network):
    def broken(module, inputs):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr("fedxl.engine.cuda.trace.COMPILES_FROM", (0,))
    monkeypatch.setattr("fedxl.engine.cuda.graph.fuse", broken)
    lines: list[str] = []
    executor = GraphExecutor(capture=again, say=lines.append)
    found = Run(executor, network()).state(0, 0, 4)
    assert_agree(Run(loop, network()).state(0, 0, 4), found)
    assert lines[1] == "executor: the step runs without the compiler, which cannot take it: no compiler here"
    assert "not compiled" in lines[2]
    assert executor.captured is not None


def test_a_torch_that_may_compile_wrongly_is_not_let(monkeypatch, network):
    monkeypatch.setattr("fedxl.engine.cuda.trace.COMPILES_FROM", (99, 0))
    lines: list[str] = []
    executor = GraphExecutor(capture=again, say=lines.append)
    assert_agree(Run(loop, network()).state(0, 0, 4), Run(executor, network()).state(0, 0, 4))
    assert len(lines) == 2
    assert f"torch {torch.__version__} may compile it wrongly, from 99.0 on it does not" in lines[0]
    assert "not compiled" in lines[1]


@pytest.mark.parametrize("layout", ["streams", "vectorised"])
def test_deep_networks_agree(layout):
    """Strides, shortcuts and maps of one pixel."""
    torch.manual_seed(0)
    model = resnet18((3, 8, 8), stem="7x7").double()
    settings = {"local_steps": 1, "batch1": 3, "batch2": 4}
    states = [
        Run(executor, model, images(2), "local_sgd", **settings).state(0, 0) for executor in (loop, replaying(layout))
    ]
    assert_agree(*states, tolerance=1e-7)


def test_divisors():
    assert [divisor(32, most) for most in (0, 1, 7, 31, 32, 99)] == [1, 1, 4, 16, 32, 32]


def test_a_fallback_is_seen_by_whoever_calls_fit(network, capsys):
    settings = {"rounds": 1, "local_steps": 2, "batch1": 2, "batch2": 2, "device": "cpu", "executor": "graph"}
    fit_named(network(), make_clients(RAGGED), auroc(), dtype="float64", **settings)
    assert capsys.readouterr().err == "executor: loop (graph needs a CUDA device, and this is cpu)\n"
