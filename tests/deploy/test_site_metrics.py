"""Metrics at sites: a site's own, which ones a server may name, and which values are believed."""

from __future__ import annotations

import functools
import json
import math
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedxl import METRICS, Metric, UserError, auroc, metrics, partial_auc, registry, wire
from fedxl.algorithms.protocol import DataFacts
from fedxl.config.experiment import build_problem
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.server.examiner import SiteExaminer
from fedxl.deploy.site import cache, requests
from fedxl.errors import RefusedError
from fedxl.models import weights_of
from fedxl.training.evaluate import Evaluator, asked_for
from tests.deploy.federated import config, deployed, simulated, site_file
from tests.deploy.test_site_evaluation import PERFECT, Judging, judged

pytestmark = pytest.mark.usefixtures("impatient")


def sensitivity(scores, labels, limit):
    """True positive rate at a false positive rate: a metric of a user's own package, this one."""
    return float(np.interp(limit, *metrics.roc(scores, labels)))


sensitivity_at = Metric(sensitivity, range=(0.0, 1.0), takes_limit=True)
naming = functools.partial(replace, auroc(), metric=f"{__name__}:sensitivity_at@0.2")
OWN = f"{__name__}:sensitivity_at"


def test_a_metric_of_ones_own_at_sites(tmp_path):
    """Allowed by their files, it is averaged as the others are, and the best model may be chosen by it."""
    experiment = config("fedxl2", rounds=4, eval_every=1, metrics=[OWN], fpr=[0.3], select=f"{OWN}@0.2")
    carrier = Judging(tmp_path, ["metrics"] * 4, metrics=(OWN,))
    found = deployed(tmp_path, experiment, carrier, evaluate="sites")
    for record in found.history:
        each = record["validation_by_site"].values()
        pairs = [values["positives"] * values["negatives"] for values in each]
        for name in ("sensitivity_at@0.2", "sensitivity_at@0.3"):
            mean = sum(n * values[name] for n, values in zip(pairs, each, strict=True)) / sum(pairs)
            assert record["validation"][name] == pytest.approx(mean, abs=1e-12)
    values = [record["validation"]["sensitivity_at@0.2"] for record in found.history]
    assert found.best_round == 1 + values.index(max(values))
    pooled = deployed(
        tmp_path / "b", experiment, Judging(tmp_path / "b", ["scores"] * 4, metrics=(OWN,)), evaluate="sites"
    )
    expected = simulated(experiment)
    assert pooled.metrics["test"]["sensitivity_at@0.2"] == pytest.approx(
        expected.metrics["test"]["sensitivity_at@0.2"], abs=1e-12
    )


EVIL = [
    {"metrics": ["this:s"]},
    {"metrics": ["auroc", "this:s@0.3"]},
    {"select": "this:s"},
    {"select": "-this:s"},
    {"select": "--this:s"},
    {"select": "-this:s@0.3"},
    {"select": "pauc@0.3:this:s"},
    {"select": " this:s"},
    {"metrics": ["-this:s"]},
    {"metrics": ["auroc@this:s"]},
    {"metrics": "this:s"},
    {"metrics": {"this:s": 1}},
    {"metrics": [["this:s"]]},
    {"metrics": [OWN, f"{OWN}.this:s"]},
    {"metrics": ["this:"]},
    {"select": ["this:s"]},
    {"select": None, "metrics": ["this:s"]},
    {"risk": {"name": f"{__name__}:naming"}, "metrics": []},  # an allowed risk that names a metric itself
    {"risk": {"name": f"{__name__}:naming", "metric": "this:s"}},  # in an option that a server may set
]


@pytest.mark.parametrize("changes", EVIL, ids=str)
@pytest.mark.parametrize("kind", ["metrics", "scores"])
def test_a_server_makes_a_site_import_nothing_that_its_file_does_not_allow(tmp_path, monkeypatch, changes, kind):
    experiment = config("fedxl2", rounds=1)
    risk = changes.get("risk", experiment.risk)
    run = {**experiment.run, **{name: value for name, value in changes.items() if name != "risk"}}
    tables = {**experiment.tables(), "risk": risk, "run": run}
    mine = site_file(tmp_path, 0, evaluate=kind, risks=("pauc", f"{__name__}:naming"), metrics=("json:dumps",))
    problem = build_problem(replace(experiment, risk={"name": "pauc"}), (1, 8, 8), DataFacts(0.5))
    facts = {"version": requests.__version__, "run": "0123456789abcdef", "facts_of_all": '{"positive_share": 0.5}'}
    request = Envelope(
        {**facts, "config": json.dumps(tables), "split": "test"}, wire.flatten(weights_of(problem.model))
    )
    cache.training_data(mine)  # reading the data imports what it needs, which is the site's own affair
    imported: list[str] = []
    original = registry.importlib.import_module
    monkeypatch.setattr(
        registry.importlib, "import_module", lambda name, *rest: imported.append(name) or original(name, *rest)
    )
    with pytest.raises((UserError, TypeError)) as error:
        requests.evaluate(mine, request)
    assert isinstance(error.value, UserError)
    known = {__name__, "fedxl.algorithms.private", "fedxl.algorithms.server_rules"}
    assert set(imported) <= known, "the risk's module, and those that fedxl's own algorithms name"
    assert "this" not in sys.modules


def test_built_in_names_are_always_allowed_and_their_limits_counted(tmp_path):
    more = config("fedxl2", rounds=2, metrics=["pauc@0.2", "ap"])
    found, _ = judged(tmp_path / "a", *["metrics"] * 4, experiment=more)
    assert "pauc@0.2" in found.metrics["validation"]
    many = config("fedxl2", rounds=2, fpr=[0.1, 0.3], metrics=[f"pauc_raw@{n / 20}" for n in range(1, 6)])
    found, _ = judged(tmp_path / "b", *["metrics"] * 4, experiment=many)
    assert "pauc_raw@0.05" in found.metrics["validation"], "six limits"
    many = config("fedxl2", rounds=2, fpr=[0.1, 0.3], metrics=[f"pauc@{n / 20}" for n in range(1, 6)] + ["pauc@0.7"])
    found, _ = judged(tmp_path / "c", *["metrics"] * 4, experiment=many)
    assert "7 false positive rates are more than this site discloses" in found.history[0]["validation_by_site"]["a"]
    owned = config("fedxl2", rounds=2, fpr=[0.3], metrics=[f"{OWN}@{n / 20}" for n in range(7, 13)])
    carrier = Judging(tmp_path / "d", ["metrics"] * 4, metrics=(OWN,))
    found = deployed(tmp_path / "d", owned, carrier, evaluate="sites")
    assert "7 false positive rates are more than" in found.history[0]["validation_by_site"]["a"]


def test_a_last_bit_above_one_is_believed(tmp_path):
    carrier = Judging(tmp_path, ["metrics"] * 4)
    above = PERFECT | {"auroc": math.nextafter(1, 2)}
    carrier.spoil = lambda a: Envelope({**a.facts, "metrics": json.dumps(above)}, {})
    found = deployed(tmp_path, config("fedxl2", rounds=2), carrier, evaluate="sites")
    assert found.history[0]["validation_by_site"]["a"]["auroc"] == math.nextafter(1, 2)


@pytest.fixture
def examiner():
    risk = partial_auc()
    evaluator = Evaluator(lambda w, x: x, risk, asked_for(risk, "auroc", (0.3,), [sensitivity_at]), torch.float64)
    return SiteExaminer(None, evaluator, "auroc", None, None)


def test_hundreds_of_mutated_answers_are_refused_or_within_range(examiner):
    """Whatever a site tells, what is believed lies in the metric's range, and counts are whole."""
    chance = random.Random(0)
    good = dict.fromkeys(examiner.evaluator.ranges, 0.5) | dict.fromkeys(metrics.COUNTS, 3)
    odd = [-1e-6, 1.0 + 1e-6, -1, 2, 1e308, math.inf, -math.inf, math.nan, 10**400, -0.0, 1, 0, "0.5", "x", None, [],
           {}, True, 2.5, "nan", "inf", "1e999", 1e9, 1e9 + 1]  # fmt: skip
    believed = refused = 0
    for _ in range(3000):
        told = dict(good)
        for _ in range(chance.choice((1, 1, 2))):
            name = chance.choice(list(told))
            if chance.random() < 0.1:
                del told[name]
            else:
                told[name] = chance.choice(odd)
        try:
            values = examiner._metrics(json.loads(json.dumps(told)))
        except (RefusedError, KeyError, TypeError, ValueError, OverflowError):
            refused += 1  # by `examine`, in one line: test_lies_are_not_believed
            continue
        believed += 1
        for name, (low, high) in examiner.evaluator.ranges.items():
            assert math.isnan(values[name]) or (low - 1e-9 <= values[name] <= high + 1e-9)
            assert not math.isinf(values[name])
        assert all(values[name].is_integer() and 0 <= values[name] <= 1e9 for name in metrics.COUNTS)
        assert set(values) == set(good), "and nothing else"
    assert believed > 300 < refused


@pytest.mark.parametrize("row", [*METRICS, "sensitivity"])
def test_every_rows_range_is_enforced(examiner, row):
    good = dict.fromkeys(examiner.evaluator.ranges, 0.5) | dict.fromkeys(metrics.COUNTS, 3)
    [name] = [name for name in examiner.evaluator.ranges if name.partition("@")[0] == row]
    low, high = METRICS[row].range if row in METRICS else sensitivity_at.range
    for beyond in (math.inf, -math.inf, low - 0.001, high + 0.001):
        with pytest.raises(RefusedError, match=f"it reports {name} ="):
            examiner._metrics(good | {name: beyond})
    for within in (math.nan, max(low, -1e30), min(high, 1e30)):
        examiner._metrics(good | {name: within})
