"""Members of the family on a CUDA device, from optimisers to queries: every executor comes to what the CPU does."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fedxl
from fedxl import FeDXL2, cvar_partial_auc, listwise, ndcg, partial_auc, several
from fedxl.algorithms import Algorithm, build
from fedxl.engine.executors import EXECUTORS
from tests.conftest import RAGGED, make_clients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RUN = {"rounds": 4, "local_steps": 3, "batch_size": (4, 6), "compile": False, "dtype": "float64"}


class Case(NamedTuple):
    algorithm: Algorithm
    data: str = "classes"


CASES = {
    "Adam": Case(build("fedxl2", partial_auc(), descent="adam", server_update="adam", lr=0.01)),
    "momentum": Case(build("fedxl2", partial_auc(), descent="momentum", server_update="momentum", lr=0.03)),
    "CVaR": Case(FeDXL2(cvar_partial_auc(fpr=0.6, fpr_from=0.1), lr=0.1)),
    "several labels": Case(FeDXL2(several(partial_auc(), 3), lr=0.1), "labels"),
    "NDCG": Case(FeDXL2(ndcg(queries=2), lr=0.1), "queries"),
    "NDCG@3": Case(FeDXL2(ndcg(queries=2, top=3), lr=0.1), "queries"),
    "listwise": Case(FeDXL2(listwise(queries=2), lr=0.1), "queries"),
}


def linear(outputs: int) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def labelled() -> Any:
    """Three labels per example, one in five of them not known."""
    generator = torch.Generator().manual_seed(1)
    clients = []
    for x, _ in make_clients([(20, 30)] * 4):
        y = (x[:, :3] > 0.5).long()
        y[torch.rand(y.shape, generator=generator) < 0.2] = -1
        clients.append((x, y))
    return clients


def graded() -> Any:
    """Six queries, each with items at three clients."""
    return fedxl.from_queries(
        {f"c{n}": (x, (x[:, 0] > 1).long() + y, torch.arange(len(x)) % 6) for n, (x, y) in enumerate(CLASSES[:3])}
    )


CLASSES = make_clients([(12, 24)] * 4)
DATA = {"classes": lambda: make_clients(RAGGED), "labels": labelled, "queries": graded}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", list(CASES))
def test_cuda_and_cpu_agree(name, executor):
    case, outputs = CASES[name], 3 if CASES[name].data == "labels" else 1
    run = {**RUN, "executor": executor}
    results = [
        fedxl.fit(linear(outputs), DATA[case.data](), case.algorithm, device=device, **run)
        for device in ("cpu", "cuda")
    ]
    moved = 0.0
    for parameter, expected in results[0].weights.params.items():
        torch.testing.assert_close(results[1].weights.params[parameter].cpu(), expected, rtol=0, atol=1e-9)
        moved += float((expected - linear(outputs).state_dict()[parameter]).abs().sum())
    assert moved > 1e-4, "it has learnt something"
