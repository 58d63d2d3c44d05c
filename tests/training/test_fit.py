"""`fit` as users meet it: every setting in its signature, with the same defaults as in a config."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import fedxl
from fedxl.algorithms import ALGORITHMS, Descent
from fedxl.algorithms.protocol import DataFacts
from fedxl.config.experiment import Config, build_algorithm, build_problem
from fedxl.training.settings import Settings
from tests.conftest import RAGGED, make_clients

SIZES = {"rounds": 2, "local_steps": 2, "dtype": "float64", "device": "cpu"}


def test_every_setting_is_in_the_signature_with_its_default():
    parameters = inspect.signature(fedxl.fit).parameters
    for item in fields(Settings):
        if item.name in ("batch1", "batch2"):
            continue
        assert parameters[item.name].default == item.default, item.name
        assert f"{item.name}: " in inspect.getdoc(fedxl.fit), "documented"
    assert parameters["batch_size"].default == (Settings().batch1, Settings().batch2)
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())


def test_one_batch_size_serves_both_sides(network):
    clients = make_clients(RAGGED)
    algorithm = fedxl.FeDXL2(fedxl.partial_auc(), lr=0.1)
    one, two = (fedxl.fit(network(), clients, algorithm, batch_size=size, **SIZES) for size in (3, (3, 3)))
    assert all(torch.equal(two.weights.params[name], value) for name, value in one.weights.params.items())


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_an_algorithm_is_built_without_a_network_and_says_what_it_is(name):
    algorithm = ALGORITHMS[name](fedxl.auroc(surrogate="square"), lr=0.25)
    assert "risk=auroc(surrogate='square'), lr=0.25" in repr(algorithm)
    with pytest.raises(AttributeError):
        algorithm.lr = 1.0
    assert replace(algorithm, lr=0.5).risk is algorithm.risk
    assert isinstance(algorithm, Descent)


def test_baselines_need_no_risk(network):
    for algorithm in (fedxl.LocalSGD(lr=0.1), fedxl.CODASCA(lr=0.1)):
        x, y = make_clients([(20, 30)], seed=9)[0]
        result = fedxl.fit(network(), make_clients(RAGGED), algorithm, validation=(x, y), **SIZES)
        assert set(result.metrics) == {"validation", "test"}
        assert result.metrics["validation"]["auroc"] > 0


@pytest.mark.parametrize("seed", [-1, "x", [1], None])
def test_settings_are_checked_before_a_network_is_built(seed):
    config = Config(data={}, risk={"name": "auroc"}, algorithm={"name": "fedxl1"}, run={"seed": seed})
    with pytest.raises(fedxl.UserError, match="seed"):
        build_problem(config, (5,), DataFacts())


def wrong(risk: object) -> int:
    return 3


def without_a_risk(lr: float = 0.1) -> None: ...


@pytest.mark.parametrize(("name", "expected"), [("wrong", "gave a int"), ("without_a_risk", "must take its risk")])
def test_what_is_no_algorithm_is_one_line(name, expected):
    config = Config(data={}, risk={"name": "auroc"}, algorithm={"name": f"{__name__}:{name}"})
    with pytest.raises(fedxl.UserError, match=expected):
        build_algorithm(config)


def test_one_object_serves_many_runs(network):
    """Nothing of a run stays in the algorithm."""
    algorithm = fedxl.CODASCA(lr=0.1)
    first = fedxl.fit(network(), make_clients(RAGGED), algorithm, **SIZES)
    other = nn.Linear(3, 1).double()
    fedxl.fit(other, make_clients([(5, 5), (6, 2)], dim=3), algorithm, **SIZES)
    again = fedxl.fit(network(), make_clients(RAGGED), algorithm, **SIZES)
    assert all(torch.equal(again.weights.params[name], value) for name, value in first.weights.params.items())
