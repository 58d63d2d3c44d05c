"""Draws from seeds that only one party knows: a run is still what the simulator makes of the same seeds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedxl import UserError, tree
from fedxl.algorithms import build
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.provision import folders
from fedxl.deploy.provision.settings import read_server, read_site
from fedxl.deploy.site import requests
from fedxl.deploy.site.permission import require_discreet
from fedxl.deploy.storage import SEED_FILE
from fedxl.engine.drawing import Secrets
from fedxl.risks import auroc, partial_auc
from tests.deploy.federated import InProcess, assert_same, config, deployed, secrets_of, simulated, site_file
from tests.deploy.test_sites import train_request

pytestmark = pytest.mark.usefixtures("impatient")


def with_order(order: str = "sorted", **run):
    experiment = config("fedxl2", **run)
    return replace(experiment, algorithm={**experiment.algorithm, "order": order})


def test_with_the_same_secrets_sites_and_simulator_come_to_the_same_bits(tmp_path):
    """Also if the server is started again, and if a round is asked for twice."""
    experiment, carrier = with_order(), InProcess(tmp_path, private_draws=True, sorted_scores=True)
    lost = {(n, 2): (lambda reply: Envelope({**reply.facts, "round": 99}, reply.tensors)) for n in range(4)}
    carrier.faults = dict(lost)
    deployed(
        tmp_path, replace(experiment, run={**experiment.run, "rounds": 2}), carrier, private_draws=True, minimum=3
    )
    found = deployed(tmp_path, experiment, carrier, private_draws=True, minimum=3)
    secrets = secrets_of(tmp_path / "server" / "run", tmp_path)
    assert set(secrets.own) == {0, 1, 2, 3}
    assert len({secrets.pool, *secrets.own.values()}) == 5
    assert_same(found, simulated(experiment, secrets))
    for fewer in (Secrets(secrets.own), Secrets(pool=secrets.pool)):
        weights = zip(tree.leaves(found.weights), tree.leaves(simulated(experiment, fewer).weights), strict=True)
        assert any(not torch.equal(one, other) for one, other in weights), "each of them counts"
    said = json.dumps([facts for _, facts in carrier.sent])
    assert not any(str(seed) in said for seed in (secrets.pool, *secrets.own.values()))
    assert (tmp_path / "server" / "run" / SEED_FILE).stat().st_mode & 0o777 == 0o600


def test_sites_may_differ_in_whether_their_draws_are_private(tmp_path):
    experiment, carrier = config("fedxl1", rounds=2, cohort=0), InProcess(tmp_path)
    carrier.sites["101"] = site_file(tmp_path, 1, private_draws=True)
    found = deployed(tmp_path, experiment, carrier)
    secrets = secrets_of(tmp_path / "server" / "run", tmp_path)
    assert ([*secrets.own], secrets.pool) == ([1], 0)
    assert_same(found, simulated(experiment, secrets))


def test_a_site_refuses_a_run_whose_scores_are_in_the_order_of_their_draws(tmp_path):
    _, request = train_request(tmp_path)
    with pytest.raises(UserError, match=r"the run has order = 'drawn'; set order = \"sorted\" in \[algorithm\]"):
        requests.train(site_file(tmp_path, 0, sorted_scores=True), request)
    requests.train(site_file(tmp_path, 0), request)


@pytest.mark.parametrize(("name", "uploads"), [("fedxl1", True), ("fedxl2", True), ("local_sgd", False)])
def test_it_asks_that_only_of_algorithms_that_pool_scores(tmp_path, name, uploads):
    careful, risk = site_file(tmp_path, 0, sorted_scores=True), auroc() if name == "fedxl1" else partial_auc()
    algorithm = build(name, risk)
    if not uploads:
        require_discreet(careful, algorithm, risk)
        return
    with pytest.raises(UserError, match="uploads only sorted scores"):
        require_discreet(careful, algorithm, risk)
    require_discreet(careful, build(name, risk, order="sorted"), risk)


def test_init_switches_on_what_costs_nothing(tmp_path):
    folders.init(["a"], tmp_path / "f", config=config("fedxl2"))
    folders.init(["a"], tmp_path / "g", config=config("codasca"))
    folders.init(["a"], tmp_path / "h", config=with_order("drawn"))
    orders, private, required = [], [], []
    for place in (tmp_path / name for name in "fgh"):
        server, site = read_server(place / "server" / "server.toml"), read_site(place / "sites" / "a" / "site.toml")
        orders.append(server.config.algorithm.get("order"))
        private.append((server.settings.private_draws, site.settings.private_draws))
        required.append(site.settings.sorted_scores)
    assert private == [(True, True)] * 3
    assert orders == ["sorted", None, "drawn"]
    assert required == [True, False, False], "what the experiment itself does"
