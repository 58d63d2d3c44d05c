"""Risks of queries on a CUDA device: every executor comes to what the CPU does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedxl
from fedxl.data.queries import from_queries
from fedxl.engine.choose import EXECUTORS
from tests.engine.test_queries import clients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("risk", [fedxl.ndcg(queries=2), fedxl.ndcg(queries=2, top=3)], ids=str)
def test_cuda_and_cpu_agree(risk, executor):
    settings = {"rounds": 3, "local_steps": 3, "batch_size": (4, 6), "executor": executor, "compile": False}
    results = []
    for device in ("cpu", "cuda"):
        model = nn.Linear(3, 1, bias=False)
        model.weight.data = torch.tensor([[0.5, -0.3, 0.2]])
        splits = from_queries(clients()[0])
        results.append(
            fedxl.fit(model, splits, fedxl.FeDXL2(risk, lr=0.1), device=device, dtype="float64", **settings)
        )
    for name, expected in results[0].weights.params.items():
        torch.testing.assert_close(results[1].weights.params[name].cpu(), expected, rtol=0, atol=1e-9)
