"""Convolutions of many clients as matrix products: the same numbers as the library's grouped convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedxl.engine.cuda.products import as_products

CLIENTS = 3
SHAPES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "3x3": ({"kernel_size": 3}, (7, 6)),
    "padded": ({"kernel_size": 3, "padding": 1}, (5, 8)),
    "strided": ({"kernel_size": 3, "padding": 1, "stride": 2}, (8, 8)),
    "strided, odd": ({"kernel_size": 3, "padding": 1, "stride": 2}, (7, 5)),
    "7x7 stem": ({"kernel_size": 7, "padding": 3, "stride": 2}, (12, 10)),
    "1x1": ({"kernel_size": 1}, (4, 5)),
    "1x1, strided": ({"kernel_size": 1, "stride": 2}, (6, 6)),
    "oblong": ({"kernel_size": (1, 3), "padding": (0, 1), "stride": (2, 1)}, (6, 7)),
    "fewer outputs": ({"kernel_size": 3, "padding": 1, "out_channels": 2}, (5, 8)),
    "fewer outputs, oblong": ({"kernel_size": (2, 3), "padding": (1, 0), "out_channels": 1}, (5, 8)),
    "fewer outputs, strided": ({"kernel_size": 3, "padding": 1, "stride": 2, "out_channels": 2}, (5, 8)),
    "fewer outputs, 1x1": ({"kernel_size": 1, "out_channels": 2}, (4, 5)),
    "fewer outputs, wide margin": ({"kernel_size": 2, "padding": 2, "out_channels": 2}, (4, 5)),
    "map of one pixel": ({"kernel_size": 3, "padding": 1}, (1, 1)),
}


def passes(conv: nn.Conv2d, weights: dict[str, Tensor], x: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    """The output of each client's convolution and its gradients by weights and input."""

    def one(weights: dict[str, Tensor], x: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        out, back = vjp(lambda w, x: torch.func.functional_call(conv, w, (x,)), weights, x)
        by_weights, by_x = back(upstream)
        return out, by_x, *by_weights.values()

    return vmap(one)(weights, x, upstream)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_products_are_the_convolutions(name, bias):
    options, size = SHAPES[name]
    torch.manual_seed(0)
    conv = nn.Conv2d(3, bias=bias, **{"out_channels": 5, **options}).double()
    weights = {key: torch.randn(CLIENTS, *p.shape).double() for key, p in conv.named_parameters()}
    x = torch.randn(CLIENTS, 2, 3, *size).double()
    upstream = torch.randn(CLIENTS, *conv(x[0]).shape).double()

    expected = passes(conv, weights, x, upstream)
    module = make_fx(lambda w, x, u: passes(conv, w, x, u), tracing_mode="fake", _allow_non_fake_inputs=True)(
        weights, x, upstream
    )
    as_products(module, CLIENTS)
    assert not any("convolution.default" in str(node.target) for node in module.graph.nodes), "all were replaced"
    assert not any("convolution_backward.default" in str(node.target) for node in module.graph.nodes)
    names = [node.target.__name__ for node in module.graph.nodes if node.op == "call_function"]
    assert names.count("windows") == 1, "laid out once for both directions"
    for found, wanted in zip(module(weights, x, upstream), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"dilation": 2}, {"groups": 3}], ids=["dilated", "grouped"])
def test_other_convolutions_stay_as_they_are(options):
    conv = nn.Conv2d(3, 6, 3, **options).double()
    weights = {key: torch.randn(CLIENTS, *p.shape).double() for key, p in conv.named_parameters()}
    x, upstream = (
        torch.randn(CLIENTS, 2, 3, 8, 8).double(),
        torch.randn(CLIENTS, *conv(torch.zeros(2, 3, 8, 8).double()).shape),
    )
    traced = make_fx(lambda w, x, u: passes(conv, w, x, u))(weights, x, upstream.double())
    as_products(traced, CLIENTS)
    assert sum("aten.convolution" in str(node.target) for node in traced.graph.nodes) == 2


@pytest.mark.parametrize(("outputs", "sums"), [(2, 0), (3, 9)], ids=["fewer outputs", "as many"])
def test_windows_are_laid_out_where_channels_are_few(outputs, sums):
    """From the outputs the gradient is one product; from the inputs, the sum of nine shifted pieces."""
    conv = nn.Conv2d(3, outputs, 3, padding=1, bias=False).double()
    weights = {"weight": torch.randn(CLIENTS, outputs, 3, 3, 3).double()}
    x, upstream = torch.randn(CLIENTS, 2, 3, 5, 5).double(), torch.randn(CLIENTS, 2, outputs, 5, 5).double()
    module = make_fx(lambda w, x, u: passes(conv, w, x, u), tracing_mode="fake", _allow_non_fake_inputs=True)(
        weights, x, upstream
    )
    as_products(module, CLIENTS)
    unfolded = make_fx(lambda *given: module(*given))(weights, x, upstream)
    assert [node.target for node in unfolded.graph.nodes].count(torch.ops.aten.add.Tensor) == sums
