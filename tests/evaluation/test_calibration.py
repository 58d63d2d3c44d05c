"""Calibration against scikit-learn: logistic and isotonic regression, reliability curves, the Brier score."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss

from fedxl.errors import UserError
from fedxl.evaluation.calibration import CALIBRATIONS, Isotonic, Platt, brier, fit, from_json, reliability
from tests.evaluation.sets import made


@pytest.mark.parametrize(("centre", "scale"), [(0.0, 1.0), (1e4, 0.01), (-3.0, 1e5)])
def test_platt_is_logistic_regression_on_smoothed_targets(centre, scale):
    """Every example stands twice, as a positive and a negative, weighed by its target."""
    raw, labels = made(30, 70)
    targets = np.where(labels == 1, 31 / 32, 1 / 72)
    model = LogisticRegression(C=np.inf, tol=1e-12, max_iter=1000)
    twice = np.concatenate([raw, raw])[:, None]
    model.fit(twice, np.repeat([1, 0], 100), sample_weight=np.concatenate([targets, 1 - targets]))
    found = Platt.fit(raw * scale + centre, labels)
    np.testing.assert_allclose(
        found(raw * scale + centre), model.predict_proba(raw[:, None])[:, 1], rtol=1e-5, atol=1e-7
    )
    assert found.slope * scale == pytest.approx(model.coef_[0, 0], rel=1e-4)
    assert found.note == ""


def test_platt_of_a_perfect_ranking_is_no_step():
    found = Platt.fit([-2.0, -1.0, 1.0, 2.0], [0, 0, 1, 1])
    assert math.isfinite(found.slope)
    assert 0.5 < found(1.0) < 1 - 1e-3
    alone = Platt.fit(np.arange(-500, 501.0), np.arange(-500, 501) > 0)
    assert math.isfinite(alone.slope)
    assert np.isfinite(alone([-1e9, 1e9])).all()


@pytest.mark.parametrize("kind", CALIBRATIONS)
def test_a_ranking_that_is_upside_down_is_said_and_not_turned_round(kind):
    scores, labels = made(30, 70)
    found = fit(kind, -scores, labels)
    assert "do not rise" in found.note
    probabilities = found(np.linspace(-5, 5, 9))
    np.testing.assert_allclose(probabilities, probabilities[0])
    assert probabilities[0] == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("kind", CALIBRATIONS)
def test_constant_scores_give_the_share_of_positives(kind):
    found = fit(kind, np.full(100, 7.0), np.repeat([1, 0], [20, 80]))
    assert found([7.0]) == pytest.approx(0.2, abs=0.02)
    assert "do not rise" in found.note


@pytest.mark.parametrize(("score", "count"), [(0.1, 100), (0.3, 11), (7.7, 7), (-2.3, 100)])
def test_rounding_makes_no_step_of_constant_scores(score, count):
    """The mean of these is another float than each of them, so that their standard deviation is not 0."""
    scores, labels = np.full(count, score), np.arange(count) % 3 == 0
    assert scores.std() > 0, "or this tests nothing"
    found = fit("platt", scores, labels.astype(np.int64))
    assert found.slope == 0
    assert "do not rise" in found.note
    assert found([score + 1]) == found([score - 1])


@pytest.mark.parametrize("kind", CALIBRATIONS)
def test_calibrations_never_change_the_order(kind):
    scores, labels = made(30, 70, tied=True)
    found = fit(kind, scores, labels)
    assert (np.diff(found(np.linspace(-9, 9, 1000))) >= 0).all()
    assert found(np.array([-1e300, 1e300])) == pytest.approx([0, 1], abs=1e-6)
    assert math.isnan(found(np.array([math.nan]))[0])


@pytest.mark.parametrize("tied", [False, True])
def test_isotonic_is_scikit_learns(tied):
    scores, labels = made(40, 60, tied=tied)
    other = made(40, 60, seed=1)[0]
    wanted = IsotonicRegression(out_of_bounds="clip").fit(scores, labels)
    np.testing.assert_allclose(Isotonic.fit(scores, labels)(other), wanted.predict(other), atol=1e-12)


@pytest.mark.parametrize("kind", CALIBRATIONS)
@pytest.mark.parametrize("sign", [1, -1])
def test_calibrations_come_back_from_json(kind, sign):
    scores, labels = made(40, 60)
    found = fit(kind, sign * scores, labels)
    again = from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    np.testing.assert_array_equal(again(scores), found(scores))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "kind must be"),
        ([], "kind must be"),
        ({"kind": ["platt"]}, "kind must be"),
        ({"kind": "os.system"}, "kind must be"),
        ({"kind": "platt", "slope": 1}, "finite numbers"),
        ({"kind": "platt", "slope": "1", "intercept": 0}, "finite numbers"),
        ({"kind": "platt", "slope": math.nan, "intercept": 0}, "finite numbers"),
        ({"kind": "platt", "slope": 10**400, "intercept": 0}, "finite numbers"),
        ({"kind": "platt", "slope": -1.0, "intercept": 0}, "slope is negative"),
        ({"kind": "isotonic", "scores": 3, "probabilities": [1]}, "finite numbers"),
        ({"kind": "isotonic", "scores": [], "probabilities": []}, "differ in number"),
        ({"kind": "isotonic", "scores": [1, 2], "probabilities": [1]}, "differ in number"),
        ({"kind": "isotonic", "scores": [2, 1], "probabilities": [0, 1]}, "scores do not rise"),
        ({"kind": "isotonic", "scores": [1, 2], "probabilities": [1, 0]}, "do not rise from 0 to 1"),
        ({"kind": "isotonic", "scores": [1, 2], "probabilities": [0, 2]}, "do not rise from 0 to 1"),
    ],
)
def test_a_damaged_calibration_is_refused(content, message):
    with pytest.raises(UserError, match=message):
        from_json(content)


def test_the_reliability_curve_is_scikit_learns():
    scores, labels = made(60, 140)
    probabilities = Platt.fit(scores, labels)(scores)
    observed, predicted = calibration_curve(labels, probabilities, n_bins=7, strategy="quantile")
    found = reliability(probabilities, labels, bins=7)
    np.testing.assert_allclose(found.observed, observed)
    np.testing.assert_allclose(found.predicted, predicted)
    assert found.counts.sum() == 200
    assert ((found.low <= found.observed) & (found.observed <= found.high)).all()
    assert found.error == pytest.approx(np.sum(found.counts * np.abs(observed - predicted)) / 200)


def test_equal_probabilities_share_a_bin():
    found = reliability(np.full(50, 0.3), np.repeat([1, 0], [20, 30]))
    assert found.counts.tolist() == [50]
    assert found.observed.tolist() == [0.4]


def test_the_brier_score_is_scikit_learns():
    scores, labels = made(60, 140)
    probabilities = Platt.fit(scores, labels)(scores)
    assert brier(probabilities, labels) == pytest.approx(brier_score_loss(labels, probabilities), rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Platt.fit([1, 2], [1, 1]), "both classes"),
        (lambda: Isotonic.fit([1, math.inf], [0, 1]), "not finite"),
        (lambda: fit("plat", [1, 2], [0, 1]), "did you mean 'platt'"),
        (lambda: brier([2.0, 0.5], [0, 1]), r"must lie in \[0, 1\]"),
        (lambda: brier([], []), "no examples"),
        (lambda: reliability([0.5, 0.6], [0, 1], bins=1), "bins must be 2 to 1000"),
    ],
)
def test_mistakes_are_one_line(call, message):
    with pytest.raises(UserError, match=message):
        call()
