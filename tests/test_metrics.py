"""Metrics against scikit-learn, on random, tied and degenerate scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from fedxl import metrics

RNG = np.random.default_rng(0)
KINDS = {
    "continuous": lambda n: RNG.normal(size=n),
    "tied": lambda n: RNG.integers(0, 4, n).astype(float),
    "all equal": lambda n: np.zeros(n),
    "huge": lambda n: RNG.normal(size=n) * 1e30,
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("size", [2, 3, 10, 500])
@pytest.mark.parametrize("positives", [1, 0.3])
def test_against_scikit_learn(kind, size, positives):
    for _ in range(20):
        scores = KINDS[kind](size)
        labels = np.zeros(size, int)
        labels[RNG.permutation(size)[: positives if positives == 1 else max(1, int(positives * size))]] = 1
        assert metrics.auroc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
        assert metrics.average_precision(scores, labels) == pytest.approx(
            average_precision_score(labels, scores), abs=1e-12
        )
        for limit in (0.05, 0.3, 0.5, 0.999):
            expected = roc_auc_score(labels, scores, max_fpr=limit)
            assert metrics.partial_auc(scores, labels, limit) == pytest.approx(expected, abs=1e-12)
            chance = limit**2 / 2  # McClish's scale undone
            area = chance + (2 * expected - 1) * (limit - chance)
            assert metrics.partial_auc_raw(scores, labels, limit) == pytest.approx(area, abs=1e-12)
        false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
        np.testing.assert_allclose(metrics.roc(scores, labels), (false, true), atol=1e-12)


def test_partial_auc_of_everything_is_auroc():
    scores, labels = RNG.normal(size=100), RNG.integers(0, 2, 100)
    assert metrics.partial_auc(scores, labels, 1.0) == pytest.approx(metrics.auroc(scores, labels), abs=1e-12)


@pytest.mark.parametrize("labels", [np.zeros(5), np.ones(5)])
def test_one_class_is_nan_and_a_count(labels):
    figures = metrics.summary(np.arange(5.0), labels, [0.3])
    assert math.isnan(figures["auroc"])
    assert math.isnan(figures["ap"])
    assert math.isnan(figures["pauc@0.3"])
    assert (figures["positives"], figures["negatives"]) == (labels.sum(), 5 - labels.sum())


def test_scores_that_are_not_numbers_are_nan():
    assert math.isnan(metrics.auroc(np.array([0.1, np.nan]), np.array([0, 1])))


@pytest.mark.parametrize("limit", [0.3, 1.0])
def test_resampled_figures_are_those_of_the_resampled_examples(limit):
    labels = (np.arange(60) % 3 == 0).astype(int)
    runs = [RNG.integers(0, 9, 60).astype(float) + labels for _ in range(2)]
    found = metrics.resampled(runs, labels, limit, times=5, seed=7)
    rng = np.random.default_rng(7)
    for value in found:
        chosen = np.concatenate([rng.choice(np.flatnonzero(labels == side), n) for side, n in ((1, 20), (0, 40))])
        each = [
            roc_auc_score(labels[chosen], scores[chosen], max_fpr=None if limit == 1 else limit) for scores in runs
        ]
        assert value == pytest.approx(np.mean(each), abs=1e-12)


def test_an_interval_holds_its_share_of_test_sets():
    """Of AUCs on fresh test sets 95 % lie within 1.96 deviations of the truth; the bootstrap finds that width."""
    shift, n = 1.0, 300

    def draw() -> tuple[np.ndarray, np.ndarray]:
        labels = (np.arange(n) % 2).astype(int)
        return RNG.normal(size=n) + shift * labels, labels

    fresh = np.std([metrics.auroc(*draw()) for _ in range(300)])
    low, high = metrics.interval(metrics.resampled([(sample := draw())[0]], sample[1], times=300))
    assert high - low == pytest.approx(2 * 1.96 * fresh, rel=0.25)
