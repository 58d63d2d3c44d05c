"""Three real processes train a Cox model to the simulator's result; one that forbids times is refused in a line."""

from __future__ import annotations

import pytest

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from tests.deploy.deployment import Deployment
from tests.deploy.federated import SITES, assert_equals_simulator
from tests.deploy.test_survival import experiment


@pytest.mark.deploy
def test_three_processes_train_a_cox_model_unless_one_forbids_times(tmp_path):
    found, names = experiment(tmp_path, rounds=2), SITES[:3]
    patients = tmp_path / "patients.csv"
    patients.write_text("\n".join(line for line in patients.read_text().splitlines() if not line.endswith(",d")))
    with Deployment(tmp_path / "f", names, found) as federation:
        own = tmp_path / "f" / "sites" / "c" / "site.toml"
        allowed = own.read_text()
        assert 'times = "bins"' in allowed, "which init writes for this risk"
        own.write_text(allowed.replace('times = "bins"', 'times = "none"'))
        for name in ("server", *names):
            federation.start(name)
        federation.until(lambda: federation.processes["server"].poll() is not None, "the end of the server")
        last = federation.log("server").strip().splitlines()[-1]
        assert last.startswith("fedxl: c does not share event times")
        assert "Traceback" not in federation.log("server")
        own.write_text(allowed)  # sites read it anew, and stay
        federation.start("server")
        federation.finished()
        assert_equals_simulator(federation.folder, found)
        assert federation.dropped() == []
        assert federation.records()[0]["validation"]["cindex"] > 0
