"""Attacks of the curious on made-up uploads whose truth is known, and the study of them on a small demo."""

from __future__ import annotations

import numpy as np
import pytest

from studies.curious import origins, study
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


def uploads_of(sites: int, spread: float, rounds: int = 6, count: int = 40) -> list[list[Upload | None]]:
    """Scores of sites whose means are `spread` apart, and that all rise from round to round; the last has none."""
    rng = np.random.default_rng(0)
    each = [[rng.normal(spread * site + number, 1, (count, 2)) for site in range(sites)] for number in range(rounds)]
    return [[*(Upload(values, np.arange(count)) for values in row), None] for row in each]


def test_owners_are_guessed_as_far_as_the_sites_scores_differ():
    apart = origins.attack(uploads_of(4, 20.0), origins.View())
    assert (apart.entries, apart.uploads, apart.chance) == (1.0, 1.0, 0.25)
    some = origins.attack(uploads_of(4, 1.0), origins.View(u=False))
    assert 0.35 < some.entries < some.uploads
    for view in (origins.View(), origins.View(most=1)):
        alike = origins.attack(uploads_of(4, 0.0, rounds=60, count=10), view)
        assert alike.entries == pytest.approx(0.25, abs=0.06)
        assert alike.uploads == pytest.approx(0.25, abs=0.12), "the truth is no tie-break"


def test_a_view_shows_what_it_says():
    (uploads,), rng = uploads_of(3, 1.0, rounds=1), np.random.default_rng(0)
    for view, columns, count in ((origins.View(), 2, 40), (origins.View(u=False, most=8), 1, 8)):
        seen = origins.see(uploads, view, rng)
        assert seen.values.shape == (3 * count, columns)
        assert np.bincount(seen.owners).tolist() == [count] * 3
    assert origins.see(uploads, origins.View(position=True), rng).values.shape == (120, 3)


def test_attacks_succeed_where_draws_follow_from_the_seed_and_not_where_they_are_private(tmp_path):
    rows, curves = [], []
    for case in study.cases([10], [10]):
        found, arrays = study.run_case(Planned({**case, "rounds": 5 if "guess" in case else 3}))
        rows.append(made(case, **found))
        curves += [arrays] if arrays else []
    server, site = rows[0].found["server"], rows[0].found["site"]
    for side in ("S1", "S2"):
        assert server[f"the run's seed, uploads in the order of draws, {side}"]["right"] == 1.0
        assert server[f"the run's seed, uploads sorted, private draws, {side}"]["right"] < 0.25
        assert site[f"seed, {side}"]["right"] == 1.0
        assert site[f"server's secret, {side}"]["right"] < 0.4
    assert len({row.test("last") for row in rows[1:-1]}) == 3, "each arm draws by itself"
    owner = rows[-1].found["owner"]
    assert owner["scores and u, sorted, S1"]["entries"] > 2 * owner["scores and u, sorted, S1"]["chance"]
    assert "| the run's seed, uploads in the order of draws | S1 | 1.0000 |" in study.markdown(rows)
    study.draw(tmp_path / "curious.png", rows, curves)
    assert (tmp_path / "curious.png").stat().st_size > 10_000
