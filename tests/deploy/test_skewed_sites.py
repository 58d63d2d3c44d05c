"""Every way with skewed sites, deployed: the same as simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.deploy.federated import assert_same, config, deployed, simulated

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.mark.parametrize(
    "options",
    [
        {"level": "free"},
        {"level": "free", "one_class": "lend"},
        {"level": "even", "hold": 0.0},
        {"level": "even", "one_class": "train"},
    ],
    ids=str,
)
def test_every_way_with_skewed_sites_is_the_same_deployed(tmp_path, options):
    experiment = config("fedxl2", weighting="samples")
    experiment = replace(experiment, algorithm={**experiment.algorithm, **options})
    found = deployed(tmp_path, experiment)
    assert_same(found, simulated(experiment))
    assert "dropped" not in found.history[0]
