"""Runs side by side in Python: the same figures as the evaluation has, and one line for mistakes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedxl
from fedxl.errors import UserError
from fedxl.evaluation.compare import differences, seed_intervals
from fedxl.experiments.compare import _metric
from fedxl.models import mlp
from tests.conftest import make_clients
from tests.reporting.test_document import Reader
from tests.training.test_result import SIZES, fitted

BOTH = {"ours": fedxl.FeDXL2(fedxl.auroc()), "theirs": fedxl.LocalPair(fedxl.auroc(), lr=0.5)}
DATA = {
    "clients": make_clients(SIZES),
    "validation": make_clients([(9, 21)], seed=9)[0],
    "test": make_clients([(9, 21)], seed=10)[0],
}
RUN = {"rounds": 2, "local_steps": 2, "batch_size": 8, "eval_every": 2}


def test_algorithms_are_trained_and_compared_with_the_same_seeds():
    found = fedxl.compare(BOTH, model=lambda: mlp((5,), hidden=(4,)), seeds=3, reference="theirs", **DATA, **RUN)
    assert list(found.table) == list(BOTH)
    scores = {label: [result.scores["test"] for result in runs] for label, runs in found.results.items()}
    for label, each in scores.items():
        wanted = seed_intervals(["auroc"], each, same=True)["auroc"]
        assert found.table[label]["auroc"] == wanted
    assert found.reference == "theirs"
    assert list(found.differences) == ["ours"]
    wanted = differences(scores["ours"], scores["theirs"])["auroc"]
    assert found.differences["ours"]["auroc"] == wanted
    assert f"{wanted.value:+.3f}".replace("-", "−") in repr(found)
    text = Reader(found._repr_html_()).text
    assert f"{wanted.value:+.3f}".replace("-", "−") in text
    assert len(found.plot().figures) == 2
    torch.manual_seed(1)  # what the second seed began with
    clients, held = DATA["clients"], {name: DATA[name] for name in ("validation", "test")}
    again = fedxl.fit(mlp((5,), hidden=(4,)), clients, BOTH["ours"], seed=1, **held, **RUN)
    np.testing.assert_array_equal(again.scores["test"].scores, scores["ours"][1].scores)


def test_one_metric_chooses_the_rounds_of_all_algorithms():
    mixed = {"ours": fedxl.FeDXL2(fedxl.partial_auc()), "sgd": fedxl.LocalSGD(lr=0.1)}
    clients, held = DATA["clients"], {name: DATA[name] for name in ("validation", "test")}
    for more, metric in (({}, "pauc@0.3"), ({"reference": "sgd"}, "auroc"), ({"select": "ap"}, "ap")):
        found = fedxl.compare(mixed, mlp((5,)), clients, **held, **RUN, **more)
        assert {run.chosen_by for run in found.runs} == {metric}
    assert _metric(found.results["sgd"]) == "ap"
    assert _metric(fedxl.FeDXL2(fedxl.contrastive())) == "", "a risk is no metric of others"


def test_results_and_folders_are_compared_as_they_are(tmp_path):
    result, other = fitted(), fitted(algorithm=fedxl.LocalPair(fedxl.auroc(), lr=0.5))
    other.save(tmp_path / "other")
    found = fedxl.compare({"a": [result, fitted(seed=1)], "b": tmp_path / "other"}, reference="a")
    assert found.results == {}
    assert found.table["b"]["auroc"].value == pytest.approx(other.metrics["test"]["auroc"])
    page = found.report(tmp_path / "report.html").read_text()
    assert "A (a)" in page
    assert fedxl.report([result, tmp_path / "other"], tmp_path / "two.html").read_text().count("<h2") >= 4
    assert fedxl.report(result, tmp_path / "one.html").exists()


def test_mistakes_are_one_line(tmp_path):
    for what, more, told in (
        ([], {}, "by label, in a dict"),
        ({"a": 5}, {}, "runs must be a result"),
        ({"": fitted}, {}, "labels must be texts"),
        (BOTH, {}, "algorithms need model and clients"),
        (BOTH, {**DATA, "model": mlp((5,)), "out": "x"}, "out: not for several runs"),
        (BOTH, {**DATA, "model": mlp((5,)), "seeds": 0}, "seeds must lie between 1"),
        ({"a": [5]}, {}, "runs must be a result"),
    ):
        with pytest.raises(UserError, match=told):
            fedxl.compare(what, **more)
    with pytest.raises(UserError, match="cannot write"):
        fedxl.report(fitted(), tmp_path / "no" / "report.html")
