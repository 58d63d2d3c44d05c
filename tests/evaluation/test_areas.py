"""Intervals of the partial AUC and of average precision: beside the jackknife, simulations and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats
from sklearn.metrics import average_precision_score

from fedxl import metrics
from fedxl.evaluation.areas import groups, partial_auc_ends, precision
from fedxl.evaluation.delong import auroc_ends, placements
from fedxl.evaluation.intervals import interval, one_metric
from fedxl.evaluation.resampling import jackknife, measured
from tests.evaluation.sets import made

NAMES = ("pauc@0.3", "pauc_raw@0.3", "ap")


@pytest.mark.parametrize("tied", [False, True])
def test_average_precision_and_its_variance_are_those_of_the_jackknife(tied):
    """An infinitesimal jackknife beside one that leaves out each example; with ties, to what these change."""
    scores, labels = made(400, 1200, seed=1, tied=tied)
    found = precision(groups(scores, labels), 0.25, (400, 1200))
    assert float(found.value) == pytest.approx(average_precision_score(labels, scores), abs=1e-11)
    error, _ = jackknife(measured(one_metric("ap"), scores, labels), (400, 1200))
    assert math.sqrt(float(found.variances.sum())) == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_with_many_examples_the_partial_areas_interval_is_that_of_the_jackknifes_error(tied):
    """Ours leans by less than its own width with so many examples; McClish's scale is linear."""
    scores, labels = made(3000, 5000, seed=2, tied=tied)
    error, _ = jackknife(measured(one_metric("pauc@0.3"), scores, labels), (3000, 5000), most=500)
    found, raw = (interval(name, scores, labels) for name in ("pauc@0.3", "pauc_raw@0.3"))
    assert found.high - found.low == pytest.approx(2 * stats.norm.ppf(0.975) * error, rel=0.05)
    for end, other in zip(found[:3], raw[:3], strict=True):
        assert end == pytest.approx(metrics.mcclish(other, 0.3), abs=1e-12)


def test_the_whole_area_is_that_of_auroc_but_for_the_model():
    scores, labels = made(500, 800, seed=3)
    found, wanted = partial_auc_ends(scores, labels, 1.0, 0.95), auroc_ends(placements(scores, labels), 0.95)
    assert found == pytest.approx(wanted, abs=0.002)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_order_of_scores_matters(name):
    scores, labels = made(12, 40, seed=4, tied=True)
    found = interval(name, scores, labels)
    assert interval(name, np.exp(3 * scores), labels)[:3] == pytest.approx(found[:3], abs=1e-12)
    order = np.random.default_rng(0).permutation(len(labels))
    assert interval(name, scores[order], labels[order])[:3] == pytest.approx(found[:3], abs=1e-12)
    assert found.low < found.value < found.high
    wider = interval(name, scores, labels, 0.99)
    assert wider.low <= found.low
    assert wider.high >= found.high


@pytest.mark.parametrize(("positives", "negatives"), [(8, 30), (30, 8), (2, 2)])
def test_a_perfect_rankings_average_precision_begins_where_the_model_rarely_gives_one(positives, negatives):
    """The model is found by another way: mu by simulation, its average precision by quadrature."""
    labels = np.repeat([1, 0], [positives, negatives])
    found = interval("ap", np.arange(len(labels))[::-1].astype(float), labels)
    assert found.value == found.high == 1.0
    share = positives / (positives + negatives)

    def modelled(mu: float) -> float:
        def at(z: float) -> float:
            recall, rate = stats.norm.sf(z), stats.norm.sf(z + mu)
            return stats.norm.pdf(z) * share * recall / (share * recall + (1 - share) * rate)

        return integrate.quad(at, -9, 9, limit=200)[0]

    rng, steps = np.random.default_rng(0), np.linspace(-4, 6, 101)
    lowest = rng.normal(size=(40_000, positives)).min(1) - rng.normal(size=(40_000, negatives)).max(1)
    mu = np.interp(0.025, [(lowest + mu > 0).mean() for mu in steps], steps)
    assert found.low == pytest.approx(modelled(float(mu)), abs=0.02)
    for name in ("pauc@0.3", "pauc_raw@0.3"):
        area = interval(name, np.arange(len(labels))[::-1].astype(float), labels)
        assert area.low < area.value == pytest.approx(area.high)


@pytest.mark.parametrize("name", ["pauc@0.3", "ap"])
@pytest.mark.parametrize(("positives", "negatives", "shift"), [(10, 190, 1.8), (10, 2000, 1.8), (20, 80, 1.5)])
def test_intervals_of_few_positives_cover(name, positives, negatives, shift):
    """80 sets: fewer than 67 of them hold the truth with a chance of 1 in 10,000, if 95 % do."""
    levels = (np.arange(20_000) + 0.5) / 20_000
    recall, rate = levels, stats.norm.sf(stats.norm.isf(levels) + shift)
    share = positives / (positives + negatives)
    truth = {
        "ap": float(np.mean(share * recall / (share * recall + (1 - share) * rate))),
        "pauc@0.3": float(metrics.mcclish(np.mean(np.maximum(0.3 - rate, 0)), 0.3)),
    }[name]
    each = [interval(name, *made(positives, negatives, seed=seed, shift=shift), draws=200) for seed in range(80)]
    assert sum(found.low <= truth <= found.high for found in each) >= 67
