"""ONNX: networks against torch, at any batch size; and files of others.

Every kind of layer is in the smaller ones. FEDXL_LARGE=1 tries resnet18 and densenet121, too, which take a minute.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

from fedxl import UserError
from fedxl.models import MODELS, TwoViews
from fedxl.prediction import onnx_file
from fedxl.prediction.onnx_file import AGREES, scorer, to_onnx
from fedxl.training.run_folder import Form
from tests.models.test_zoo import stirred

SMALL = {
    "linear": ((6,), {}),
    "mlp": ((6,), {"hidden": (5, 4)}),
    "cnn": ((1, 8, 8), {"channels": 3}),
    "simple_cnn": ((1, 8, 8), {}),
    "resnet20": ((3, 8, 8), {"score_norm": True}),
    "resnet18": ((3, 8, 8), {}),
    "densenet121": ((3, 32, 32), {}),
}
LARGE = () if os.environ.get("FEDXL_LARGE") else ("resnet18", "densenet121")


def test_every_network_is_tried():
    assert set(SMALL) == set(MODELS)


@pytest.mark.parametrize("name", [name for name in SMALL if name not in LARGE])
def test_onnx_gives_torchs_scores(name):
    shape, options = SMALL[name]
    network = stirred(MODELS[name](shape, outputs=1, **options))  # float64, with norms and statistics moved
    checked = to_onnx(network, Form(shape, "float64", ()))
    assert checked.largest_error <= AGREES
    run = scorer(checked.content)
    for count in (1, 3, 130):
        x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
        with torch.no_grad():
            expected = network(x)[:, 0].numpy()
        np.testing.assert_allclose(run(x).numpy(), expected, rtol=AGREES, atol=AGREES)


def test_two_views_and_vectors():
    network = TwoViews(MODELS["mlp"]((5,), outputs=3))
    run = scorer(to_onnx(network, Form((2, 5), "float32", (6,))).content)
    assert run(torch.randn(4, 2, 5)).shape == (4, 6)


def test_the_file_says_nothing_of_the_machine_that_wrote_it():
    import onnx

    proto = onnx.load_model_from_string(to_onnx(MODELS["mlp"]((6,)), Form((6,), "float32", ())).content)
    del proto.graph.initializer[:]  # weights, whose bytes may look like anything
    assert "Gemm" in str(proto)
    assert ".py" not in str(proto)
    assert "/" not in str(proto), "no path"


def test_a_disagreement_is_an_error(monkeypatch):
    exported = onnx_file._exported

    def other(network: nn.Module, form: Form) -> object:
        with torch.no_grad():
            network.network[1].weight[0, 0] += 1e-3
        return exported(network, form)

    monkeypatch.setattr(onnx_file, "_exported", other)
    with pytest.raises(UserError, match=r"ONNX and torch disagree by .*--no-onnx leaves it out"):
        to_onnx(MODELS["linear"]((6,)), Form((6,), "float32", ()))


class Branches(nn.Module):
    """Depends on its numbers, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) if float(x.sum()) > 0 else self.head(-x)


def test_a_network_that_cannot_be_written_is_one_line():
    with pytest.raises(UserError, match="torch cannot write this network as ONNX"):
        to_onnx(Branches(), Form((6,), "float32", ()))


def external(content: bytes, location: str) -> bytes:
    """The same file with its first weights in another file."""
    import onnx
    from onnx.external_data_helper import set_external_data

    proto = onnx.load_model_from_string(content)
    set_external_data(proto.graph.initializer[0], location)
    proto.graph.initializer[0].ClearField("raw_data")
    return proto.SerializeToString()


def test_files_of_others_are_not_trusted():
    content = to_onnx(MODELS["linear"]((6,)), Form((6,), "float32", ())).content
    for location in ("/etc/hostname", "../weights.bin", "weights.bin"):
        with pytest.raises(UserError, match="names other files for its weights"):
            scorer(external(content, location))
    for damaged in (b"", b"\x00" * 100, content[: len(content) // 2], b"{}"):
        with pytest.raises(UserError, match=r"model\.onnx"):
            scorer(damaged)
    with pytest.raises(UserError, match=r"cannot score examples of shape \[7\]"):
        scorer(content)(torch.zeros(2, 7))
