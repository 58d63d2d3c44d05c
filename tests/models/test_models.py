"""Networks as pure functions: what is trained, what is kept, and what ends up in the saved file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedxl import UserError, partial_auc
from fedxl.models import MODELS, TwoViews, cnn, linear, load, mlp, scorer, weights_of
from tests.conftest import make_clients
from tests.running import fit_named


class Tied(nn.Module):
    """Two layers with one weight, a frozen layer, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.out = nn.Linear(5, 1)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x):
        return self.out(self.second(torch.tanh(self.first(self.frozen(x)))) * self.scale)


def test_tied_and_frozen_weights(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    result = fit_named(
        model, make_clients([(5, 6), (7, 8)]), partial_auc(), rounds=3, local_steps=3, lr=0.5, out=tmp_path
    )
    trained = result.model
    assert not trained.training, "ready to predict"
    assert torch.equal(trained.frozen.weight, model.frozen.weight), "what is frozen stays, to the bit"
    assert trained.second.weight is trained.first.weight
    assert not torch.equal(trained.first.weight, model.first.weight)
    fresh = Tied()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = torch.randn(4, 5)
    assert torch.equal(fresh(x), trained(x))


def test_scoring_leaves_weights_and_model_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    weights = weights_of(model)
    before = {name: b.clone() for name, b in weights.buffers.items()}
    h, after = scorer(model, training=True)(weights, torch.randn(8, 3))
    assert h.shape == (8,)
    assert all(torch.equal(weights.buffers[name], b) for name, b in before.items())
    assert int(after["1.num_batches_tracked"]) == 1
    assert int(model[1].num_batches_tracked) == 0
    h, same = scorer(model, training=False)(weights, torch.randn(8, 3))
    assert int(same["1.num_batches_tracked"]) == 0


def test_load_gives_back_the_weights():
    model, other = mlp((4,)), mlp((4,))
    load(other, weights_of(model))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("size", [8, 28, 32])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_scores_images(name, size):
    assert MODELS[name]((3, size, size), outputs=2)(torch.randn(5, 3, size, size)).shape == (5, 2)


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("channels", [1, 6, 16])
def test_norms(norm, channels):
    assert cnn((1, 8, 8), channels=channels, norm=norm)(torch.randn(4, 1, 8, 8)).shape == (4, 1)


def test_two_views_side_by_side():
    encoder = mlp((6,), outputs=3)
    x = torch.randn(4, 2, 6)
    expected = torch.cat([encoder(x[:, 0]), encoder(x[:, 1])], 1)
    torch.testing.assert_close(TwoViews(encoder)(x), expected)


@pytest.mark.parametrize(
    "build",
    [
        lambda: cnn((1, 8, 8), channels=2**40),
        lambda: mlp((1, 8, 8), hidden=(2**40,)),
        lambda: mlp((64,), hidden=(10**5, 10**5)),
        lambda: linear((10**6,), outputs=2**16),
    ],
)
def test_a_network_too_large_is_told_before_memory_is_asked_for(build):
    with pytest.raises(UserError, match=r"channels must lie between|at most 1,000,000,000"):
        build()
