"""The run folder of a server with sites predicts and is exported like any other."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from fedxl.data.sets.digits import digits
from fedxl.prediction import card, predictor
from fedxl.prediction.export import export
from tests.deploy.federated import SITES, config, deployed
from tests.deploy.test_site_curves import judged
from tests.reporting import sample


def test_a_servers_run_predicts_and_is_exported(tmp_path):
    result = deployed(tmp_path, config("fedxl2"))  # float64; the server has validation data of its own
    x = digits(clients=4, one_class=1, seed=3).test.x
    (folder,) = (path.parent for path in tmp_path.rglob("run.json"))
    expected = result.predict(x)
    np.testing.assert_array_equal(predictor.load(folder).predict(x).scores, expected.scores)
    found = export(folder, tmp_path / "model", onnx=False)
    np.testing.assert_array_equal(predictor.load(found.path).predict(x).probabilities, expected.probabilities)
    card = (found.path / "README.md").read_text()
    assert "trained across real sites" in card
    assert all(f"| {site} |" in card for site in SITES)
    assert json.loads((found.path / "model.json").read_text())["weights_dtype"] == "float64"


def test_where_sites_disclose_curves_these_decide(tmp_path):
    """No score leaves a site, and predictions have probabilities and classes all the same."""
    result, _ = judged(tmp_path)
    assert not result.scores
    x = digits(clients=4, one_class=1, seed=3).test.x
    (folder,) = (path.parent for path in tmp_path.rglob("run.json"))
    found, expected = predictor.load(folder).predict(x), result.predict(x)
    assert found.probabilities is not None
    np.testing.assert_array_equal(found.probabilities, expected.probabilities)
    np.testing.assert_array_equal(found.classes, expected.classes)
    assert 0 < found.classes.mean() < 1
    card = (export(folder, onnx=False).path / "README.md").read_text()
    assert "holds to the width of a bin" in card
    assert "metrics are of the counts in bins that sites disclosed" in card
    (row,) = [line for line in card.splitlines() if line.startswith("| all together |")]
    auroc = float(row.split("|")[4].split()[0])
    assert abs(auroc - result.metrics["test"]["auroc"]) < 0.005, "the middle of each bin stands for its scores"


def test_metrics_that_sites_disclosed_are_in_the_card():
    run = sample.runs()[0]
    told = {"a": {"auroc": 0.7126}, "b": "too few |"}
    bare = replace(run, in_memory=({}, {}), done={**run.done, "test_by_site": told})
    text = "\n".join(card._metrics(None, bare))
    assert "no intervals. They rest on 1 of 2 sites." in text
    assert "| all together | 0.900 | 0.800 |" in text
    assert "| a | 0.713 | not defined |" in text
    assert "b: too few \\|" in text
