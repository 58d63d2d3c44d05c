"""Optimisers and CVaR risks at sites, without a network: what they are in a simulation, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.deploy.federated import assert_same, config, deployed, simulated

pytestmark = pytest.mark.usefixtures("impatient")

CASES = {
    "Adam": ("fedxl2", {"descent": "adam", "server_update": "adam", "lr": 0.01}, {}),
    "momentum": ("local_sgd", {"descent": "momentum", "server_update": "momentum"}, {}),
    "CVaR": ("fedxl2", {}, {"name": "cvar_pauc", "fpr": 0.6, "fpr_from": 0.1}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_sites_come_to_what_the_simulator_does(tmp_path, case):
    """Also after a restart: the server's moments are in its checkpoint, and what a site remembers in its own."""
    algorithm, options, risk = CASES[case]
    plain = config(algorithm)
    experiment = replace(plain, algorithm={**plain.algorithm, **options}, risk=risk or plain.risk)
    deployed(tmp_path, replace(experiment, run={**experiment.run, "rounds": 2}))
    assert_same(deployed(tmp_path, experiment), simulated(experiment))
