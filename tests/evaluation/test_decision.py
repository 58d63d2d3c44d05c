"""What a score means: threshold and calibration of validation scores, by brute force and as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedxl.errors import UserError
from fedxl.evaluation.calibration import Platt
from fedxl.evaluation.decision import Decision, DecisionOptions, Decisions, decide, why_undecided
from fedxl.evaluation.histogram import by_label, count
from fedxl.evaluation.scores import Scores


def validation(count: int = 400, seed: int = 0) -> Scores:
    rng = np.random.default_rng(seed)
    labels = (rng.random(count) < 0.3).astype(np.int64)
    return Scores.of(np.round(rng.normal(size=count) + 1.5 * labels, 2), labels)  # rounded: there are ties


def decided(found: Scores, options: DecisionOptions = DecisionOptions()) -> Decision:  # noqa: B008
    """The decision of one label."""
    return decide([""], {"": found}, options).decided[""]


@pytest.mark.parametrize(
    ("options", "side"),
    [(DecisionOptions(), 0), (DecisionOptions(specificity=0.7), 0), (DecisionOptions(sensitivity=0.95), 1)],
)
def test_the_threshold_reaches_what_was_asked_and_no_better_one_does(options, side):
    found = validation()
    decision, (scores, labels) = decided(found, options), found.flat
    called = decision.classes(scores)
    wanted = options.sensitivity or options.specificity or 0.9

    def reached(threshold: float) -> float:
        return float(np.mean((scores >= threshold)[labels == side] == side))

    assert np.mean(called[labels == side] == side) == reached(decision.threshold) >= wanted
    others = np.unique(scores)
    # The next threshold that calls more examples rightly on the other side misses what was asked for.
    better = others[others > decision.threshold] if side else others[others < decision.threshold]
    assert reached(better.min() + 1e-9 if side else better.max()) < wanted
    assert decision.measured["examples"] == 400
    assert decision.rule == options.rule


@pytest.mark.parametrize("calibration", ["platt", "isotonic"])
def test_a_decision_comes_back_from_json_as_it_was(calibration):
    decision = decided(validation(), DecisionOptions(calibration))
    again = Decision.from_json(json.loads(json.dumps(decision.to_json())))
    scores = np.linspace(-5, 5, 101)
    np.testing.assert_array_equal(again.probabilities(scores), decision.probabilities(scores))
    np.testing.assert_array_equal(again.classes(scores), decision.classes(scores))
    assert (np.diff(again.probabilities(scores)) >= 0).all()


def test_without_both_classes_there_is_no_decision():
    one = Scores.of([0.1, 0.2], [0, 0])
    assert why_undecided(None) == "it is known of no validation example"
    assert "of one class" in why_undecided(one, 1)
    assert not why_undecided(validation(), 1)
    found = decide([""], {"": one})
    assert found.decided == {}
    assert found.why_none == "its 2 validation scores are of one class"
    for labels in ([""], ["a", "b"]):
        assert decide(labels, {}).why_none == "the run kept no validation scores"


def several() -> Scores:
    """Labels with enough validation data, with too few positives, and with none."""
    known = validation()
    scores = np.repeat(known.scores, 3, 1)
    y = np.stack([known.y[:, 0], np.arange(400) < 4, np.full(400, -1)], 1)
    return Scores(scores, y.astype(np.int64), ("enough", "few", "none"))


def test_each_label_has_its_own_decision_or_a_reason():
    labels = ["enough", "few", "none"]
    found = decide(labels, several().by_label())
    assert list(found.labels) == labels
    assert found.decided["enough"].to_json() == decided(validation()).to_json()
    assert found.undecided == {
        "few": "4 of its 400 validation examples are positive, and 5 are the fewest",
        "none": "it is known of no validation example",
    }
    scores = several().scores
    probabilities, classes = found.probabilities(scores), found.classes(scores)
    np.testing.assert_array_equal(probabilities[:, 0], decided(validation()).probabilities(scores[:, 0]))
    assert np.isnan(probabilities[:, 1:]).all()
    np.testing.assert_array_equal(classes[:, 0], decided(validation()).classes(scores[:, 0]))
    assert (classes[:, 1:] == -1).all()
    again = Decisions.from_json(json.loads(json.dumps(found.to_json())), labels)
    assert again.to_json() == found.to_json()
    assert again.undecided == found.undecided
    assert decide(["few"] * 2, several().by_label()).why_none.startswith("no label has enough: few: 4 of its 400")
    for wrong in (None, {}, {"enough": {}}, {**found.to_json(), "more": {"undecided": ""}}):
        with pytest.raises(UserError, match="one for each label: 'enough', 'few', 'none'"):
            Decisions.from_json(wrong, labels)


def test_another_threshold_is_for_one_label():
    found = decide([""], {"": validation()}).with_threshold(0.25).decided[""]
    assert (found.threshold, found.rule, found.measured) == (0.25, "threshold 0.25", {})
    with pytest.raises(UserError, match="for one label"):
        decide(["enough", "few"], several().by_label()).with_threshold(0.25)


def test_counts_in_bins_stand_for_scores_that_nobody_told():
    """Of two sites, in narrow bins: nearly the decision of the scores themselves, which go first if there are any."""
    found = validation(4000)
    edges = np.linspace(-5, 6, 1101)  # every score is in a bin of its own
    half = {"a": found.take(np.arange(0, 2000)), "b": found.take(np.arange(2000, 4000))}
    curves = {"validation": {"": {site: count(edges + 0.005, *one.flat) for site, one in half.items()}}}
    exact, binned = decided(found), decided(by_label({}, curves)["validation"][""])
    assert binned.threshold == pytest.approx(exact.threshold, abs=0.011)
    assert binned.measured["sensitivity"] == exact.measured["sensitivity"]
    scores = np.linspace(-3, 4, 50)
    np.testing.assert_allclose(binned.probabilities(scores), exact.probabilities(scores), atol=0.002)
    (first,) = by_label({"validation": found}, curves)["validation"].values()
    np.testing.assert_array_equal(first.scores, found.scores)
    assert by_label({}, {}) == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"calibration": "plat"}, "did you mean 'platt'"),
        ({"specificity": 90}, "must lie between 0 and 1, as in 0.9"),
        ({"sensitivity": float("nan")}, "must lie between 0 and 1"),
        ({"specificity": 0.9, "sensitivity": 0.9}, "not by both"),
    ],
)
def test_options_are_checked(options, said):
    with pytest.raises(UserError, match=said):
        DecisionOptions(**options)


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
