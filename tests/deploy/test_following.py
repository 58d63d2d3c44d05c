"""A deployed run stops early like a simulated one, is tracked by the server alone, and can be watched."""

from __future__ import annotations

import json

import pytest

from fedxl.reporting import watch
from tests.deploy.federated import InProcess, assert_same, config, deployed, simulated

pytestmark = pytest.mark.usefixtures("impatient")


class Noted:
    """A tracker that remembers."""

    rows: list[dict] = []  # noqa: RUF012

    def begin(self, run) -> None:
        self.rows.clear()

    def write(self, row) -> None:
        self.rows.append(dict(row))

    def end(self, state) -> None:
        self.rows.append({"state": state})


def test_patience_and_tracking_across_sites(tmp_path):
    tracker = "tests.deploy.test_following:Noted"
    experiment = config("local_sgd", rounds=30, eval_every=1, patience=1)
    tracked = config("local_sgd", rounds=30, eval_every=1, patience=1, track=[tracker])
    carrier = InProcess(tmp_path)
    found, expected = deployed(tmp_path, tracked, carrier), simulated(experiment)
    assert expected.stopped_early
    assert found.stopped_early
    assert_same(found, expected)
    assert found.metrics["test"] == expected.metrics["test"]
    assert [row.get("round") for row in Noted.rows[:-2]] == [row["round"] for row in expected.history]
    assert Noted.rows[-2]["test"] == expected.metrics["test"]
    assert Noted.rows[-1] == {"state": "finished"}
    assert "Noted" not in json.dumps([facts for _, facts in carrier.sent], default=str), "it is the server's alone"
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    view = watch.look(metrics.parent)
    assert watch.state(view) == "stopped early"
    assert view.best[0] == found.best_round
