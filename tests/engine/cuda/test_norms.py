"""BatchNorm of all clients as one: the same numbers as torch's own of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from fedxl.engine.cuda.norms import Norms
from fedxl.engine.cuda.trace import trace
from tests.engine.cuda.traces import replayed

CLIENTS = 3


def passes(norm: nn.Module, states: Any, x: Tensor, upstream: Tensor, ours: bool) -> list[Tensor]:
    """Each client's output, its gradients by weights and input, and its statistics afterwards."""

    def one(state: dict[str, Tensor], x: Tensor, upstream: Tensor) -> tuple[Any, ...]:
        names = [name for name, _ in norm.named_parameters()]

        def score(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            buffers = {name: leaf.clone() for name, leaf in state.items() if name not in names}
            if ours:
                with Norms():
                    return functional_call(norm, (params, buffers), (x,)), buffers
            return functional_call(norm, (params, buffers), (x,)), buffers

        out, back, buffers = vjp(score, {name: state[name] for name in names}, x, has_aux=True)
        by_params, by_x = back(upstream)
        return out, by_x, *by_params.values(), *buffers.values()

    return list(vmap(one)(states, x, upstream))


def example(norm: nn.Module, *size: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    states = {
        name: torch.rand(CLIENTS, *leaf.shape).to(leaf) + 0.5 if leaf.is_floating_point() else leaf.expand(CLIENTS)
        for name, leaf in norm.state_dict().items()
    }
    x = 3 * torch.randn(CLIENTS, 6, 4, *size).double() + 2
    return states, x, torch.randn_like(x)


@pytest.mark.parametrize(
    ("norm", "size"),
    [
        (nn.BatchNorm2d(4), (5, 3)),
        (nn.BatchNorm1d(4), ()),
        (nn.BatchNorm1d(4, eps=0.1, momentum=0.3), (7,)),
        (nn.BatchNorm2d(4, affine=False), (5, 3)),
        (nn.BatchNorm2d(4, track_running_stats=False), (2, 2)),
        (nn.BatchNorm2d(4).eval(), (5, 3)),
    ],
    ids=["images", "vectors", "sequences", "no weights", "no statistics", "evaluation"],
)
def test_it_is_batch_norm(norm, size):
    norm = norm.double()
    states, x, upstream = example(norm, *size)
    wanted = passes(norm, states, x, upstream, ours=False)
    found = passes(norm, states, x, upstream, ours=True)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_halves_are_normalised_in_single_precision():
    norm = nn.BatchNorm2d(4)
    states, x, upstream = example(norm, 5, 3)
    found = passes(norm, states, x.bfloat16(), upstream.bfloat16(), ours=True)
    wanted = passes(norm, states, x.bfloat16().float(), upstream.bfloat16().float(), ours=False)
    assert [leaf.dtype for leaf in found[:4]] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for ours, theirs in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=2**-8)  # rounded once, at the end
    for ours, theirs in zip(found[2:], wanted[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_it_can_be_differentiated_twice():
    """As a model does that looks at its own gradient."""
    norm = nn.BatchNorm1d(4).double()
    states, x, _ = example(norm, 3)
    weights = torch.randn(6, 4, 3).double()

    def steepness(state: dict[str, Tensor], x: Tensor, ours: bool) -> Tensor:
        def value(x: Tensor) -> Tensor:
            buffers = {name: leaf.clone() for name, leaf in state.items()}
            if not ours:
                return (functional_call(norm, buffers, (x,)) * weights).pow(2).sum()
            with Norms():
                return (functional_call(norm, buffers, (x,)) * weights).pow(2).sum()

        return torch.func.grad(value)(x).pow(2).sum()

    found, wanted = (
        vmap(torch.func.grad(lambda x, state, ours=ours: steepness(state, x, ours)))(x, states)
        for ours in (True, False)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("norm", "x"),
    [
        (nn.BatchNorm1d(4), torch.randn(1, 4)),
        (nn.BatchNorm1d(4), torch.randn(6, 4).double()),
        (nn.BatchNorm1d(4), torch.randn(6, 5)),
    ],
    ids=["one value", "wider than its weights", "more channels than weights"],
)
def test_what_torch_refuses_is_refused(norm, x):
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        norm(x)
    with Norms(), pytest.raises(type(theirs.value)) as ours:
        norm(x)
    assert str(ours.value) == str(theirs.value)


def test_halves_can_be_differentiated_twice():
    norm = nn.BatchNorm1d(4)
    x = torch.randn(6, 4).bfloat16().requires_grad_()
    with Norms():
        (slope,) = torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.pow(2).sum(), x)
    assert slope.dtype == second.dtype == torch.bfloat16
    wide = x.detach().float().requires_grad_()
    (slope,) = torch.autograd.grad(norm(wide).pow(3).sum(), wide, create_graph=True)
    (wanted,) = torch.autograd.grad(slope.pow(2).sum(), wide)
    torch.testing.assert_close(second.float(), wanted, rtol=0.1, atol=0.02 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    "norm",
    [
        nn.InstanceNorm1d(4, affine=True),
        nn.BatchNorm1d(4, affine=False),
        nn.BatchNorm1d(4, dtype=torch.bfloat16),
        nn.BatchNorm1d(4, affine=False, dtype=torch.bfloat16),
    ],
    ids=["of instances", "no weights", "half weights", "half statistics"],
)
def test_other_norms_of_halves_are_traced(norm):
    """The libraries lack kernels that vmap would ask for."""
    states = {name: leaf.expand(CLIENTS, *leaf.shape).clone() for name, leaf in norm.state_dict().items()}
    seen = torch.randn(CLIENTS, 6, 4, 5).bfloat16()

    def step(state: dict[str, Tensor], x: Tensor) -> Tensor:
        def value(x: Tensor) -> Tensor:
            kept = {name: leaf.clone() for name, leaf in state.items()}
            return functional_call(norm, kept, (x,)).float().pow(3).sum()

        return torch.func.grad(value)(x)

    def function(x: Tensor, *leaves: Tensor) -> None:
        x.copy_(vmap(step)(dict(zip(states, leaves, strict=True)), x))

    wanted = torch.stack([step(norm.state_dict(), x) for x in seen])
    arguments = [seen, *states.values()]
    replayed(function, arguments, vectorised=True)
    torch.testing.assert_close(seen.float(), wanted.float(), rtol=0.1, atol=0.1)


def test_a_step_that_is_not_compiled_is_traced_with_it():
    norm, seen = nn.BatchNorm1d(4, track_running_stats=False), torch.randn(CLIENTS, 6, 4)

    def targets(compiled: bool) -> list[str]:
        def function(x: Tensor) -> None:
            x.copy_(vmap(norm)(x))

        traced = trace(function, [seen], vectorised=True, compiled=compiled)
        return [str(node.target) for node in traced.module.graph.nodes]

    kernel = "aten._native_batch_norm_legit_functional.default"
    assert targets(compiled=False).count(kernel) == 1, "all clients in one"
    assert kernel not in targets(compiled=True), "small pieces, for the compiler to fuse"
