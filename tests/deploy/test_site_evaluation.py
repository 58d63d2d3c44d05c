"""Evaluation at sites, without a network: what leaves each, what becomes of it, and what is not believed."""

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
from fedxl.config.experiment import build_problem, load_data
from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.deploy.provision.settings import ServerSettings, SiteSettings
from fedxl.deploy.server.examiner import SiteExaminer
from fedxl.deploy.site import cache, requests
from fedxl.errors import RefusedError
from fedxl.models import weights_of
from fedxl.training.evaluate import Evaluator, asked_for, better_at_common_sites
from fedxl.training.trainer import Hooks
from tests.deploy.federated import SITES, InProcess, config, deployed, simulated, site_file

pytestmark = pytest.mark.usefixtures("impatient")


class Judging(InProcess):
    """Sites that let so much of an evaluation go; what each has answered is kept, and may be spoilt before."""

    def __init__(self, folder, kinds, **allowed) -> None:
        super().__init__(folder)
        self.sites = {
            100 + number: site_file(folder, number, evaluate=kind, **allowed) for number, kind in enumerate(kinds)
        }
        self.answered: list[tuple[str, Envelope]] = []
        self.spoil = lambda answer: answer

    def _handle(self, node, kind, request):
        answer = super()._handle(node, kind, request)
        if kind == "evaluate":
            answer = self.spoil(answer) if node == 100 else answer
            self.answered.append((SITES[node - 100], answer))
        return answer


def judged(folder, *kinds, experiment=None, **more):
    carrier = Judging(folder, kinds)
    found = deployed(folder, experiment or config("fedxl2"), carrier, evaluate="sites", **more)
    return found, carrier


def test_scores_of_all_sites_give_the_metrics_of_the_data_in_one_place(tmp_path):
    found, _ = judged(tmp_path, *["scores"] * 4)
    expected = simulated(config("fedxl2"))
    assert found.best_round == expected.best_round
    for mine, theirs in [
        (found.metrics["test"], expected.metrics["test"]),
        (found.metrics["validation"], expected.metrics["validation"]),
    ]:
        assert mine.keys() == theirs.keys()
        assert all(mine[name] == pytest.approx(theirs[name], abs=1e-12) for name in theirs)
    scores, labels = found.test_scores
    assert metrics.auroc(scores, labels) == pytest.approx(expected.metrics["test"]["auroc"], abs=1e-12)
    by_site = found.history[-1]["validation_by_site"]
    assert sum(values["positives"] for values in by_site.values()) == found.metrics["validation"]["positives"]


def test_metrics_alone_are_averaged_by_pairs_and_no_score_leaves(tmp_path):
    found, carrier = judged(tmp_path, "metrics", "scores", "metrics", "metrics")
    assert {name for name, answer in carrier.answered if answer.tensors} == {"b"}, "only who allows it sends scores"
    assert found.test_scores is None
    each = list(found.history[-1]["validation_by_site"].values())
    pairs = [values["positives"] * values["negatives"] for values in each]
    record = found.history[-1]["validation"]
    for name in ("auroc", "pauc@0.3", "risk"):
        mean = sum(n * values[name] for n, values in zip(pairs, each, strict=True)) / sum(pairs)
        assert record[name] == pytest.approx(mean, abs=1e-12)
    whole = load_data(config("fedxl2")).validation
    assert record["positives"] == int(whole.y.sum())


def test_by_default_nothing_leaves_and_the_last_model_is_the_result(tmp_path):
    lines: list[str] = []
    assert SiteSettings(name="a").evaluate == "none"
    found, carrier = judged(tmp_path, *["none"] * 4, hooks=Hooks(say=lines.append))
    assert all(set(answer.facts) == {"site", "split", "kind", "why"} for _, answer in carrier.answered)
    assert not any(answer.tensors for _, answer in carrier.answered)
    assert found.best_round == 4
    assert found.metrics["test"] == {}
    assert found.history[0]["validation_by_site"] == dict.fromkeys(SITES, "it lets no evaluation go")
    assert any("nobody could evaluate" in line and "a: it lets no evaluation go" in line for line in lines)


def test_who_lets_nothing_go_is_left_out_and_the_rest_is_pooled(tmp_path):
    found, _ = judged(tmp_path, "scores", "none", "scores", "scores")
    by_site = found.history[-1]["validation_by_site"]
    assert by_site["b"] == "it lets no evaluation go"
    told = [values["positives"] for values in by_site.values() if not isinstance(values, str)]
    assert found.metrics["validation"]["positives"] == sum(told)
    assert found.test_scores is not None


def test_scores_leave_in_an_order_that_tells_nothing(tmp_path):
    _, carrier = judged(tmp_path, *["scores"] * 4)
    for _, answer in carrier.answered:
        scores = answer.tensors["scores"]
        assert bool((scores.diff() >= 0).all())
        assert answer.tensors["labels"].dtype == torch.uint8


@pytest.mark.parametrize("shape", [(40,), (40, 3)])
def test_not_even_ties_tell_which_example_is_which(shape):
    """A model of the server's making may score many examples alike: then only how many there are may leave."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 2, shape, generator=generator).double()
    labels = torch.randint(0, 2, shape[:1], generator=generator)
    shuffled = torch.randperm(40, generator=generator)
    one, other = requests._in_no_order(scores, labels), requests._in_no_order(scores[shuffled], labels[shuffled])
    assert torch.equal(one.scores, other.scores)
    assert torch.equal(one.labels, other.labels)
    assert int(one.labels.sum()) == int(labels.sum())


def test_the_whole_curve_does_not_leave_as_metrics(tmp_path):
    experiment = config("fedxl2", rounds=2, fpr=[n / 20 for n in range(1, 20)])
    found, _ = judged(tmp_path, *["metrics"] * 4, experiment=experiment)
    assert "19 false positive rates are more than this site lets go" in found.history[0]["validation_by_site"]["a"]


def test_one_site_without_a_metric_does_not_silence_the_others(tmp_path):
    carrier = Judging(tmp_path, ["metrics"] * 4)
    carrier.spoil = lambda a: Envelope({**a.facts, "metrics": json.dumps(PERFECT | {"pauc@0.3": math.nan})}, {})
    found = deployed(tmp_path, config("fedxl2", rounds=2), carrier, evaluate="sites")
    by_site = found.history[0]["validation_by_site"]
    told = [by_site[name] for name in SITES[1:]]
    pairs = [values["positives"] * values["negatives"] for values in told]
    mean = sum(n * values["auroc"] for n, values in zip(pairs, told, strict=True)) / sum(pairs)
    assert found.metrics["validation"]["auroc"] == pytest.approx(mean, abs=1e-12)


def test_scores_beyond_the_risk_count_for_nothing(tmp_path):
    experiment = config("fedxl2", rounds=2, select="-risk")
    experiment = replace(experiment, risk={"name": "pauc", "scores": "raw"})
    carrier = Judging(tmp_path, ["scores"] * 4)
    carrier.spoil = lambda a: a._replace(tensors={**a.tensors, "scores": a.tensors["scores"] * 0 + 1e300})
    found = deployed(tmp_path, experiment, carrier, evaluate="sites")
    assert found.best_round == 2
    assert "validation" not in found.history[0]


def test_rounds_that_different_sites_have_judged_are_compared_where_they_can_be(tmp_path):
    """In its first evaluation the run hears of one site alone, for which the model is perfect."""

    class Alone(Judging):
        def _handle(self, node, kind, request):
            first = kind == "evaluate" and len(self.answered) < 4
            answer = super()._handle(node, kind, request)
            if not first:
                return answer
            lie = {**answer.facts, "kind": "metrics", "metrics": json.dumps(PERFECT)}
            return Envelope(lie, {}) if node == 102 else Failure("it is tired")

    found = deployed(tmp_path, config("fedxl2", eval_every=1), Alone(tmp_path, ["metrics"] * 4), evaluate="sites")
    assert found.history[0]["validation_from"] == "metrics of c"
    assert found.history[1]["validation_from"] == "metrics of a, b, c, d"
    assert found.best_round == 1, "at that site no later round was better"
    values = [{"auroc": value, "positives": 2, "negatives": 3} for value in (0.5, 0.6, 0.9)]
    early, late = (
        {"validation_by_site": {"a": values[0], "b": values[2]}},
        {"validation_by_site": {"a": values[1], "b": "away"}},
    )
    assert better_at_common_sites(late, early, "auroc")
    assert not better_at_common_sites(early, late, "auroc")
    assert not better_at_common_sites({"validation_by_site": {"b": values[2]}}, late, "auroc"), "nothing in common"


LIES = {
    "another site": (lambda a: Envelope({**a.facts, "site": "b"}, a.tensors), "something else than was asked"),
    "NaN": (lambda a: a._replace(tensors={**a.tensors, "scores": a.tensors["scores"] * math.nan}), "NaN or infinity"),
    "labels": (lambda a: a._replace(tensors={**a.tensors, "labels": a.tensors["labels"] + 1}), "a label each"),
    "fewer labels": (lambda a: a._replace(tensors={**a.tensors, "labels": a.tensors["labels"][1:]}), "a label each"),
    "more": (lambda a: a._replace(tensors={**a.tensors, "x": torch.zeros(1)}), "which is unexpected"),
    "no kind": (lambda a: Envelope({"site": "a", "split": a.facts["split"]}, {}), "kind"),
    "silence": (lambda a: Failure("the node has died"), "the node has died"),
    "beyond 1": (
        lambda a: Envelope({**a.facts, "kind": "metrics", "metrics": json.dumps(PERFECT | {"auroc": 1.5})}, {}),
        "it says that its auroc is 1.5",
    ),
    "a number beyond all": (
        lambda a: Envelope({**a.facts, "kind": "metrics", "metrics": json.dumps(PERFECT | {"auroc": 10**400})}, {}),
        "its answer is no good",
    ),
    "too deep": (lambda a: Envelope({**a.facts, "kind": "metrics", "metrics": "[" * 10**6}, {}), "is no good"),
    "too many words": (
        lambda a: Envelope({**a.facts, "kind": "metrics", "metrics": json.dumps({"auroc": "x" * 10**6})}, {}),
        "its answer is no good",
    ),
    "absurd": (
        lambda a: Envelope({**a.facts, "kind": "metrics", "metrics": json.dumps(PERFECT | {"positives": 1e15})}, {}),
        "it says that its positives is 1e+15",
    ),
}
PERFECT = dict.fromkeys(("auroc", "ap", "risk", "positives", "negatives"), 1.0) | {
    f"{kind}@{limit:g}": 1.0 for kind in ("pauc", "pauc_raw") for limit in (0.1, 0.3, 0.5)
}


@pytest.mark.parametrize("kind", list(LIES))
def test_lies_are_not_believed(tmp_path, kind):
    spoil, reason = LIES[kind]
    carrier = Judging(tmp_path, ["scores"] * 4)
    carrier.spoil = spoil
    found = deployed(tmp_path, config("fedxl2", rounds=2), carrier, evaluate="sites")
    said = found.history[-1]["validation_by_site"]["a"]
    assert isinstance(said, str)
    assert reason in said
    assert len(said) < 400
    assert found.test_scores is not None, "the others are believed"


def test_a_run_that_is_resumed_after_its_last_round_still_finds_its_sites(tmp_path):
    experiment = config("local_sgd", rounds=2)
    carrier = Judging(tmp_path, ["scores"] * 4)
    first = deployed(tmp_path, experiment, carrier, evaluate="sites")
    again = deployed(tmp_path, experiment, Judging(tmp_path, ["scores"] * 4), evaluate="sites")
    assert again.metrics["test"] == first.metrics["test"]


def test_a_model_is_judged_as_it_is_whatever_the_wire(tmp_path):
    experiment = config("local_sgd", rounds=2, dtype="float32")
    found, carrier = judged(tmp_path, *["scores"] * 4, experiment=experiment, wire="bfloat16")
    whole = load_data(experiment).test
    with torch.no_grad():
        scores = found.model(whole.x).flatten()
    sent = torch.cat([answer.tensors["scores"] for _, answer in carrier.answered if answer.facts["split"] == "test"])
    torch.testing.assert_close(sent.sort().values, scores.sort().values, rtol=0, atol=1e-6)


ALLOWED = json.dumps({"model": {"name": "mlp"}, "risk": {"name": "pauc"}, "algorithm": {"name": "fedxl2"}})


def test_a_site_without_held_back_data_says_so(tmp_path, monkeypatch):
    mine = site_file(tmp_path, 0, evaluate="scores")
    monkeypatch.setattr(cache, "held_back", lambda *args: None)
    facts = {"version": requests.__version__, "run": "0123456789abcdef", "config": ALLOWED, "split": "test"}
    assert requests.evaluate(mine, Envelope(facts, {})).facts["why"] == "it has no test data"


def test_settings_are_checked(tmp_path):
    with pytest.raises(UserError, match="unknown metric to select by 'auc'"):
        judged(tmp_path, *["scores"] * 4, experiment=config("fedxl2", select="auc"))
    with pytest.raises(UserError, match='evaluate = "figures" is called "metrics" now'):
        SiteSettings(name="a", evaluate="figures")
    with pytest.raises(UserError, match=r"unknown evaluate 'score'.*scores"):
        SiteSettings(name="a", evaluate="score")
    with pytest.raises(UserError, match="unknown evaluate 'site'"):
        ServerSettings(sites=("a",), evaluate="site")


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
    assert set(imported) <= {__name__}, "the risk's module alone"
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
    assert "7 false positive rates are more than this site lets go" in found.history[0]["validation_by_site"]["a"]
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
    return SiteExaminer(None, evaluator, "auroc", None)


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
        with pytest.raises(RefusedError, match=f"it says that its {name} is"):
            examiner._metrics(good | {name: beyond})
    for within in (math.nan, max(low, -1e30), min(high, 1e30)):
        examiner._metrics(good | {name: within})
