"""Plans of participation with sites: the server asks the groups that a simulation runs, and for no trace."""

from __future__ import annotations

import pytest

from fedxl import UserError
from fedxl.training.hooks import Hooks
from tests.deploy.federated import InProcess, assert_same, config, deployed, simulated

pytestmark = pytest.mark.usefixtures("impatient")


def test_groups_of_sites_come_to_the_bits_of_the_simulation(tmp_path):
    experiment = config("fedxl2", participation="cyclic", weighting="samples")
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


def test_sites_that_count_by_their_own_risk_come_to_the_bits_of_the_simulation(tmp_path):
    experiment = config("fedxl2")
    experiment.algorithm["worst_site"] = 0.2
    assert_same(deployed(tmp_path, experiment), simulated(experiment))


def test_a_site_that_reports_a_risk_beyond_all_scores_is_left_out(tmp_path):
    experiment = config("local_pair", cohort=0, rounds=1)
    experiment.risk["scores"] = "sigmoid"
    experiment.algorithm["worst_site"] = 0.2
    carrier, lines = InProcess(tmp_path), list[str]()
    carrier.faults[0, 1] = lambda reply: reply._replace(tensors={**reply.tensors, "risk": reply.tensors["risk"] + 50})
    deployed(tmp_path, experiment, carrier, Hooks(say=lines.append))
    assert any(line.startswith("round 1: nothing from a: its own risk is 5") for line in lines), lines
