"""One judgement of a run: chosen on validation, measured on test, pooled and by site; and it is honest about it."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, roc_auc_score

from fedxl.errors import UserError
from fedxl.evaluation.calibration import Platt, from_json
from fedxl.evaluation.intervals import bootstrap, delong
from fedxl.evaluation.judgement import judge
from fedxl.evaluation.operating import at_sensitivity, at_specificity, at_threshold
from fedxl.evaluation.scored import Scored, load, save
from tests.evaluation.sets import scored

DRAWS = 100
VALIDATION, TEST = scored(60, 140, seed=1), scored(50, 100, seed=2)


def judged(splits, **options):
    return judge(splits, **{"draws": DRAWS, **options})


def test_choices_are_made_on_validation_and_measured_on_test():
    found = judged({"validation": VALIDATION, "test": TEST}, fpr=0.2, level=0.9)
    assert (found.split, found.chosen_on, found.notes) == ("test", "validation", ())
    pooled = found.pooled
    assert (pooled.positives, pooled.negatives) == (50, 100)
    assert pooled.metrics["auroc"] == delong(TEST.scores, TEST.labels, 0.9)
    assert pooled.metrics["auroc"].value == pytest.approx(roc_auc_score(TEST.labels, TEST.scores))
    assert pooled.metrics["pauc@0.2"] == bootstrap("pauc@0.2", TEST.scores, TEST.labels, level=0.9, draws=DRAWS)
    threshold = at_specificity(VALIDATION.scores, VALIDATION.labels, 0.95).threshold
    assert pooled.points["specificity 0.95"] == at_threshold(TEST.scores, TEST.labels, threshold, 0.9)
    threshold = at_sensitivity(VALIDATION.scores, VALIDATION.labels, 0.9).threshold
    assert pooled.points["sensitivity 0.9"] == at_threshold(TEST.scores, TEST.labels, threshold, 0.9)
    assert found.calibration == Platt.fit(VALIDATION.scores, VALIDATION.labels)
    assert pooled.brier == pytest.approx(brier_score_loss(TEST.labels, found.calibration(TEST.scores)))


def test_test_data_choose_nothing():
    moved = dataclasses.replace(TEST, scores=TEST.scores + 5)
    first, second = (judged({"validation": VALIDATION, "test": test}) for test in (TEST, moved))
    assert first.calibration == second.calibration
    for name, point in first.pooled.points.items():
        assert point.threshold == second.pooled.points[name].threshold


def test_sites_are_judged_by_the_choices_of_all():
    found = judged({"validation": VALIDATION, "test": TEST})
    parts = TEST.by_site()
    assert list(found.sites) == list(parts) == ["a", "b", "c"]
    for name, site in found.sites.items():
        assert site.metrics["auroc"] == delong(parts[name].scores, parts[name].labels)
        assert site.points["specificity 0.9"].threshold == found.pooled.points["specificity 0.9"].threshold
    assert sum(site.positives for site in found.sites.values()) == found.pooled.positives


def test_without_test_data_it_says_so():
    found = judged({"validation": VALIDATION})
    assert found.split == "validation"
    assert "no test data" in found.notes[0]
    assert found.pooled.points["specificity 0.9"].sensitivity.how.endswith("threshold from the same examples")


def test_without_validation_data_nothing_is_chosen():
    found = judged({"test": TEST, "validation": Scored(np.zeros(0), np.zeros(0, int))})
    assert found.pooled.points == {}
    assert found.calibration is found.chosen_on is found.pooled.brier is None
    assert found.notes == ("there are no validation data: no threshold and no calibration was chosen",)
    with pytest.raises(UserError, match="no scores of held-back data"):
        judged({})


def test_it_is_json_whatever_is_not_defined():
    one_class = Scored(np.array([0.1, 0.2]), np.array([1, 1]), np.array([0, 1]), ("a", "b"))
    not_finite = dataclasses.replace(TEST, scores=np.where(np.arange(150) == 3, math.nan, TEST.scores))
    for splits in (
        {"validation": VALIDATION, "test": TEST},
        {"validation": one_class, "test": TEST},
        {"validation": VALIDATION, "test": one_class},
        {"validation": not_finite, "test": not_finite},
    ):
        found = judged(splits)
        content = json.loads(json.dumps(found.to_json(), allow_nan=False))
        assert content["pooled"]["metrics"]["auroc"]["how"] == found.pooled.metrics["auroc"].how
        assert list(content["sites"]) == list(found.sites)
        if found.calibration is not None:
            assert from_json(content["calibration"]) == found.calibration
    assert content["pooled"]["metrics"]["ap"]["value"] is None
    assert any("not finite" in note for note in content["notes"])


def test_a_ranking_that_is_upside_down_is_noted():
    upside_down = dataclasses.replace(VALIDATION, scores=-VALIDATION.scores)
    found = judged({"validation": upside_down, "test": TEST})
    assert any("do not rise" in note for note in found.notes)


def test_net_benefit_and_reliability_are_there_and_isotonic_can_be_asked_for():
    found = judged({"validation": VALIDATION, "test": TEST}, calibration="isotonic")
    assert found.to_json()["calibration"]["kind"] == "isotonic"
    assert found.pooled.reliability.counts.sum() == 150
    assert found.pooled.net_benefit.treat_all[0] == pytest.approx(1 / 3 - 2 / 3 * 0.01 / 0.99)


def test_a_run_folders_scores_give_the_same_judgement(tmp_path):
    splits = {"validation": VALIDATION, "test": TEST}
    save(tmp_path / "scores.npz", splits)
    assert judged(load(tmp_path / "scores.npz")).to_json() == judged(splits).to_json()
