"""Frozen weights at real sites: they arrive once, stay as they are, and nothing runs without them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedxl import UserError, wire
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.site.requests import HANDLERS
from fedxl.files import write_atomically
from fedxl.models import frozen_tensors, train_only
from tests.deploy.federated import SITES, InProcess, assert_same, config, copied, deployed, simulated

pytestmark = pytest.mark.usefixtures("impatient")
NAME = "tests.deploy.test_backbone:network"


def network(shape: tuple[int, ...], outputs: int, weights: str = "") -> nn.Module:
    """A backbone with BatchNorm and dropout, from a file if there is one, and a head."""
    body = [nn.Linear(math.prod(shape), 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU()]
    model = nn.Sequential(nn.Flatten(), nn.Sequential(*body), nn.Linear(6, outputs))
    if weights:
        model.load_state_dict(torch.load(weights, weights_only=True))
    return model


@pytest.fixture
def experiment(tmp_path):
    torch.manual_seed(7)
    pretrained = network((64,), 1)
    pretrained[1][1].running_mean += torch.randn(6)
    torch.save(pretrained.state_dict(), tmp_path / "pretrained.pt")
    model = {"name": NAME, "weights": str(tmp_path / "pretrained.pt"), "train": ["2"]}
    return replace(config("fedxl2"), model=model)


def carrier(folder, **settings) -> InProcess:
    return InProcess(folder, models=(NAME,), **settings)


def offers(sites: InProcess) -> list[str]:
    return [node for node, facts in sites.sent if "round" not in facts and "split" not in facts and "run" in facts]


def kept(folder):
    return sorted(folder.glob("*/state/frozen/*.safetensors"))


def test_a_frozen_backbone_gives_the_numbers_of_the_simulator(tmp_path, experiment):
    sites = carrier(tmp_path)
    found, expected = deployed(tmp_path, experiment, sites), simulated(experiment)
    assert_same(found, expected)
    assert found.metrics == expected.metrics
    pretrained = torch.load(tmp_path / "pretrained.pt", weights_only=True)
    for name, tensor in frozen_tensors(found.model).items():
        torch.testing.assert_close(tensor, pretrained[name], check_dtype=False, rtol=0, atol=0, msg=name)
    assert sorted(found.weights.params) == ["2.bias", "2.weight"]
    assert not found.weights.buffers
    assert len(kept(tmp_path)) == len(SITES)
    assert sorted(offers(sites)) == sorted(2 * list(sites.sites)), "a question and the weights, each once"


def test_a_site_keeps_the_backbone_for_the_next_run(tmp_path, experiment):
    deployed(tmp_path, experiment, carrier(tmp_path))
    sites = carrier(tmp_path)
    other = replace(experiment, run={**experiment.run, "seed": 6})
    assert_same(deployed(tmp_path / "second", other, sites), simulated(other))
    assert sorted(offers(sites)) == sorted(sites.sites), "the question alone"


@pytest.mark.parametrize("content", [None, b"", b"damaged"])
def test_what_a_site_has_lost_is_sent_again(tmp_path, experiment, content):
    deployed(tmp_path, replace(experiment, run={**experiment.run, "rounds": 2}), carrier(tmp_path))
    for path in kept(tmp_path):
        path.unlink() if content is None else write_atomically(path, content)
    assert_same(deployed(tmp_path, experiment, carrier(tmp_path)), simulated(experiment))


def test_sites_evaluate_with_the_frozen_weights(tmp_path, experiment):
    own = replace(experiment, data={})
    found = deployed(tmp_path, own, carrier(tmp_path, evaluate="scores"), evaluate="sites")
    expected = simulated(experiment)
    assert found.metrics["test"]["auroc"] == pytest.approx(expected.metrics["test"]["auroc"], abs=1e-12)


def test_random_weights_that_follow_from_the_seed_are_not_sent(tmp_path, experiment):
    sites, fresh = carrier(tmp_path), replace(experiment, model={"name": NAME, "train": ["2"]})
    assert_same(deployed(tmp_path, fresh, sites), simulated(fresh))
    assert not kept(tmp_path)


@pytest.mark.parametrize("change", ["number", "digest", "more", "malformed"])
def test_a_site_refuses_other_weights_than_the_run_names(tmp_path, experiment, change):
    sites = carrier(tmp_path)
    deployed(tmp_path, experiment, sites)
    (path, *_), facts = kept(tmp_path), dict(next(facts for _, facts in sites.sent if facts.get("frozen")))
    path.unlink()
    model = train_only(network((64,), 1).double(), ["2"])
    model.load_state_dict(torch.load(tmp_path / "pretrained.pt", weights_only=True))
    tensors = wire.flatten(frozen_tensors(model))
    if change == "number":
        tensors[":float64"][0] += 1
    elif change == "more":
        tensors["other"] = torch.ones(2)
    else:
        facts["frozen"] = "0" * 64 if change == "digest" else "../../somewhere"
    why = {"more": "unexpected", "malformed": "malformed"}.get(change, "another digest")
    with pytest.raises(ValueError, match=why):
        HANDLERS["frozen"](sites.sites["100"], copied(Envelope(facts, tensors)))
    assert not path.exists()


def test_a_site_trains_with_no_other_backbone(tmp_path, experiment):
    """A server that forgets to send it gets no update."""
    sites = carrier(tmp_path)
    plain = sites._handle
    sites._handle = lambda node, kind, request: (
        plain(node, kind, request._replace(tensors={})) if kind == "frozen" else plain(node, kind, request)
    )
    with pytest.raises(UserError, match="it did not keep the frozen weights"):
        deployed(tmp_path, experiment, sites, patience=1, deadline=1.0)


def test_frozen_weights_are_counted(tmp_path, experiment):
    sites = carrier(tmp_path, rounds=5)
    deployed(tmp_path, experiment, sites)
    assert (tmp_path / "a" / "state" / "requests.json").read_text().count('"frozen": 1') == 1


def test_a_deployment_goes_on_with_its_own_backbone_only(tmp_path, experiment):
    deployed(tmp_path, replace(experiment, run={**experiment.run, "rounds": 2}), carrier(tmp_path))
    state = torch.load(tmp_path / "pretrained.pt", weights_only=True)
    state["1.0.weight"][0] += 1
    torch.save(state, tmp_path / "pretrained.pt")
    with pytest.raises(UserError, match=r"task\.frozen was"):
        deployed(tmp_path, experiment, carrier(tmp_path))
