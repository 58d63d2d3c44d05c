"""What a score means: threshold and calibration of validation scores, by brute force and as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedxl.errors import UserError
from fedxl.evaluation.binned import count
from fedxl.evaluation.calibration import Platt
from fedxl.evaluation.decision import Decision, Wish, decide, deciding, why_undecided
from fedxl.evaluation.scored import Scored


def validation(count: int = 400, seed: int = 0) -> Scored:
    rng = np.random.default_rng(seed)
    labels = (rng.random(count) < 0.3).astype(np.int64)
    return Scored(np.round(rng.normal(size=count) + 1.5 * labels, 2), labels)  # rounded: there are ties


@pytest.mark.parametrize(("wish", "side"), [(Wish(), 0), (Wish(specificity=0.7), 0), (Wish(sensitivity=0.95), 1)])
def test_the_threshold_reaches_what_was_asked_and_no_better_one_does(wish, side):
    found = validation()
    decision = decide({"validation": found}, wish)
    called = decision.classes(found.scores)
    wanted = wish.sensitivity or wish.specificity or 0.9

    def reached(threshold: float) -> float:
        return float(np.mean((found.scores >= threshold)[found.labels == side] == side))

    assert np.mean(called[found.labels == side] == side) == reached(decision.threshold) >= wanted
    others = np.unique(found.scores)
    # The next threshold that calls more examples rightly on the other side misses what was asked for.
    better = others[others > decision.threshold] if side else others[others < decision.threshold]
    assert reached(better.min() + 1e-9 if side else better.max()) < wanted
    assert decision.measured["examples"] == 400
    assert decision.rule == wish.rule


def test_test_scores_choose_nothing():
    first = decide({"validation": validation(), "test": validation(seed=1)})
    second = decide({"validation": validation(), "test": validation(seed=2)})
    assert first.to_json() == second.to_json()


@pytest.mark.parametrize("calibration", ["platt", "isotonic"])
def test_a_decision_comes_back_from_json_as_it_was(calibration):
    decision = decide({"validation": validation()}, Wish(calibration))
    again = Decision.from_json(json.loads(json.dumps(decision.to_json())))
    scores = np.linspace(-5, 5, 101)
    np.testing.assert_array_equal(again.probabilities(scores), decision.probabilities(scores))
    np.testing.assert_array_equal(again.classes(scores), decision.classes(scores))
    assert (np.diff(again.probabilities(scores)) >= 0).all()


def test_without_both_classes_there_is_no_decision():
    one = Scored(np.array([0.1, 0.2]), np.array([0, 0]))
    assert why_undecided({"test": validation()}) == "the run kept no validation scores"
    assert "of one class" in why_undecided({"validation": one})
    assert not why_undecided({"validation": validation()})
    with pytest.raises(UserError, match="cannot choose a calibration and a threshold"):
        decide({"validation": one})


def test_counts_in_bins_stand_for_scores_that_nobody_told():
    """Of two sites, in narrow bins: nearly the decision of the scores themselves, which go first if there are any."""
    found = validation(4000)
    edges = np.linspace(-5, 6, 1101)  # every score is in a bin of its own
    half = {"a": found.take(np.arange(0, 2000)), "b": found.take(np.arange(2000, 4000))}
    curves = {"validation": {site: count(edges + 0.005, one.scores, one.labels) for site, one in half.items()}}
    exact, binned = decide({"validation": found}), decide(deciding({}, curves))
    assert binned.threshold == pytest.approx(exact.threshold, abs=0.011)
    assert binned.measured["sensitivity"] == exact.measured["sensitivity"]
    scores = np.linspace(-3, 4, 50)
    np.testing.assert_allclose(binned.probabilities(scores), exact.probabilities(scores), atol=0.002)
    assert deciding({"validation": found}, curves)["validation"] is found
    assert why_undecided(deciding({}, {})) == "the run kept no validation scores"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"calibration": "plat"}, "did you mean 'platt'"),
        ({"specificity": 90}, "must lie between 0 and 1, as in 0.9"),
        ({"sensitivity": float("nan")}, "must lie between 0 and 1"),
        ({"specificity": 0.9, "sensitivity": 0.9}, "not by both"),
    ],
)
def test_wishes_are_checked(options, said):
    with pytest.raises(UserError, match=said):
        Wish(**options)


GOOD = {"calibration": Platt(1.0, 0.0).to_json(), "threshold": 0.5, "rule": "specificity 0.9"}


@pytest.mark.parametrize(
    "content",
    [
        None, [], {}, {**GOOD, "threshold": None}, {**GOOD, "threshold": True}, {**GOOD, "threshold": float("nan")},
        {**GOOD, "threshold": 10**400}, {**GOOD, "rule": 7}, {**GOOD, "rule": "x" * 1000}, {**GOOD, "measured": []},
        {**GOOD, "calibration": {"kind": "os.system"}}, {**GOOD, "calibration": {"kind": "platt", "slope": -1}},
    ],
)  # fmt: skip
def test_json_of_others_is_checked(content):
    with pytest.raises(UserError):
        Decision.from_json(content)
