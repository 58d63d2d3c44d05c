"""Thresholds against scikit-learn's ROC curve and counts; net benefit against its formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, roc_curve

from fedxl.errors import UserError
from fedxl.evaluation.operating import at_sensitivity, at_specificity, at_threshold, net_benefit
from tests.evaluation.sets import made

SHARES = [0.0, 0.3, 0.5, 0.9, 0.95, 0.99, 1.0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("share", SHARES)
def test_points_are_the_best_of_the_roc_curve(share, tied):
    scores, labels = made(20, 40, tied=tied)
    fpr, tpr, _ = roc_curve(labels, scores, drop_intermediate=False)
    found = at_specificity(scores, labels, share)
    assert found.sensitivity.value == pytest.approx(tpr[fpr <= 1 - share + 1e-9].max())
    assert found.specificity.value >= share - 1e-12
    found = at_sensitivity(scores, labels, share)
    assert found.specificity.value == pytest.approx(1 - fpr[tpr >= share - 1e-9].min())
    assert found.sensitivity.value >= share - 1e-12


@pytest.mark.parametrize("threshold", [-10.0, 0.3, 1.0, 10.0])
def test_a_threshold_gives_the_counts_of_the_confusion_matrix(threshold):
    scores, labels = made(20, 40, tied=True)
    (tn, fp), (fn, tp) = confusion_matrix(labels, scores >= threshold)
    found = at_threshold(scores, labels, threshold)
    wanted = [(tp, tp + fn), (tn, tn + fp), (tp, tp + fp), (tn, tn + fn)]
    for share, (hits, of) in zip(found[1:], wanted, strict=True):
        if of:
            assert share.value == pytest.approx(hits / of)
            assert share.low <= share.value <= share.high
        else:
            assert math.isnan(share.value)


def test_a_threshold_survives_rounding_of_scores():
    """Scores computed again in single precision fall on the same side."""
    scores, labels = made(50, 50)
    for share in SHARES:
        for chosen in (at_specificity(scores, labels, share), at_sensitivity(scores, labels, share)):
            again = at_threshold(scores.astype(np.float32), labels, chosen.threshold)
            assert math.isfinite(chosen.threshold)
            assert [each.value for each in again[1:3]] == [each.value for each in chosen[1:3]]


def test_neighbours_in_floating_point_are_told_apart():
    low = 1.0
    high = np.nextafter(low, 2)
    found = at_specificity([low, high], [0, 1], 1.0)
    assert (found.sensitivity.value, found.specificity.value) == (1.0, 1.0)
    found = at_specificity([low, high], [1, 0], 1.0)
    assert (found.sensitivity.value, found.specificity.value) == (0.0, 1.0)


def test_points_say_where_their_threshold_is_from():
    scores, labels = made(20, 40)
    chosen = at_specificity(scores, labels, 0.9)
    assert chosen.sensitivity.how == "Wilson; threshold from the same examples"
    assert at_threshold(scores, labels, chosen.threshold).sensitivity.how == "Wilson"


def test_what_cannot_be_chosen_is_not_a_number():
    for point in (
        at_specificity([1, 2], [1, 1], 0.9),
        at_sensitivity([1, 2], [0, 0], 0.9),
        at_sensitivity([1, math.nan], [0, 1], 0.9),
    ):
        assert math.isnan(point.threshold)
        assert math.isnan(point.sensitivity.value)
        assert point.sensitivity.how.startswith("not defined")
    only_negatives = at_specificity([1, 2, 3, 4], [0, 0, 0, 0], 0.75)
    assert only_negatives.specificity.value == 0.75
    assert math.isnan(only_negatives.sensitivity.value)


def test_net_benefit_is_vickers_and_elkins():
    rng = np.random.default_rng(0)
    labels = (rng.random(60) < 0.3).astype(int)
    probabilities = np.round(np.clip(0.3 * labels + rng.random(60) * 0.7, 0, 1), 2)
    limits = [0.05, 0.25, 0.5, 0.9]
    found = net_benefit(probabilities, labels, limits)
    for limit, model, treat_all in zip(limits, found.model, found.treat_all, strict=True):
        tp = sum(p >= limit and y == 1 for p, y in zip(probabilities, labels, strict=True))
        fp = sum(p >= limit and y == 0 for p, y in zip(probabilities, labels, strict=True))
        assert model == pytest.approx(tp / 60 - fp / 60 * limit / (1 - limit))
        assert treat_all == pytest.approx(labels.mean() - (1 - labels.mean()) * limit / (1 - limit))
    everybody = net_benefit(np.ones(60), labels, limits)
    np.testing.assert_allclose(everybody.model, everybody.treat_all)
    np.testing.assert_array_equal(net_benefit(np.zeros(60), labels, limits).model, np.zeros(4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: at_specificity([1, 2], [0, 1], 95), "specificity must lie between 0 and 1"),
        (lambda: net_benefit([-1, 2], [0, 1], [0.5]), "calibrate scores first"),
        (lambda: net_benefit([0, 1], [0, 1], [1.0]), "between 0 and 1"),
        (lambda: net_benefit([], [], [0.5]), "needs examples"),
    ],
)
def test_mistakes_are_one_line(call, message):
    with pytest.raises(UserError, match=message):
        call()
