"""Attacks of the curious on made-up uploads whose truth is known, and the study of them on a small demo."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from fedxl.experiments.curious import record, study
from fedxl.experiments.curious.attacks import NOBODY, Success, Upload, judged, link_nearest, link_rows

from fedxl import UserError


def test_rows_are_linked_with_the_same_row():
    np.testing.assert_array_equal(link_rows(np.array([4, 7, 9]), np.array([9, 9, 5, 4])), [2, 2, NOBODY, 0])


def test_the_nearest_is_found_after_all_scores_have_moved_together():
    before = np.array([[0.1, 5.0], [0.2, 5.0], [0.3, 7.0], [0.9, 6.0]])
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(link_nearest(before, 3 * before[order] - 2), order)


def test_a_link_counts_if_its_example_was_there_before():
    before, after = np.array([1, 1, 2, 3]), np.array([1, 2, 3, 8])
    # Of three that can be right: 1 is linked with 1, 2 with nobody, 3 with 2. By chance: 2/4, 1/4 and 1/4.
    found = judged(np.array([1, NOBODY, 2, 0]), before, after)
    assert found == Success(pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert np.isnan(judged(np.array([0]), np.array([1]), np.array([2])).right)


def test_a_link_with_nobody_is_not_one_with_the_last_entry():
    assert judged(np.array([NOBODY]), np.array([1, 2]), np.array([2])).right == 0.0


def test_an_upload_is_sorted_with_its_truth():
    upload = Upload(np.array([[0.5, 2.0], [0.1, 3.0], [0.5, 1.0]]), np.array([10, 11, 12])).sorted()
    assert upload.values.tolist() == [[0.1, 3.0], [0.5, 1.0], [0.5, 2.0]]
    assert upload.examples.tolist() == [11, 12, 10]


def small(seed: int, arm: str):
    config = study.config_of(seed, arm)
    return replace(
        config, run={**config.run, "rounds": 3, "local_steps": 4, "eval_every": 3, "batch1": 4, "batch2": 4}
    )


def test_the_study_is_what_its_parts_are_and_is_not_run_twice(tmp_path, monkeypatch):
    ran = []

    def counted(run, *known):
        def call(seed, arm=study.PLAIN):
            ran.append((seed, arm))
            return run(seed, *([arm] if known else []), small(seed, arm))

        return call

    monkeypatch.setattr(study, "run_attacks", counted(study.run_attacks))
    monkeypatch.setattr(study, "run_cost", counted(study.run_cost, "arm"))
    found = study.study(tmp_path / "curious.json", seeds=[10], attacked=[10])
    assert len(ran) == 4
    assert study.study(tmp_path / "curious.json", seeds=[10], attacked=[10]) == found
    assert len(ran) == 4
    server, site = found["attacks"]["10"]["server"], found["attacks"]["10"]["site"]
    first, *_ = study.ATTACKS
    for side in ("first", "second"):
        assert server[first][side]["right"] == 1.0
        assert server["the run's seed, uploads sorted, private draws"][side]["right"] < 0.25
        assert site["seed"][side]["right"] == 1.0
        assert site["server's secret"][side]["right"] < 0.4
    scores = [found[arm]["10"]["last"] for arm in study.ARMS]
    assert len(set(scores)) == 3, "each arm draws by itself"
    record.write(found, tmp_path, "a machine")
    text = (tmp_path / "curious.md").read_text()
    assert "| the run's seed, uploads in the order of draws | S1 | 1.0000 |" in text
    assert (tmp_path / "curious.png").stat().st_size > 10_000


@pytest.mark.parametrize("content", ["[]", "{", json.dumps({"attacks": []})])
def test_a_file_of_something_else(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match="holds no results of this study"):
        study.study(tmp_path / "x.json")
