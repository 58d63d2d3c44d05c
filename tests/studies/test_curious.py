"""Attacks of the curious on made-up uploads whose truth is known, and the study of them on a small demo."""

from __future__ import annotations

import numpy as np
import pytest

from studies.curious import study
from studies.curious.attacks import NOBODY, Success, Upload, judge, link_nearest, link_rows
from studies.harness import Planned
from tests.studies.running import made


def test_rows_are_linked_with_the_same_row():
    np.testing.assert_array_equal(link_rows(np.array([4, 7, 9]), np.array([9, 9, 5, 4])), [2, 2, NOBODY, 0])


def test_the_nearest_is_found_after_all_scores_have_moved_together():
    before = np.array([[0.1, 5.0], [0.2, 5.0], [0.3, 7.0], [0.9, 6.0]])
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(link_nearest(before, 3 * before[order] - 2), order)


def test_a_link_counts_if_its_example_was_there_before():
    before, after = np.array([1, 1, 2, 3]), np.array([1, 2, 3, 8])
    # Of three that can be right: 1 is linked with 1, 2 with nobody, 3 with 2. By chance: 2/4, 1/4 and 1/4.
    found = judge(np.array([1, NOBODY, 2, 0]), before, after)
    assert found == Success(pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert np.isnan(judge(np.array([0]), np.array([1]), np.array([2])).right)


def test_a_link_with_nobody_is_not_one_with_the_last_entry():
    assert judge(np.array([NOBODY]), np.array([1, 2]), np.array([2])).right == 0.0


def test_an_upload_is_sorted_with_its_truth():
    upload = Upload(np.array([[0.5, 2.0], [0.1, 3.0], [0.5, 1.0]]), np.array([10, 11, 12])).sorted()
    assert upload.values.tolist() == [[0.1, 3.0], [0.5, 1.0], [0.5, 2.0]]
    assert upload.examples.tolist() == [11, 12, 10]


def test_attacks_succeed_where_draws_follow_from_the_seed_and_not_where_they_are_private(tmp_path):
    rows, curves = [], []
    for case in study.cases([10], [10]):
        found, arrays = study.run_case(Planned({**case, "rounds": 3}))
        rows.append(made(case, **found))
        curves += [arrays] if arrays else []
    server, site = rows[0].found["server"], rows[0].found["site"]
    for side in ("S1", "S2"):
        assert server[f"the run's seed, uploads in the order of draws, {side}"]["right"] == 1.0
        assert server[f"the run's seed, uploads sorted, private draws, {side}"]["right"] < 0.25
        assert site[f"seed, {side}"]["right"] == 1.0
        assert site[f"server's secret, {side}"]["right"] < 0.4
    assert len({row.test("last") for row in rows[1:]}) == 3, "each arm draws by itself"
    assert "| the run's seed, uploads in the order of draws | S1 | 1.0000 |" in study.markdown(rows)
    study.draw(tmp_path / "curious.png", rows, curves)
    assert (tmp_path / "curious.png").stat().st_size > 10_000
