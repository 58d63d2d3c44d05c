"""Every way with skewed sites, deployed: the same as simulated, and no site passes for another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedxl.deploy.protocol.envelope import Envelope
from tests.deploy.federated import InProcess, assert_same, config, deployed, simulated


@pytest.mark.parametrize(
    "options",
    [
        {"level": "free"},
        {"level": "balanced", "one_class": "centre"},
        {"level": "bounded", "one_class": "train", "reach": 0.05},
        {"mix": 0.25},
    ],
    ids=str,
)
def test_every_way_with_skewed_sites_is_the_same_deployed(tmp_path, options):
    experiment = config("fedxl2", weighting="samples")
    experiment = replace(experiment, algorithm={**experiment.algorithm, **options})
    found = deployed(tmp_path, experiment)
    assert_same(found, simulated(experiment))
    assert "dropped" not in found.history[0]


def test_a_site_cannot_pass_for_another(tmp_path):
    """With own fresh pairs a client reads only scores of others: who they are from must be true."""
    carrier = InProcess(tmp_path)
    spoil = {"first.owner": lambda owner: owner + 1}
    carrier.faults = {
        (0, 1): lambda answer: Envelope(
            answer.facts,
            {
                name: next((f(leaf) for end, f in spoil.items() if name.endswith(end)), leaf)
                for name, leaf in answer.tensors.items()
            },
        )
    }
    experiment = config("fedxl2", cohort=0, rounds=1, eval_every=1)
    experiment = replace(experiment, algorithm={**experiment.algorithm, "mix": 0.25})
    [dropped] = deployed(tmp_path, experiment, carrier).history[0]["dropped"]
    assert "marked as those of another client" in dropped["reason"]
