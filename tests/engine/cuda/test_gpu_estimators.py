"""Estimators, optimisers and CVaR risks on a CUDA device: every executor comes to what the CPU does."""

from __future__ import annotations

import pytest
import torch

from fedxl import cvar_two_way_partial_auc, partial_auc
from fedxl.engine.choose import EXECUTORS
from tests.conftest import RAGGED, make_clients
from tests.running import fit_named

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = {
    "MSVR and Adam": (partial_auc(), {"estimator": "msvr", "descent": "adam", "server_update": "adam", "lr": 0.01}),
    "momentum": (partial_auc(), {"descent": "momentum", "server_update": "momentum", "lr": 0.03}),
    "CVaR": (cvar_two_way_partial_auc(tpr=0.4, fpr=0.6, fpr_from=0.1), {"lr": 0.1}),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", list(CASES))
def test_cuda_and_cpu_agree(case, executor, network):
    risk, options = CASES[case]
    settings = {
        "rounds": 4, "local_steps": 3, "batch1": 4, "batch2": 5, "cohort": 4, "executor": executor, "compile": False,
        "dtype": "float64",
    }  # fmt: skip
    results = [
        fit_named(network(), make_clients(RAGGED), risk, device=device, **settings, **options)
        for device in ("cpu", "cuda")
    ]
    for name, expected in results[0].weights.params.items():
        torch.testing.assert_close(results[1].weights.params[name].cpu(), expected, rtol=0, atol=1e-9)
