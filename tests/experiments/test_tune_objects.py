"""`fedxl.tune` on objects: the trials are runs of `fit`, on no test data, and a folder goes on."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch

import fedxl
from fedxl.errors import UserError
from fedxl.experiments.tune.plan import FIRST_SEED
from fedxl.models import mlp
from tests.conftest import make_clients
from tests.experiments.test_compare import DATA, RUN
from tests.reporting.test_document import Reader

HELD = {"validation": DATA["validation"], "test": DATA["test"]}
MORE = {**HELD, **RUN, "sampler": "random", "trials": 3}


def model() -> torch.nn.Module:
    return mlp((5,), hidden=(4,))


def test_each_trial_is_a_run_of_fit(tmp_path):
    algorithm = fedxl.FeDXL2(fedxl.auroc(), level=fedxl.Level("free"))
    space = {"lr": (0.01, 1), "local_steps": (1, 4), "gamma": [0.1, 0.9]}
    found = fedxl.tune(model, DATA["clients"], algorithm, space, out=tmp_path / "t", **MORE)
    rows = found.table
    assert len(rows) == 3
    assert [row["auroc"] for row in rows] == sorted((row["auroc"] for row in rows), reverse=True)
    assert all(0.01 <= row["lr"] <= 1 and row["gamma"] in (0.1, 0.9) and 1 <= row["local_steps"] <= 4 for row in rows)
    for row in rows[:2]:  # the same by hand
        torch.manual_seed(FIRST_SEED)
        chosen = fedxl.build("fedxl2", fedxl.auroc(), lr=row["lr"], gamma=row["gamma"], level="free")
        run = {**RUN, "local_steps": row["local_steps"], "seed": FIRST_SEED}
        result = fedxl.fit(model(), DATA["clients"], chosen, validation=DATA["validation"], **run)
        assert result.metrics["validation"]["auroc"] == row["auroc"]
    assert (found.algorithm.lr, found.algorithm.level) == (rows[0]["lr"], algorithm.level)
    assert found.run == {"local_steps": rows[0]["local_steps"]}
    assert repr(found).startswith("lr ")
    assert f"{rows[0]['auroc']:.4g}" in Reader(found._repr_html_()).text
    assert ElementTree.parse(found.plot().save(tmp_path / "t.svg")).getroot().tag.endswith("svg")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "t" / "runs").rglob("*.safetensors")}
    more = {**MORE, "trials": 4}
    again = fedxl.tune(model, DATA["clients"], algorithm, space, out=tmp_path / "t", **more)
    assert len(again.table) == 4
    assert {path: path.stat().st_mtime_ns for path in written} == written, "what was done is not done again"
    with pytest.raises(UserError, match="holds a search with another config"):
        fedxl.tune(model, make_clients([(3, 4), (5, 6)], seed=3), algorithm, space, out=tmp_path / "t", **more)


def test_a_function_makes_the_algorithm_of_each_trial():
    def algorithm(lr: float, lam: float) -> fedxl.Algorithm:
        return fedxl.FeDXL2(fedxl.partial_auc(lam=lam), lr=lr)

    found = fedxl.tune(model(), DATA["clients"], algorithm, {"lr": (0.1, 1.0), "lam": [0.5, 2.0]}, **MORE)
    best = found.table[0]
    assert (found.algorithm.lr, found.algorithm.risk.lam) == (best["lr"], best["lam"])
    halved = {**MORE, "sampler": "halving", "trials": 3, "rounds": 6}
    found = fedxl.tune(model(), DATA["clients"], algorithm, {"lr": (0.1, 1.0), "lam": [0.5]}, **halved)
    assert sorted(row["rounds"] for row in found.table)[-1] == 6


def test_mistakes_are_one_line():
    algorithm = fedxl.FeDXL2(fedxl.auroc())
    for space, more, told in (
        ({}, {}, "space must name"),
        ({"lrr": (0.1, 1)}, {}, "unknown setting 'space.lrr'; did you mean 'space.lr'"),
        ({"lr": (1, 0.1)}, {}, "smaller end first"),
        ({"lr": 0.1}, {}, "'lr' must be a list of values"),
        ({"rounds": (1, 5)}, {}, "'rounds' must be the same in all trials"),
        ({"lr": (0.1, 1)}, {"validation": None}, "tuning needs validation data"),
        ({"lr": (0.1, 1)}, {"sampler": "grid"}, "sampler"),
        ({"lr": (0.1, 1)}, {"algorithm": fedxl.FeDXL2}, "algorithm is the class FeDXL2; give an object"),
        ({"lr": (0.1, 1)}, {"resume": True}, "resume: not for trials"),
    ):
        with pytest.raises(UserError, match=told):
            fedxl.tune(model, DATA["clients"], **{"algorithm": algorithm, "space": space, **MORE, **more})
