"""Lower precision is for the steps alone, and leaves torch's settings as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedxl import UserError, partial_auc
from fedxl.models import mlp, scorer, weights_of
from fedxl.models.functional import PRECISIONS, products
from tests.conftest import make_clients
from tests.running import fit_named

SETTINGS = {"rounds": 3, "local_steps": 3, "batch1": 4, "batch2": 4, "device": "cpu", "lr": 0.5}
CLIENTS = [(x.float(), y) for x, y in make_clients([(6, 9), (5, 8)])]


def flags() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("name", list(PRECISIONS))
def test_flags_are_set_inside_and_restored(name):
    before = flags()
    with products(PRECISIONS[name]):
        assert flags() == (name != "fp32", name != "fp32")
    assert flags() == before
    with pytest.raises(ValueError), products(PRECISIONS[name]):
        raise ValueError
    assert flags() == before


def test_scores_of_half_precision_are_close_and_single():
    torch.manual_seed(0)
    model = mlp((5,), hidden=(16,))
    x = torch.randn(32, 5)
    exact, _ = scorer(model, True)(weights_of(model), x)
    rounded, _ = scorer(model, True, "bf16")(weights_of(model), x)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_training_in_half_precision_keeps_single_precision_weights(executor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    results = {
        precision: fit_named(model, CLIENTS, partial_auc(), executor=executor, precision=precision, **SETTINGS)
        for precision in ("fp32", "bf16")
    }
    start = weights_of(model).params
    moved = distance(results["fp32"].weights.params, start)
    assert all(tensor.dtype == torch.float32 for tensor in results["bf16"].weights.params.values())
    assert 0 < distance(results["bf16"].weights.params, results["fp32"].weights.params) < 0.1 * moved


def distance(left: dict, right: dict) -> float:
    return float(sum((left[name] - right[name]).square().sum() for name in right).sqrt())


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match="unknown precision 'half'"):
        fit_named(mlp((5,)), CLIENTS, partial_auc(), precision="half", **SETTINGS)
    with pytest.raises(UserError, match="precision = bf16 is for dtype = float32, not for float64"):
        fit_named(mlp((5,)), CLIENTS, partial_auc(), precision="bf16", dtype="float64", **SETTINGS)
