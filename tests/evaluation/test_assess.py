"""One assessment of a run: chosen on validation, measured on test, pooled and by site; and it is honest about it."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, roc_auc_score

from fedxl.evaluation.assess import assess
from fedxl.evaluation.calibration import Platt, from_json
from fedxl.evaluation.intervals import delong, intervals
from fedxl.evaluation.operating import at_sensitivity, at_specificity, at_threshold
from fedxl.evaluation.scores import Scores, load, save
from tests.evaluation.sets import scored

VALIDATION, TEST = scored(60, 140, seed=1), scored(50, 100, seed=2)


def test_choices_are_made_on_validation_and_measured_on_test():
    found = assess({"validation": VALIDATION, "test": TEST}, fpr=0.2, level=0.9)
    assert (found.split, found.chosen_on, found.notes) == ("test", "validation", ())
    pooled = found.pooled.one
    assert (pooled.positives, pooled.negatives) == (50, 100)
    assert pooled.metrics["auroc"] == delong(*TEST.flat, 0.9)
    assert pooled.metrics["auroc"].value == pytest.approx(roc_auc_score(TEST.y, TEST.scores))
    assert pooled.metrics == intervals(["auroc", "pauc@0.2", "ap"], TEST, 0.9)
    threshold = at_specificity(*VALIDATION.flat, 0.95).threshold
    assert pooled.points["specificity 0.95"] == at_threshold(*TEST.flat, threshold, 0.9)
    threshold = at_sensitivity(*VALIDATION.flat, 0.9).threshold
    assert pooled.points["sensitivity 0.9"] == at_threshold(*TEST.flat, threshold, 0.9)
    assert found.calibrations == {"": Platt.fit(*VALIDATION.flat)}
    assert pooled.brier == pytest.approx(brier_score_loss(TEST.y, found.calibrations[""](TEST.scores[:, 0])))
    assert found.pooled.mean == pooled.metrics
    assert found.pooled.examples == 150


def test_test_data_choose_nothing():
    moved = dataclasses.replace(TEST, scores=TEST.scores + 5)
    first, second = (assess({"validation": VALIDATION, "test": test}) for test in (TEST, moved))
    assert first.calibrations == second.calibrations
    for name, point in first.pooled.one.points.items():
        assert point.threshold == second.pooled.one.points[name].threshold


def test_sites_are_assessed_by_the_choices_of_all():
    found = assess({"validation": VALIDATION, "test": TEST})
    parts = TEST.by_site()
    assert list(found.sites) == list(parts) == ["a", "b", "c"]
    for name, site in found.sites.items():
        assert site.one.metrics["auroc"] == delong(*parts[name].flat)
        threshold = found.pooled.one.points["specificity 0.9"].threshold
        assert site.one.points["specificity 0.9"].threshold == threshold
    assert sum(site.one.positives for site in found.sites.values()) == found.pooled.one.positives


def test_without_test_data_it_says_so():
    found = assess({"validation": VALIDATION})
    assert found.split == "validation"
    assert "no test data" in found.notes[0]
    assert found.pooled.one.points["specificity 0.9"].sensitivity.how.endswith("threshold from the same examples")


def test_without_validation_data_nothing_is_chosen():
    found = assess({"test": TEST, "validation": Scores.of([], [])})
    assert found.pooled.one.points == {}
    assert found.calibrations == {}
    assert found.chosen_on == ""
    assert found.pooled.one.brier is None
    assert found.notes == ("there are no validation data: no threshold and no calibration was chosen",)
    assert assess({}) is None


def test_it_is_json_whatever_is_not_defined():
    one_class = Scores.of([0.1, 0.2], [1, 1], site=np.array([0, 1]), sites=("a", "b"))
    not_finite = dataclasses.replace(TEST, scores=np.where(np.arange(150)[:, None] == 3, math.nan, TEST.scores))
    for splits in (
        {"validation": VALIDATION, "test": TEST},
        {"validation": one_class, "test": TEST},
        {"validation": VALIDATION, "test": one_class},
        {"validation": not_finite, "test": not_finite},
    ):
        found = assess(splits)
        content = json.loads(json.dumps(found.to_json(), allow_nan=False))
        part = content["pooled"]["labels"][""]
        assert part["metrics"]["auroc"]["how"] == found.pooled.one.metrics["auroc"].how
        assert content["pooled"]["mean"] == part["metrics"]
        assert list(content["sites"]) == list(found.sites)
        assert {name: from_json(one) for name, one in content["calibrations"].items()} == found.calibrations
    assert part["metrics"]["ap"]["value"] is None
    assert any("not finite" in note for note in content["notes"])


def test_a_ranking_that_is_upside_down_is_noted():
    upside_down = dataclasses.replace(VALIDATION, scores=-VALIDATION.scores)
    found = assess({"validation": upside_down, "test": TEST})
    assert any("do not rise" in note for note in found.notes)


def test_net_benefit_and_reliability_are_there_and_isotonic_can_be_asked_for():
    found = assess({"validation": VALIDATION, "test": TEST}, calibration="isotonic")
    assert found.to_json()["calibrations"][""]["kind"] == "isotonic"
    assert found.pooled.one.reliability.counts.sum() == 150
    assert found.pooled.one.net_benefit.treat_all[0] == pytest.approx(1 / 3 - 2 / 3 * 0.01 / 0.99)


def test_a_run_folders_scores_give_the_same_assessment(tmp_path):
    splits = {"validation": VALIDATION, "test": TEST}
    save(tmp_path / "scores.npz", splits)
    assert assess(load(tmp_path / "scores.npz")).to_json() == assess(splits).to_json()
