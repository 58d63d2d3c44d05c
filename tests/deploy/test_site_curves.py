"""Curves at sites, without a network: counts within their bounds, noise and its account, and what is refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedxl import UserError, metrics
from fedxl.algorithms.protocol import DataFacts
from fedxl.config.experiment import build_problem
from fedxl.deploy.protocol import envelope
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.protocol.message import decode, encode
from fedxl.deploy.provision.settings import ServerSettings, SiteSettings
from fedxl.deploy.server.examiner import SiteExaminer, read_curve
from fedxl.deploy.site import curve, requests
from fedxl.deploy.site.curve import BINS, SPENT
from fedxl.errors import RefusedError
from fedxl.evaluation import histogram
from fedxl.evaluation.bins import Bins
from fedxl.evaluation.histogram import pooled
from fedxl.risks import contrastive
from fedxl.risks.scores import outputs_behind
from fedxl.training.settings import Hooks
from tests.deploy.federated import SITES, config, copied, deployed, simulated, site_file
from tests.deploy.test_site_evaluation import Judging

pytestmark = pytest.mark.usefixtures("impatient")
OTHER_RUN = "f" * 16
ONE = ("",)  # the name of the only label
ROOT = Path(__file__).parents[2]


class Recording(Judging):
    """Keeps the last request to evaluate."""

    def _handle(self, node, kind, request):
        if kind == "evaluate":
            self.request = copied(request)
        return super()._handle(node, kind, request)


def judged(folder, kinds=("curve",) * 4, experiment=None, allowed=None, spoil=None, **more):
    carrier = Recording(folder, kinds, **(allowed or {}))
    carrier.spoil = spoil or carrier.spoil
    found = deployed(folder, experiment or config("fedxl2", rounds=2), carrier, evaluate="sites", **more)
    return found, carrier


def row(folder, last=True) -> dict[str, Any]:
    lines = (folder / "server" / "run" / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1 if last else 0])


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A run whose sites all disclose curves: its result, its sites, its folder, and the same run simulated."""
    folder = tmp_path_factory.mktemp("honest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envelope, "POLL", 0.01)
        found, carrier = judged(folder)
    return found, carrier, folder, simulated(config("fedxl2", rounds=2))


def test_counts_of_all_sites_give_the_metrics_of_the_data_in_one_place_within_their_bounds(honest):
    found, carrier, folder, expected = honest
    assert found.best_round == expected.best_round
    rows = {"validation": found.history[-1], "test": row(folder)}
    for split, record in rows.items():
        bounds, exact = record[f"{split}_bounds"], expected.metrics[split]
        assert bounds.keys() == exact.keys() - {"risk", "positives", "negatives"}
        for name, bound in bounds.items():
            assert abs(found.metrics[split][name] - exact[name]) <= bound + 1e-9
            assert 0 < bound < 0.05
        assert record[f"{split}_from"] == "curves of a, b, c, d"
        assert [found.metrics[split][name] for name in metrics.COUNTS] == [exact[name] for name in metrics.COUNTS]
    tight = rows["test"]["test_bounds"]["auroc"]
    assert tight < rows["validation"]["validation_bounds"]["auroc"], "bins of the test data follow the validation's"
    for _, answer in carrier.answered:
        assert set(answer.tensors) == {"positives", "negatives"}, "no score leaves"
        assert all(tensor.dtype == torch.int64 and tensor.shape == (1, 512) for tensor in answer.tensors.values())
    assert found.test_scores is None


def test_the_run_keeps_the_curves_of_the_chosen_model(honest):
    found, _, folder, expected = honest
    kept = histogram.load(folder / "server" / "run" / "curves.npz")
    for split in ("validation", "test"):
        assert list(kept[split]) == list(found.histograms[split]) == [""]
        assert list(kept[split][""]) == list(found.histograms[split][""]) == list(SITES)
        together, (scores, labels) = pooled(kept[split][""].values()), expected.scores[split].flat
        assert together.auroc().value == found.metrics[split]["auroc"]
        point = together.at_specificity(0.8)
        above = scores >= point.threshold
        assert point.sensitivity == pytest.approx(above[labels == 1].mean(), abs=1e-12)
    assert not (folder / "server" / "run" / "scores.npz").exists()


def kept_bins(folder: Path) -> list[Bins]:
    """What the server's folder says of the validation data's bins."""
    content = json.loads((folder / "server" / "run" / "bins.json").read_text())
    return [Bins.from_json(each) for each in content["validation"]]


def test_bins_follow_from_pooled_scores_or_else_fit_any(honest, tmp_path):
    """The pool before the first evaluation: with a sigmoid link, its scores are those of a sigmoid's outputs."""
    [bins] = kept_bins(honest[2])
    problem, state = config("fedxl2", rounds=2, eval_every=1), honest[3].server
    algorithm = build_problem(problem, (1, 8, 8), DataFacts(0.5, 0.5), torch.device("cpu")).algorithm
    scores = torch.cat([side.entry.score for side in state.pool])
    outputs = outputs_behind(algorithm.risk.link, scores)
    torch.testing.assert_close(torch.sigmoid(outputs), scores, rtol=1e-9, atol=1e-12)
    centre, width = float(outputs.median()), float(outputs.quantile(0.75) - outputs.quantile(0.25))
    assert bins.centre == pytest.approx(centre, abs=0.01)
    assert bins.scale == pytest.approx(width / 8, rel=1e-6)
    judged(tmp_path, experiment=config("local_sgd", rounds=2))
    assert kept_bins(tmp_path) == [Bins()]


def test_a_curve_goes_through_messages_as_it_is(honest):
    for message in (honest[1].request, honest[1].answered[-1][1]):
        found = decode(b"".join(encode(message)), 1.0)
        assert found.facts == message.facts
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in message.tensors.items())


def test_scores_are_counted_by_the_server_where_others_disclose_curves(tmp_path, honest):
    mixed, carrier = judged(tmp_path, ("curve", "scores", "curve", "scores"))
    alike = honest[0]
    assert {name for name, answer in carrier.answered if "scores" in answer.tensors} == {"b", "d"}
    assert mixed.metrics["test"] == alike.metrics["test"]
    np.testing.assert_array_equal(
        mixed.histograms["test"][""]["b"].positives, alike.histograms["test"][""]["b"].positives
    )
    by_site = mixed.history[-1]["validation_by_site"]
    assert "risk" in by_site["b"]
    assert "risk" not in by_site["a"]
    assert by_site["a"]["auroc"] == pytest.approx(alike.history[-1]["validation_by_site"]["a"]["auroc"])


def test_beside_metrics_curves_count_as_the_metrics_of_their_site(tmp_path):
    found, _ = judged(tmp_path, ("curve", "metrics", "curve", "metrics"))
    record = found.history[-1]
    each = list(record["validation_by_site"].values())
    pairs = [values["positives"] * values["negatives"] for values in each]
    mean = sum(n * values["auroc"] for n, values in zip(pairs, each, strict=True)) / sum(pairs)
    assert record["validation"]["auroc"] == pytest.approx(mean, abs=1e-12)
    assert "risk" not in record["validation"]
    assert record["validation_from"].startswith("metrics of")
    assert "validation_bounds" not in record


def test_what_curves_do_not_give_cannot_choose_the_model_and_the_run_says_so(tmp_path):
    said: list[str] = []
    found, _ = judged(tmp_path, experiment=config("fedxl2", rounds=2, select="-risk"), hooks=Hooks(say=said.append))
    assert found.best_round == 2
    assert any("curves do not give risk; select one of auroc, pauc, pauc_raw, ap" in line for line in said)


def test_a_run_that_is_resumed_asks_for_the_same_bins(tmp_path):
    first, _ = judged(tmp_path, experiment=config("local_sgd", rounds=2))
    metrics_file = tmp_path / "server" / "run" / "metrics.jsonl"
    *rows, _ = metrics_file.read_text().splitlines(keepends=True)
    metrics_file.write_text("".join(rows))  # the server died before it had tested
    again, _ = judged(tmp_path, experiment=config("local_sgd", rounds=2), bins=128)
    assert again.metrics["test"] == first.metrics["test"]


# Noise


def test_noise_is_accounted_for_and_ends_with_the_budget(tmp_path):
    allowed = {"epsilon": 1.0, "epsilon_total": 3.0, "bins": 64}
    experiment = config("fedxl2", eval_every=1)
    found, carrier = judged(tmp_path, experiment=experiment, allowed=allowed, bins=64)
    first = found.history[0]
    assert first["validation_epsilon"]["a"] == {"curve": 1.0, "spent": 1.0}
    assert found.history[2]["validation_epsilon"]["d"] == {"curve": 1.0, "spent": 3.0}
    assert first["validation_noise"].keys() == first["validation_bounds"].keys()
    assert 0 < first["validation_noise"]["auroc"] < 0.5
    refused = "this site has spent 3 of its epsilon_total of 3; another curve takes 1"
    assert found.history[3]["validation_by_site"] == dict.fromkeys(SITES, refused)
    assert row(tmp_path)["test_by_site"]["a"] == refused
    assert json.loads((carrier.sites["100"].state / SPENT).read_text()) == {"spent": "3"}
    assert any(int(a.tensors["positives"].min()) < 0 for _, a in carrier.answered if isinstance(a, Envelope))


def test_the_same_question_gets_other_noise_each_time_and_costs_each_time(tmp_path, request_to_a):
    mine = site_file(tmp_path, 0, evaluate="curve", epsilon=0.1, epsilon_total=0.3)
    one, two, three = (requests.evaluate(mine, request_to_a) for _ in range(3))
    assert not torch.equal(one.tensors["positives"], two.tensors["positives"])
    assert (one.facts["spent"], two.facts["spent"], three.facts["spent"]) == (0.1, 0.2, 0.3), "no float adds up so"
    with pytest.raises(UserError, match=r"has spent 0\.3 of its epsilon_total of 0\.3; another curve takes 0\.1"):
        requests.evaluate(mine, request_to_a)
    with pytest.raises(UserError, match=r"has spent 0\.3"):  # another run is no way around it
        requests.evaluate(mine, changed(request_to_a, run=OTHER_RUN))
    (mine.state / SPENT).write_text('{"spent": "much"}')
    with pytest.raises(UserError, match="its owner must correct or remove it"):
        requests.evaluate(mine, request_to_a)


def test_with_noise_no_refusal_depends_on_examples(tmp_path, request_to_a):
    """Few examples, scores outside of the bins and scores that are none: without noise each is refused."""
    outside = told(Bins(64, centre=1e6))
    broken = {name: tensor * math.nan for name, tensor in request_to_a.tensors.items()}
    noisy = {"evaluate": "curve", "epsilon": 1.0, "epsilon_total": 9.0}
    cases = [({"fewest": 1000}, request_to_a), ({}, changed(request_to_a, bins=outside))]
    for number, (allowed, request) in enumerate(cases):
        with pytest.raises(UserError, match=r"too few for a curve|outside of the bins"):
            requests.evaluate(site_file(tmp_path / f"{number}", 0, evaluate="curve", **allowed), request)
        reply = requests.evaluate(site_file(tmp_path / f"noisy {number}", 0, **noisy, **allowed), request)
        assert reply.facts["epsilon"] == 1.0
    with pytest.raises(ValueError, match="NaN"):  # weights that are no numbers are refused before any example is read
        requests.evaluate(site_file(tmp_path / "broken", 0, **noisy), request_to_a._replace(tensors=broken))


# A server that is not to be trusted


@pytest.fixture(scope="module")
def request_to_a(honest) -> Envelope:
    """An honest request to evaluate, on test data."""
    return honest[1].request


def changed(request: Envelope, **facts: Any) -> Envelope:
    return request._replace(facts={**request.facts, **facts})


def told(*bins: Bins | dict[str, Any]) -> str:
    """As a request describes them."""
    return json.dumps([one.to_json() if isinstance(one, Bins) else one for one in bins])


def asked(request: Envelope) -> list[Bins]:
    return [Bins.from_json(each) for each in json.loads(request.facts["bins"])]


HOSTILE = {
    "a billion bins": (told({**Bins().to_json(), "bins": 10**9}), "bins must lie between"),
    "more than the site allows": (told(Bins(513)), "at most 512 bins, not 513"),
    "edges of its own": (told({"edges": [3, 1, 2]}), "bins are described by"),
    "no number": (told({**Bins().to_json(), "centre": math.nan}), "finite"),
    "a bin for one example": (told(Bins(512, 0.1, 1e-9, 1e-6)), "outside of the bins"),
    "nothing": (None, "cannot read the request's bins"),
    "no JSON": ("{", "cannot read the request's bins"),
    "too deep": ("[" * 10**6, "cannot read the request's bins"),
    "a number": ("[512]", "bins are described by"),
    "no list": (json.dumps(Bins().to_json()), r"the bins of 1 label\(s\)"),
    "those of more labels": (told(Bins(), Bins()), r"the bins of 1 label\(s\)"),
}


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_bins_that_would_show_examples_are_refused(tmp_path, request_to_a, kind):
    bins, why = HOSTILE[kind]
    mine = site_file(tmp_path, 0, evaluate="curve")
    with pytest.raises(UserError, match=why):
        requests.evaluate(mine, changed(request_to_a, bins=bins))


def test_bins_that_moved_a_little_are_refused_for_as_long_as_the_run_lasts(tmp_path, request_to_a):
    """Subtracted, the counts of two such requests would be those between the old edges and the new ones."""
    mine = site_file(tmp_path, 0, evaluate="curve")
    first = requests.evaluate(mine, request_to_a)
    split = request_to_a.facts["split"]
    [bins] = asked(request_to_a)
    for moved in (replace(bins, centre=bins.centre + 1e-6), replace(bins, bins=bins.bins - 1)):
        with pytest.raises(UserError, match=f"this run counts {split} scores in other bins"):
            requests.evaluate(mine, changed(request_to_a, bins=told(moved)))
    again = requests.evaluate(mine, request_to_a)
    assert torch.equal(again.tensors["positives"], first.tensors["positives"]), "the same question, the same answer"
    assert (mine.state / str(request_to_a.facts["run"]) / BINS).stat().st_mode & 0o077 == 0
    other = changed(request_to_a, split="validation", bins=told(Bins(16)))
    assert requests.evaluate(mine, other).tensors["positives"].shape == (1, 16), "other examples, other bins"


def test_curves_are_counted_as_evaluations(tmp_path, request_to_a):
    mine = site_file(tmp_path, 0, evaluate="curve", evaluations=1)
    requests.evaluate(mine, request_to_a)
    with pytest.raises(UserError, match="answered 1 requests to evaluate"):
        requests.evaluate(mine, request_to_a)


def test_embeddings_have_no_curve(tmp_path, request_to_a):
    with pytest.raises(UserError, match="one score per example, and the risk pairs vectors"):
        curve.granted(site_file(tmp_path, 0, evaluate="curve"), request_to_a.facts, contrastive(dim=8))


# Sites that are not to be believed


def with_counts(change: Any, **facts: Any) -> Any:
    return lambda a: Envelope({**a.facts, **facts}, {**a.tensors, "positives": change(a.tensors["positives"])})


def put(value: int) -> Any:
    return lambda counts: torch.cat((torch.tensor([[value]]), counts[:, 1:]), 1)


LIES = {
    "negative": (with_counts(put(-1)), "it counts -1 positives in a bin"),
    "beyond all": (with_counts(put(2**63 - 1)), r"it counts 92233720368547758\d\d positives"),
    "an overflow": (with_counts(lambda c: torch.full_like(c, 2**62)), "positives"),
    "below all": (with_counts(put(-(2**63)), epsilon=1.0, spent=1.0), f"it counts {-(2**63)} positives"),
    "too much noise": (with_counts(put(-1000), epsilon=1.0, spent=1.0), "it counts -1000 positives"),
    "fewer bins": (with_counts(lambda c: c[:, 1:]), r"positives is int64 \[1, 511\] instead of int64 \[1, 512\]"),
    "fractions": (with_counts(lambda c: c.double()), "float64"),
    "a table": (with_counts(lambda c: c[None]), "instead of"),
    "no word on noise": (lambda a: Envelope({**a.facts, "epsilon": None}, a.tensors), "what epsilon its curve has"),
    "a negative epsilon": (with_counts(put(0), epsilon=-1.0), "what epsilon its curve has"),
    "an epsilon that is none": (with_counts(put(0), epsilon=math.nan), "what epsilon its curve has"),
    "an epsilon beyond floats": (with_counts(put(0), epsilon=10**400), "what epsilon its curve has"),
    "an epsilon of nothing": (with_counts(put(0), epsilon=1e-9, spent=1.0), "epsilon must lie between"),
    "less spent than its curve takes": (with_counts(put(0), epsilon=1.0, spent=0.5), "spent less"),
    "more tensors": (lambda a: a._replace(tensors={**a.tensors, "x": torch.zeros(1)}), "which is unexpected"),
}


@pytest.mark.parametrize("kind", list(LIES))
def test_lies_are_refused(honest, request_to_a, kind):
    spoil, why = LIES[kind]
    [*_, (_, reply)] = honest[1].answered
    bins = asked(request_to_a)
    assert read_curve(reply, bins, ONE, 500).histograms[""].noise == 0
    with pytest.raises(ValueError, match=why):
        read_curve(spoil(reply), bins, ONE, 500)


@pytest.mark.parametrize(
    ("lie", "why"), [(put(-1), "it counts -1 positives in a bin"), (put(2001), "it is approved for at most 2000")]
)
def test_who_lies_is_left_out_and_the_others_are_believed(tmp_path, lie, why):
    found, _ = judged(tmp_path, spoil=with_counts(lie), limits=dict.fromkeys(SITES, 2000))
    assert why in found.history[-1]["validation_by_site"]["a"]
    assert found.history[-1]["validation_from"] == "curves of b, c, d"


def test_noise_is_no_way_to_count_for_more_than_was_approved(honest, request_to_a):
    claim = with_counts(lambda counts: counts + 10**6, epsilon=1.0, spent=1.0)
    [*_, (_, reply)] = honest[1].answered
    bins = asked(request_to_a)
    assert 400 < sum(read_curve(claim(reply), bins, ONE, 500).histograms[""].totals()) <= 500


def test_noise_is_no_way_to_take_away_what_others_count(honest, request_to_a):
    claim = with_counts(lambda counts: counts - 60, epsilon=1.0, spent=1.0)
    [*_, (_, reply)] = honest[1].answered
    bins = asked(request_to_a)
    found = read_curve(claim(reply), bins, ONE, None).histograms[""]
    assert found.positives.min() >= 0
    assert found.totals()[0] == 0


def test_counts_are_not_taken_for_vectors(honest, request_to_a):
    examiner = SiteExaminer(None, SimpleNamespace(risk=contrastive(dim=16)), "-risk", None, None)
    [*_, (name, reply)] = honest[1].answered
    bins = asked(request_to_a)
    with pytest.raises(RefusedError, match="the risk pairs vectors"):
        examiner._read(name, "test", bins, reply)


def test_the_example_in_the_documentation_runs(honest, tmp_path, monkeypatch, capsys):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "deployment.md").read_text(), re.DOTALL)
    (tmp_path / "hospitals").mkdir()
    (tmp_path / "hospitals" / "server").symlink_to(honest[2] / "server")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["validation", "test"]
    assert "Bounded(value=" in lines[1]
    assert "EdgePoint(threshold=" in lines[1]


def test_settings_are_checked():
    for wrong, why in [
        ({"epsilon": -1.0}, "epsilon must lie between"),
        ({"epsilon": 1e9, "epsilon_total": 1e10}, "epsilon must lie between"),
        ({"epsilon": 0.5}, "epsilon_total must be at least epsilon, 0.5, got 0"),
        ({"epsilon": 0.5, "epsilon_total": math.inf}, "epsilon_total must be at least"),
        ({"bins": 1}, "bins must lie between"),
        ({"fewest": -1}, "fewest must not be negative"),
    ]:
        with pytest.raises(UserError, match=why):
            SiteSettings(name="a", **wrong)
    assert SiteSettings(name="a", epsilon=0.3, epsilon_total=0.3).epsilon == 0.3
    with pytest.raises(UserError, match="bins must lie between"):
        ServerSettings(sites=("a",), bins=10**9)
