"""Evaluation at sites, without a network: what leaves each, what becomes of it, and what is not believed."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from fedxl import UserError, metrics
from fedxl.config.experiment import load_data
from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.deploy.provision.settings import ServerSettings, SiteSettings
from fedxl.deploy.site import cache, requests
from fedxl.training.settings import Hooks
from tests.deploy.federated import SITES, InProcess, config, deployed, simulated, site_file

pytestmark = pytest.mark.usefixtures("impatient")


class Judging(InProcess):
    """Sites that let so much of an evaluation go; what each has answered is kept, and may be spoilt before."""

    def __init__(self, folder, kinds, **allowed) -> None:
        super().__init__(folder)
        self.sites = {
            str(100 + number): site_file(folder, number, evaluate=kind, **allowed)
            for number, kind in enumerate(kinds)
        }
        self.answered: list[tuple[str, Envelope]] = []
        self.spoil = lambda answer: answer

    def _handle(self, node, kind, request):
        answer = super()._handle(node, kind, request)
        if kind == "evaluate":
            answer = self.spoil(answer) if node == "100" else answer
            self.answered.append((SITES[int(node) - 100], answer))
        return answer


def judged(folder, *kinds, experiment=None, **more):
    carrier = Judging(folder, kinds)
    found = deployed(folder, experiment or config("fedxl2"), carrier, evaluate="sites", **more)
    return found, carrier


def test_collapsed_scores_are_noticed_by_the_pool_where_sites_send_metrics_alone(tmp_path):
    """The pool holds scores from within the round, so it shows a collapse some steps later than the model does."""
    said: list[str] = []
    hooks = Hooks(say=said.append)
    for name, lr in (("wild", 100.0), ("mild", 0.2)):
        base = config("fedxl2", weighting="samples")
        experiment = replace(base, algorithm={**base.algorithm, "lr": lr, "level": "free"})
        carrier = Judging(tmp_path / name, ["metrics"] * 4)
        found = deployed(tmp_path / name, experiment, carrier, hooks, evaluate="sites")
        assert ["collapsed" in record for record in found.history] == [False, name == "wild"]
    [line] = [line for line in said if "collapsed" in line]
    assert line.startswith("the scores have collapsed by round 4")


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
    assert found.history[0]["validation_by_site"] == dict.fromkeys(SITES, "it discloses no evaluation")
    assert lines.count("no site discloses metrics yet; each may set evaluate in its site.toml") == 1


def test_who_lets_nothing_go_is_left_out_and_the_rest_is_pooled(tmp_path):
    found, _ = judged(tmp_path, "scores", "none", "scores", "scores")
    by_site = found.history[-1]["validation_by_site"]
    assert by_site["b"] == "it discloses no evaluation"
    told = [values["positives"] for values in by_site.values() if not isinstance(values, str)]
    assert found.metrics["validation"]["positives"] == sum(told)
    assert found.test_scores is not None


def test_scores_leave_in_an_order_that_tells_nothing(tmp_path):
    _, carrier = judged(tmp_path, *["scores"] * 4)
    for _, answer in carrier.answered:
        scores = answer.tensors["scores"]
        assert bool((scores.diff() >= 0).all())
        assert answer.tensors["y"].dtype == torch.int8


@pytest.mark.parametrize("shape", [(40,), (40, 3)])
def test_not_even_ties_tell_which_example_is_which(shape):
    """A model of the server's making may score many examples alike: then only how many there are may leave."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 2, shape, generator=generator).double()
    y = torch.randint(0, 2, (40, 1), generator=generator)
    shuffled = torch.randperm(40, generator=generator)
    one, other = requests._in_no_order(scores, y), requests._in_no_order(scores[shuffled], y[shuffled])
    assert torch.equal(one.scores, other.scores)
    assert torch.equal(one.y, other.y)
    assert int(one.y.sum()) == int(y.sum())


def test_the_whole_curve_does_not_leave_as_metrics(tmp_path):
    experiment = config("fedxl2", rounds=2, fpr=[n / 20 for n in range(1, 20)])
    found, _ = judged(tmp_path, *["metrics"] * 4, experiment=experiment)
    assert "19 false positive rates are more than this site discloses" in found.history[0]["validation_by_site"]["a"]


def test_metrics_rest_on_enough_examples_of_a_class(tmp_path):
    """The AUROC of one positive among 83 negatives is a fraction that tells its rank."""
    held = cache.examples(site_file(tmp_path, 0), "validation").holdings()[0]
    many, few = min((held.positives, "positives"), (held.negatives, "negatives"))
    for fewest in (many, many + 1):
        carrier = Judging(tmp_path / f"{fewest}", ["metrics"] * 4, fewest=1)
        carrier.sites["100"] = site_file(tmp_path / f"{fewest}", 0, evaluate="metrics", fewest=fewest)
        found = deployed(tmp_path / f"{fewest}", config("fedxl2", rounds=2), carrier, evaluate="sites")
        told = found.history[0]["validation_by_site"]["a"]
        why = f"this site has fewer than {fewest} {few}, too few for metrics (fewest)"
        assert (told == why) == (fewest > many)


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
            return Envelope(lie, {}) if node == "102" else Failure("it is tired")

    found = deployed(tmp_path, config("fedxl2", eval_every=1), Alone(tmp_path, ["metrics"] * 4), evaluate="sites")
    assert found.history[0]["validation_from"] == "metrics of c"
    assert found.history[1]["validation_from"] == "metrics of a, b, c, d"
    assert found.best_round == 1, "at that site no later round was better"


LIES = {
    "another site": (lambda a: Envelope({**a.facts, "site": "b"}, a.tensors), "replies to another request"),
    "NaN": (lambda a: a._replace(tensors={**a.tensors, "scores": a.tensors["scores"] * math.nan}), "NaN or infinity"),
    "labels": (lambda a: a._replace(tensors={**a.tensors, "y": a.tensors["y"] + 1}), "one label each"),
    "fewer labels": (
        lambda a: a._replace(tensors={**a.tensors, "y": a.tensors["y"][1:]}),
        "one label each",
    ),
    "more": (lambda a: a._replace(tensors={**a.tensors, "x": torch.zeros(1)}), "which is unexpected"),
    "no kind": (lambda a: Envelope({"site": "a", "split": a.facts["split"]}, {}), "kind"),
    "silence": (lambda a: Failure("the node has died"), "the node has died"),
    "beyond 1": (
        lambda a: Envelope({**a.facts, "kind": "metrics", "metrics": json.dumps(PERFECT | {"auroc": 1.5})}, {}),
        "it reports auroc = 1.5",
    ),
    "a number beyond all": (
        lambda a: Envelope({**a.facts, "kind": "metrics", "metrics": json.dumps(PERFECT | {"auroc": 10**400})}, {}),
        "its reply is invalid",
    ),
    "too deep": (lambda a: Envelope({**a.facts, "kind": "metrics", "metrics": "[" * 10**6}, {}), "is invalid"),
    "too many words": (
        lambda a: Envelope({**a.facts, "kind": "metrics", "metrics": json.dumps({"auroc": "x" * 10**6})}, {}),
        "its reply is invalid",
    ),
    "absurd": (
        lambda a: Envelope({**a.facts, "kind": "metrics", "metrics": json.dumps(PERFECT | {"positives": 1e15})}, {}),
        "it reports positives = 1e+15",
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
    metrics_file = tmp_path / "server" / "run" / "metrics.jsonl"
    *rows, _ = metrics_file.read_text().splitlines(keepends=True)
    metrics_file.write_text("".join(rows))  # the server died before it had tested
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
    monkeypatch.setattr(cache, "examples", lambda *args: None)
    facts = {"version": requests.__version__, "run": "0123456789abcdef", "config": ALLOWED, "split": "test"}
    assert requests.evaluate(mine, Envelope(facts, {})).facts["why"] == "it has no test data"


def test_settings_are_checked(tmp_path):
    with pytest.raises(UserError, match="unknown metric to select by 'auc'"):
        judged(tmp_path, *["scores"] * 4, experiment=config("fedxl2", select="auc"))
    with pytest.raises(UserError, match=r"unknown evaluate 'score'.*scores"):
        SiteSettings(name="a", evaluate="score")
    with pytest.raises(UserError, match="unknown evaluate 'site'"):
        ServerSettings(sites=("a",), evaluate="site")
