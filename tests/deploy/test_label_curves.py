"""Curves of several labels at sites: counts within their bounds, noise that labels share, and what is withheld."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedxl import UserError, metrics
from fedxl.deploy.protocol import envelope
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.server.examiner import read_curve
from fedxl.deploy.site import curve, requests
from fedxl.deploy.site.curve import SPENT, each_label
from fedxl.evaluation import histogram
from fedxl.evaluation.bins import Bins
from fedxl.evaluation.histogram import count, noise_errors, pooled
from fedxl.evaluation.noise import variance
from fedxl.evaluation.scores import Scores
from fedxl.prediction.run import read_finished
from fedxl.reporting import document
from fedxl.training.run_folder import read_run
from fedxl.training.settings import Hooks
from tests.deploy.federated import SITES, copied, deployed, simulated
from tests.deploy.test_labels import carrier, experiment, write

pytestmark = pytest.mark.usefixtures("impatient")
LABELS = ("a", "b", "c")


def judged(folder: Path, kinds: tuple[str, ...] = ("curve",) * 4, say: Any = None, **settings: Any):
    """A run whose sites disclose so much; the last request to evaluate is kept, and each reply."""
    data = write(folder / "data.npz")
    sites = carrier(folder, data)
    for node, kind in zip(sites.sites, kinds, strict=True):
        mine = sites.sites[node]
        sites.sites[node] = replace(mine, settings=replace(mine.settings, evaluate=kind, **settings))
    kept: dict[str, Any] = {"replies": []}
    handle = sites._handle

    def recording(node, kind, request):
        answer = handle(node, kind, request)
        if kind == "evaluate":
            kept["request"], kept["replies"] = copied(request), [*kept["replies"], answer]
        return answer

    sites._handle = recording
    bins = {"bins": settings["bins"]} if "bins" in settings else {}
    hooks = {"hooks": Hooks(say=say)} if say else {}
    found = deployed(folder, experiment(data), sites, evaluate="sites", **bins, **hooks)
    return found, sites, kept


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envelope, "POLL", 0.01)
        found, sites, kept = judged(folder, fewest=0)
    return found, sites, kept, folder, simulated(experiment(write(folder / "data.npz")))


def test_counts_of_all_sites_give_each_labels_metrics_within_their_bounds(honest):
    found, _, kept, folder, exact = honest
    rows = [json.loads(line) for line in (folder / "server" / "run" / "metrics.jsonl").read_text().splitlines()]
    for split, row in (("validation", rows[-2]), ("test", rows[-1])):
        wanted = exact.scores[split].by_label()
        for label, one in wanted.items():
            told, bounds = row[f"{split}_by_label"][label], row[f"{split}_bounds_by_label"][label]
            assert (told["positives"], told["negatives"]) == (one.positives, one.negatives)
            for metric in metrics.resolve(["auroc", "pauc@0.3", "ap"]):
                error = abs(told[metric.name] - metric.value(*one.flat))
                assert error <= bounds[metric.name] + 1e-9 < 0.3
        for name, bound in row[f"{split}_bounds"].items():
            values = [row[f"{split}_by_label"][label][name] for label in LABELS]
            assert found.metrics[split][name] == pytest.approx(np.mean(values))
            assert abs(found.metrics[split][name] - exact.metrics[split][name]) <= bound + 1e-9
    for reply in kept["replies"]:
        assert {name: (t.dtype, tuple(t.shape)) for name, t in reply.tensors.items()} == dict.fromkeys(
            ("positives", "negatives"), (torch.int64, (3, 512))
        ), "no score leaves"


def test_what_is_known_is_counted_and_what_is_not_is_in_no_bin(honest):
    """Each label's counts are those of its own scores in its own bins."""
    found, _, kept, _, exact = honest
    asked = [Bins.from_json(each) for each in json.loads(kept["request"].facts["bins"])]
    for bins, (label, one) in zip(asked, exact.scores["test"].by_label().items(), strict=True):
        mine, wanted = pooled(found.histograms["test"][label].values()), count(bins.edges(), *one.flat)
        np.testing.assert_array_equal(mine.positives, wanted.positives)
        np.testing.assert_array_equal(mine.negatives, wanted.negatives)


def test_the_run_keeps_the_counts_and_decides_and_reports_by_them(honest):
    found, _, _, folder, exact = honest
    run = folder / "server" / "run"
    kept = histogram.load(run / "curves.npz")
    assert list(kept["test"]) == list(LABELS)
    assert list(kept["test"]["a"]) == list(SITES)
    x = np.random.default_rng(2).normal(size=(50, 4)).astype(np.float32)
    counted, scored = found.predict(x), exact.predict(x)
    np.testing.assert_allclose(counted.scores, scored.scores, atol=1e-6)
    known = [label for label in range(3) if LABELS[label] not in scored.undecided]
    assert known
    np.testing.assert_allclose(counted.probabilities[:, known], scored.probabilities[:, known], atol=0.05)
    assert np.mean(counted.classes == scored.classes) > 0.95
    assert counted.undecided == scored.undecided
    assert read_finished(run).histograms.keys() == {"validation", "test"}
    text = document.render(document.build([read_run(run)]))
    assert "sites disclosed counts in 512 bins, not scores" in text
    assert "ROC by label" in text


def test_sites_that_disclose_scores_are_counted_with_the_others(honest, tmp_path):
    mixed, _, _ = judged(tmp_path, ("curve", "scores", "curve", "scores"), fewest=0)
    assert mixed.metrics["test"] == pytest.approx(honest[0].metrics["test"])
    assert mixed.histograms["test"].keys() == set(LABELS)


# Noise


def test_all_labels_share_one_epsilon(tmp_path, honest):
    found, sites, kept = judged(tmp_path, epsilon=3.0, epsilon_total=100.0, bins=64)
    mine = found.histograms["test"]["b"]["a"]
    assert mine.noise == pytest.approx(variance(1.0)), "an L-th of epsilon for each"
    row = found.history[-1]
    assert row["validation_epsilon"]["a"] == {"curve": 3.0, "spent": 3.0 * len(found.history)}
    account = json.loads((sites.sites["100"].state / SPENT).read_text())
    assert Fraction(account["spent"]) == 3 * (len(found.history) + 1)
    assert row["validation_noise"].keys() == row["validation_bounds"].keys()
    # The noise itself: replies to one request, with it and without.
    bins = json.dumps([Bins(64).to_json()] * 3)
    request = Envelope({**kept["request"].facts, "run": "e" * 16, "bins": bins}, kept["request"].tensors)
    bare = replace(sites.sites["100"], settings=replace(sites.sites["100"].settings, epsilon=0.0, fewest=0))
    without = requests.evaluate(bare, request).tensors
    drawn = [requests.evaluate(sites.sites["100"], request).tensors for _ in range(6)]
    noise = np.concatenate([(one[name] - without[name]).numpy().ravel() for one in drawn for name in without])
    assert np.var(noise) == pytest.approx(variance(1.0), rel=0.4)  # with epsilon 3 it would be 0.11 of 1.84


def test_an_example_is_in_as_many_counts_as_labels_are_known_of_it():
    """So many counts change by one if it is left out: what noise of epsilon / L in each is for."""
    rng = np.random.default_rng(0)
    h, y = rng.normal(size=(20, 3)), rng.integers(0, 2, (20, 3))
    y[3, 1] = -1
    grant = curve.Grant([Bins(16)] * 3, Fraction(0), Fraction(0))
    site = carrier(Path("nowhere"), {}).sites["100"]
    site = replace(site, settings=replace(site.settings, fewest=0))

    def counts(rows: np.ndarray) -> np.ndarray:
        _, found = curve.disclosed(site, grant, Scores(h[rows], y[rows], LABELS))
        return np.concatenate([each.numpy().ravel() for each in found])

    everybody = np.arange(20)
    for left, known in ((0, 3), (3, 2)):
        changed = counts(everybody) - counts(np.delete(everybody, left))
        assert (changed.sum(), np.abs(changed).sum(), changed.max()) == (known, known, 1)


def test_an_epsilon_too_small_for_so_many_labels_is_refused():
    assert each_label(Fraction(1, 2), 50) == Fraction(1, 100)
    with pytest.raises(
        UserError, match=r"leaves 0\.0007 to each of 14 labels, and less than 0\.001 hides everything"
    ):
        each_label(Fraction(1, 100), 14)


def test_noise_of_the_mean_is_that_of_independent_labels():
    rng = np.random.default_rng(0)
    named = metrics.resolve(["auroc"])
    parts = {}
    for label in "ab":
        y = (np.arange(400) % 3 == 0).astype(np.int64)
        one = count(np.linspace(-2, 3, 20), rng.normal(size=400) + y, y)
        parts[label] = {"x": replace(one, noise=variance(0.5))}
    each = [noise_errors(named, [parts[label]["x"]])["auroc"] for label in "ab"]
    assert histogram.measure(named, parts).noise["auroc"] == pytest.approx(np.hypot(*each) / 2)


# What is withheld, and what is refused


def test_labels_of_few_examples_are_withheld_and_the_others_are_not(tmp_path):
    said: list[str] = []
    found, _, kept = judged(tmp_path, fewest=3, say=said.append)
    withheld = found.history[-1]["validation_withheld"]
    assert "c" in withheld["a"]
    assert "fewer than 3 positives" in withheld["a"]["c"]
    assert all(
        int(reply.tensors["negatives"][int(number)].sum()) == 0
        for reply in kept["replies"]
        for number in json.loads(reply.facts["withheld"])
    ), "nothing of a label that is withheld leaves"
    assert "a" not in {label for site in withheld.values() for label in site}
    assert "a" not in found.histograms["test"].get("c", {})
    assert list(found.histograms["test"]["a"]) == list(SITES)
    known = list(found.histograms["test"])
    assert known == sorted(known), "in the order of the outputs"
    assert any(
        "withholds its counts of some labels: c: this site has fewer than 3 positives" in line for line in said
    )


def test_a_site_that_would_withhold_all_labels_refuses():
    site, grant = carrier(Path("nowhere"), {}).sites["100"], curve.Grant([Bins(16)] * 2, Fraction(0), Fraction(0))
    h, y = np.zeros((8, 2)), np.array([[0, 1]] * 4 + [[1, 0]] * 4)
    with pytest.raises(UserError, match="the counts of no label: of the first one, this site has fewer than 10 posi"):
        curve.disclosed(site, grant, Scores(h, y, LABELS[:2]))
    with pytest.raises(UserError, match="not finite"):
        curve.disclosed(site, grant, Scores(h + math.inf, y, LABELS[:2]))


LIES = {
    "a label that there is not": ({"withheld": '{"3": "x"}'}, None, "which labels it withholds"),
    "a label before the first": ({"withheld": '{"-1": "x"}'}, None, "which labels it withholds"),
    "all labels": ({"withheld": '{"0": "x", "1": "x", "2": "x"}'}, None, "the counts of no label"),
    "no word": ({"withheld": None}, None, "which labels it withholds"),
    "one label": ({}, lambda counts: counts[0], "instead of"),
    "a negative count": ({}, lambda counts: counts - 1, "it counts -1 positives in a bin"),
    "too much noise": ({"epsilon": 3.0, "spent": 3.0}, lambda counts: counts - 1000, "positives in a bin"),
}


@pytest.mark.parametrize("kind", list(LIES))
def test_lies_are_refused(honest, kind):
    facts, change, why = LIES[kind]
    reply, bins = honest[2]["replies"][-1], [Bins(512)] * 3
    assert set(read_curve(reply, bins, LABELS, 500).histograms) == set(LABELS)
    tensors = {name: change(t) if change else t for name, t in reply.tensors.items()}
    with pytest.raises(ValueError, match=why):
        read_curve(Envelope({**reply.facts, **facts}, tensors), bins, LABELS, 500)


def test_bins_of_other_labels_are_refused(honest):
    _, sites, kept, _, _ = honest
    for bins, why in (
        (Bins(16).to_json(), r"the bins of 3 label\(s\)"),
        ([Bins(16).to_json()] * 2, r"the bins of 3 label\(s\)"),
        ([Bins(16).to_json()] * 2 + [Bins(8).to_json()], "as many bins of each label"),
        ([Bins(1024).to_json()] * 3, "at most 512 bins"),
    ):
        request = Envelope({**kept["request"].facts, "bins": json.dumps(bins)}, kept["request"].tensors)
        with pytest.raises(UserError, match=why):
            requests.evaluate(sites.sites["100"], request)
