"""On a CUDA device: the same results as on the CPU, and of the captured graph the same as of the loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedxl import ALGORITHMS, auroc, build, partial_auc, sampling, tree
from fedxl.data.examples import Augment, Examples
from fedxl.engine.cuda.graph import GraphExecutor
from fedxl.engine.executors import EXECUTORS, loop
from fedxl.models import cnn, simple_cnn, weights_of
from tests.conftest import RAGGED, make_clients, never_falls_back
from tests.engine.test_executors import Branches
from tests.running import engine_for, fit_named, play

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what makes products the same bits each time

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def risk_for(name: str):
    return auroc() if name in ("fedxl1", "sgd") else partial_auc()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_cuda_and_cpu_agree(name, executor, network, tmp_path):
    validation = make_clients([(20, 30)], seed=9)[0]
    settings = {
        "rounds": 4, "local_steps": 3, "batch1": 4, "batch2": 5, "cohort": 4, "lr": 0.1, "eval_every": 2,
        "checkpoint_every": 2, "executor": executor, "compile": False, "dtype": "float64", "validation": validation,
    }  # fmt: skip
    results = [
        fit_named(
            network(), make_clients(RAGGED), risk_for(name), name, device=device, out=tmp_path / device, **settings
        )
        for device in ("cpu", "cuda")
    ]
    for parameter, expected in results[0].weights.params.items():
        torch.testing.assert_close(results[1].weights.params[parameter].cpu(), expected, rtol=0, atol=1e-9)
    assert results[0].best_round == results[1].best_round


def images(clients: int = 4, each: int = 30) -> Examples:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (clients * each, 3, 12, 12), np.uint8))
    y = torch.from_numpy((np.arange(len(x)) % 3 == 0).astype(np.int64))
    federation = Examples(x, y[:, None], site=np.repeat(np.arange(clients), each))
    return federation.augmented(Augment(crop=2, flip=True, noise=0.1, site_means=(0.1, 0.0, -0.1, 0.2)))


def trained(
    name: str, executor, model: nn.Module, rounds: int = 4, precision: str = "fp32", risk=None, **options
) -> dict:
    """The server's and the clients' state after several rounds on images."""
    federation = images().pooled() if ALGORITHMS[name].centralized else images()
    algorithm, where = build(name, risk or risk_for(name), lr=0.05, **options), {"device": "cuda", "dtype": "float32"}
    engine = engine_for(algorithm, model, federation, executor, 4, 6, 7, precision=precision, **where)
    algorithm = engine.algorithm
    server = algorithm.init(weights_of(model.to(CUDA)))
    for r in range(algorithm.first_round, rounds + 1):
        members = sampling.cohort(0, r, len(federation.parts), 3)
        server = play(algorithm, engine, server, r, members)
    return tree.pack({"server": server, "population": engine.population})


def network_of(build) -> nn.Module:
    torch.manual_seed(0)
    return build((3, 12, 12))


def assert_close(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance, equal_nan=True, msg=key)


@pytest.mark.parametrize("layout", ["streams", "vectorised"])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_graph_and_loop_agree(name, layout, deterministic):
    """In single precision, with BatchNorm, crops, flips and noise, three of four clients per round."""
    executor = GraphExecutor(compiled=False, layout=layout, say=never_falls_back)
    found = trained(name, executor, network_of(cnn))
    assert executor.captured is not None
    assert_close(found, trained(name, loop, network_of(cnn)), 1e-4)


@pytest.mark.parametrize("layout", ["streams", "vectorised"])
@pytest.mark.parametrize("name", ["fedxl1", "fedxl2"])
def test_a_graph_adds_the_noise_of_the_loop(name, layout, deterministic):
    """Gradients by example, clipped, cut to whole numbers and added to whole noise; noise on scores."""
    risk = auroc(scores="sigmoid") if name == "fedxl1" else partial_auc(scores="sigmoid")
    private = {"level": "free", "pool_u": "server", "dp_clip": 0.1, "dp_noise": 0.7, "dp_score_noise": 0.2}
    executor, normed = GraphExecutor(compiled=False, layout=layout, say=never_falls_back), partial(cnn, norm="group")
    found = trained(name, executor, network_of(normed), risk=risk, **private)
    assert executor.captured is not None
    assert_close(found, trained(name, loop, network_of(normed), risk=risk, **private), 1e-4)


@pytest.mark.parametrize("layout", ["streams", "vectorised"])
@pytest.mark.parametrize("name", ["fedxl2"])
def test_a_compiled_graph_and_loop_agree(name, layout):
    executor = GraphExecutor(layout=layout, say=never_falls_back)
    found = trained(name, executor, network_of(cnn))
    assert "not compiled" not in executor.captured.description
    assert_close(found, trained(name, loop, network_of(cnn)), 1e-3)


@pytest.mark.parametrize("layout", ["streams", "vectorised"])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precision_is_close(precision, layout):
    executor = GraphExecutor(compiled=False, layout=layout, say=never_falls_back)
    found = trained("fedxl2", executor, network_of(cnn), precision=precision)
    exact = trained("fedxl2", loop, network_of(cnn))
    params = [key for key in exact if key.startswith("server.weights.params")]
    moved = {key: exact[key] - weights_of(network_of(cnn)).params[key[22:]].to(CUDA) for key in params}
    error = sum((found[key] - exact[key]).square().sum() for key in params).sqrt()
    assert error < 0.2 * sum(step.square().sum() for step in moved.values()).sqrt()
    assert all(found[key].dtype == torch.float32 for key in params), "the state stays in single precision"


@pytest.mark.parametrize("layout", ["streams", "vectorised"])
def test_dropout_in_a_graph_is_reproducible(layout, deterministic):
    model = network_of(simple_cnn)

    def once() -> dict:
        return trained("local_sgd", GraphExecutor(compiled=False, layout=layout, say=never_falls_back), model)

    torch.cuda.manual_seed(5)
    before, first = torch.cuda.get_rng_state(), once()
    assert torch.equal(before, torch.cuda.get_rng_state()), "the caller's random stream must be left alone"
    torch.cuda.manual_seed(6)
    assert_close(once(), first, 0)


def test_a_model_that_cannot_be_traced_is_looped_over():
    lines: list[str] = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(432, 5), Branches())
    trained("fedxl2", GraphExecutor(compiled=False, say=lines.append), model)
    assert len(lines) == 1
    assert "loop, because graph cannot trace" in lines[0]
    assert "depends on the numbers" in lines[0]


def test_a_run_on_cuda_is_resumed_from_disk(network, tmp_path):
    def run(out, resume=False, rounds=6):
        settings = {"rounds": rounds, "local_steps": 2, "batch1": 4, "batch2": 5, "lr": 0.1, "checkpoint_every": 3}
        device = {"device": "cuda", "dtype": "float64", "compile": False}
        return fit_named(network(), make_clients(RAGGED), partial_auc(), out=out, resume=resume, **settings, **device)

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", rounds=3)
    resumed = run(tmp_path / "parts", resume=True)
    for name, expected in whole.server.weights.params.items():
        torch.testing.assert_close(resumed.server.weights.params[name], expected, rtol=0, atol=1e-12)
