"""Plans of participation with sites: the server asks the groups that a simulation runs, and for no trace."""

from __future__ import annotations

import pytest

from fedxl import UserError
from tests.deploy.federated import InProcess, assert_same, config, deployed, simulated

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.mark.parametrize("participation", ["cyclic", "reshuffled"])
def test_groups_of_sites_come_to_the_bits_of_the_simulation(tmp_path, participation):
    experiment = config("fedxl2", participation=participation, weighting="samples")
    carrier = InProcess(tmp_path)
    found = deployed(tmp_path, experiment, carrier)
    assert_same(found, simulated(experiment))
    asked: dict[int, set[int]] = {}
    for node, facts in carrier.sent:
        if "round" in facts and "base" in facts:
            asked.setdefault(facts["round"], set()).add(node)
    assert all(len(asked[r]) == 2 and asked[r].isdisjoint(asked[r + 1]) for r in (0, 2)), "two groups in turn"


def test_a_server_takes_no_trace(tmp_path):
    (tmp_path / "trace.json").write_text('{"rounds": [["a"]]}')
    experiment = config("fedxl2", participation="trace", trace=str(tmp_path / "trace.json"))
    with pytest.raises(UserError, match="participation = 'trace' is for simulations"):
        deployed(tmp_path, experiment)
