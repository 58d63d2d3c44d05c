"""Faults of torch that the compiler layer works around: each test shows the fault with the workaround off.

A test that fails because it passes, `XPASS(strict)`, says that the fault is gone in this torch. Once it is gone in
the oldest torch that may compile (`trace.COMPILES_FROM`), too, the workaround that the test names can go.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedxl.engine.cuda import lanes
from fedxl.engine.cuda import trace as tracing
from fedxl.engine.cuda.graph import GraphExecutor
from fedxl.engine.cuda.trace import VERSION, fuse, trace
from fedxl.engine.executors import loop
from fedxl.models import cnn
from tests.conftest import never_falls_back
from tests.engine.cuda.test_gpu import network_of, trained
from tests.engine.cuda.test_graph import HeavyBall, Run
from tests.engine.cuda.traces import compiles
from tests.engine.test_executors import assert_agree
from tests.running import again

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def off(monkeypatch: Any, module: Any, name: str) -> None:
    monkeypatch.setattr(module, name, lambda *arguments, **options: None)


def compiled(function: Any, *arguments: Tensor) -> list[Tensor]:
    """The arguments, as a compiled step has written to them."""
    traced = trace(function, [leaf.clone() for leaf in arguments])
    mine = [leaf.clone() for leaf in arguments]
    fuse(traced.module, traced.inputs(mine))(*traced.inputs(mine))
    return mine


@compiles
@pytest.mark.xfail(VERSION < (2, 15), strict=True, raises=AssertionError, reason="torch 2.11 to 2.14")
def test_scaling_is_not_forgotten(monkeypatch):
    """Inductor makes one product of a + alpha (B C), and forgets alpha. Until then: `trace._spell_out_scaling`."""
    off(monkeypatch, tracing, "_spell_out_scaling")

    def step(w: Tensor, b: Tensor, c: Tensor) -> None:
        w.copy_(torch.add(w, b @ c, alpha=-0.1))

    torch.manual_seed(0)
    w, b, c = torch.randn(4, 5), torch.randn(4, 3), torch.randn(3, 5)
    torch.testing.assert_close(compiled(step, w, b, c)[0], w - 0.1 * (b @ c))


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="torch 2.6 to 2.15")
def test_pooling_leaves_strides_alone(monkeypatch):
    """Under vmap, pooling of one pixel relabels strides in place, of a temporary. Until then: `_drop_restriding`."""
    off(monkeypatch, tracing, "_drop_restriding")

    def step(x: Tensor) -> None:
        x.copy_(vmap(nn.AdaptiveAvgPool2d(1))(x))

    traced = trace(step, [torch.randn(2, 3, 1, 1, 4).permute(0, 1, 4, 2, 3)], vectorised=True)
    assert torch.ops.aten.as_strided_.default not in [node.target for node in traced.module.graph.nodes]


@compiles
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="torch 2.11 to 2.15")
def test_states_may_cross_over(monkeypatch):
    """Inductor takes a copy of an old leaf for the leaf. Until then: `lanes._refuse_crossed`."""
    off(monkeypatch, lanes, "_refuse_crossed")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    found = Run(GraphExecutor(capture=again, layout="streams"), model, None, HeavyBall).state(0, 0)
    assert_agree(Run(loop, model, None, HeavyBall).state(0, 0), found)


@cuda
@pytest.mark.gpu
@pytest.mark.xfail(strict=True, reason="torch 2.11")
def test_norms_of_mixed_precision_are_vectorised(monkeypatch):
    """Under vmap BatchNorm asks for kernels that the libraries lack. Until then: `trace.BATCH_NORMS`."""
    monkeypatch.setattr(tracing, "BATCH_NORMS", [])
    executor = GraphExecutor(compiled=False, layout="vectorised", say=never_falls_back)
    trained("fedxl2", executor, network_of(cnn), rounds=1, precision="bf16")


@cuda
@pytest.mark.gpu
@pytest.mark.xfail(strict=True, reason="torch 2.11")
def test_convolutions_of_one_pixel_are_compiled(monkeypatch):
    """On small maps cuDNN's gradients have other strides than Inductor expects. Until then: `lanes.SMALLEST_MAPS`."""
    monkeypatch.setattr(lanes, "SMALLEST_MAPS", 0)

    def small(shape: tuple[int, ...]) -> nn.Module:
        layers = [nn.Conv2d(3, 8, 3, 4, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 4, 1), nn.BatchNorm2d(8)]
        return nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(8, 1))

    executor = GraphExecutor(layout="streams", say=never_falls_back)
    trained("local_sgd", executor, network_of(small), rounds=1, precision="bf16")
