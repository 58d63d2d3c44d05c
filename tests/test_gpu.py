"""On a CUDA device: the same results as on the CPU, for every algorithm and executor."""

from __future__ import annotations

import pytest
import torch

from fedxl import ALGORITHMS, auroc, fit, partial_auc
from fedxl.engine.executors import EXECUTORS
from tests.conftest import RAGGED, make_clients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("executor", list(EXECUTORS))
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_cuda_and_cpu_agree(name, executor, network, tmp_path):
    risk = auroc() if name in ("fedxl1", "sgd") else partial_auc()
    validation = make_clients([(20, 30)], seed=9)[0]
    settings = {
        "rounds": 4, "local_steps": 3, "batch1": 4, "batch2": 5, "cohort": 4, "lr": 0.1, "eval_every": 2,
        "checkpoint_every": 2, "executor": executor, "dtype": "float64", "validation": validation,
    }  # fmt: skip
    results = [
        fit(network(), make_clients(RAGGED), risk, name, device=device, out=tmp_path / device, **settings)
        for device in ("cpu", "cuda")
    ]
    for parameter, expected in results[0].weights.params.items():
        torch.testing.assert_close(results[1].weights.params[parameter].cpu(), expected, rtol=0, atol=1e-9)
    assert results[0].best_round == results[1].best_round


def test_a_run_on_cuda_is_resumed_from_disk(network, tmp_path):
    def run(out, resume=False, rounds=6):
        settings = {"rounds": rounds, "local_steps": 2, "batch1": 4, "batch2": 5, "lr": 0.1, "checkpoint_every": 3}
        device = {"device": "cuda", "dtype": "float64"}
        return fit(network(), make_clients(RAGGED), partial_auc(), out=out, resume=resume, **settings, **device)

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", rounds=3)
    resumed = run(tmp_path / "parts", resume=True)
    for name, expected in whole.server.weights.params.items():
        torch.testing.assert_close(resumed.server.weights.params[name], expected, rtol=0, atol=1e-12)
