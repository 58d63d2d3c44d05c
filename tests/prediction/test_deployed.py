"""The run folder of a server with sites predicts and is exported like any other."""

from __future__ import annotations

import json

import numpy as np

from fedxl.data.digits import digits
from fedxl.prediction import predictor
from fedxl.prediction.export import export
from tests.deploy.federated import SITES, config, deployed


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
