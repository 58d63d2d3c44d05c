"""Two models on the same examples, against formulas written out and scikit-learn; examples that are not the same."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score

from fedxl.errors import UserError
from fedxl.evaluation.compare import MOST_GROUPS, delong_difference, differences, metric_difference, paired
from fedxl.evaluation.delong import covariance, placements
from fedxl.evaluation.intervals import delong
from fedxl.evaluation.resampling import GENERATOR, jackknife
from fedxl.evaluation.scored import Scored
from tests.evaluation.sets import made, scored, written_out


def two(positives=12, negatives=20, tied=False):
    first, labels = made(positives, negatives, tied=tied)
    noise = np.random.default_rng(9).normal(size=len(labels))
    return first, first + (np.round(noise, 1) if tied else noise), labels


@pytest.mark.parametrize("tied", [False, True])
def test_delongs_test_is_that_of_the_paper(tied):
    first, second, labels = two(tied=tied)
    areas, spread = written_out([first, second], labels)
    contrast = np.array([1.0, -1.0])
    z = contrast @ areas / math.sqrt(contrast @ spread @ contrast)
    found = delong_difference(first, second, labels)
    assert found.value == pytest.approx(contrast @ areas, rel=1e-12)
    assert found.p == pytest.approx(stats.chi2.sf(z**2, 1), rel=1e-9), "the paper's chi-square with one degree"


@pytest.mark.parametrize("tied", [False, True])
def test_the_interval_joins_both_intervals(tied):
    """The distances to both ends as squares, times the share of DeLong's variance that the models do not share."""
    first, second, labels = two(tied=tied)
    _, spread = written_out([first, second], labels)
    share = 1 - 2 * spread[0, 1] / (spread[0, 0] + spread[1, 1])
    one, other, found = delong(first, labels), delong(second, labels), delong_difference(first, second, labels)
    down = (one.value - one.low) ** 2 + (other.high - other.value) ** 2
    up = (one.high - one.value) ** 2 + (other.value - other.low) ** 2
    wanted = found.value - math.sqrt(share * down), found.value + math.sqrt(share * up)
    assert found.how == "DeLong, both intervals joined"
    assert (found.low, found.high) == pytest.approx(wanted, rel=1e-9)


def test_models_that_hardly_differ_have_a_narrow_interval():
    """Each alone is uncertain, and leans; one pair of 1,200 is ranked otherwise."""
    first, labels = made(30, 40, shift=3.0)
    second = first.copy()
    high, low = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
    pairs = [(first[i] - first[j], i, j) for i in high for j in low if first[i] > first[j]]
    _, i, j = min(pairs)
    second[[i, j]] = second[[j, i]]
    alone, found = delong(first, labels), delong_difference(first, second, labels)
    assert found.value == pytest.approx(1 / 1200)
    assert alone.high - alone.low > 0.05
    assert found.high - found.low < 0.01


def test_with_many_examples_the_interval_of_a_difference_is_delongs():
    """To 1 % of its width."""
    first, second, labels = two(10_000, 10_000)
    spread = covariance(placements(first, labels), placements(second, labels))
    reach = stats.norm.ppf(0.975) * math.sqrt(spread[0, 0] + spread[1, 1] - 2 * spread[0, 1])
    found = delong_difference(first, second, labels)
    assert (found.low, found.high) == pytest.approx((found.value - reach, found.value + reach), abs=0.02 * reach)


def correlated(auroc, other, sets):
    """Scores of two models for 20 positives and 80 negatives, whose noise has correlation 1/2."""
    rng, labels = np.random.default_rng(0), np.repeat([1, 0], [20, 80])
    shifts = [math.sqrt(2) * stats.norm.ppf(each) for each in (auroc, other)]
    for _ in range(sets):
        shared, own = rng.normal(size=100), rng.normal(size=(2, 100))
        yield *(math.sqrt(0.5) * (shared + own[k]) + shifts[k] * labels for k in range(2)), labels


def test_intervals_of_a_difference_cover_near_one():
    """95 % intervals of 400 simulated sets; the difference +- 1.96 standard errors covers 88 %."""
    found = [delong_difference(*each) for each in correlated(0.99, 0.95, 400)]
    assert 0.93 <= np.mean([each.low <= 0.04 <= each.high for each in found]) <= 0.97


def test_intervals_of_a_difference_of_average_precision_cover():
    """Of 400 simulated sets; BCa covers 89 %."""
    found = [metric_difference("ap", *each) for each in correlated(0.8, 0.8, 400)]
    assert 0.93 <= np.mean([each.low <= 0 <= each.high for each in found]) <= 0.97


def test_a_hand_computed_example():
    """Placements of the first: 1, 1/2 and 1, 1/2; of the second: 1/2, 1/2 and 1, 0."""
    labels = [1, 1, 0, 0]
    first, second = [4, 2, 1, 3], [2, 2, 1, 3]
    # V10 differ by (1/2, 0): variance 1/8; V01 differ by (0, 1/2): variance 1/8; each over two examples.
    found = delong_difference(first, second, labels)
    assert found.value == 0.25
    assert found.p == pytest.approx(2 * stats.norm.sf(0.25 / math.sqrt(1 / 8 / 2 + 1 / 8 / 2)), rel=1e-12)


def test_the_order_of_the_models_turns_the_sign():
    first, second, labels = two()
    there, back = delong_difference(first, second, labels), delong_difference(second, first, labels)
    assert (there.value, there.low, there.high) == pytest.approx((-back.value, -back.high, -back.low))
    assert there.p == pytest.approx(back.p)


METRICS = {
    "pauc@0.3": lambda labels, scores: roc_auc_score(labels, scores, max_fpr=0.3),
    "ap": average_precision_score,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", list(METRICS))
def test_the_interval_is_students_with_the_jackknifes_error(name, tied):
    """scikit-learn's metrics, without one example after another, of the same examples for both models."""
    first, second, labels = two(8, 12, tied=tied)
    metric, parts = METRICS[name], []
    for side in (1, 0):
        left = []
        for row in np.flatnonzero(labels == side):
            rest = np.delete(np.arange(20), row)
            left.append(metric(labels[rest], first[rest]) - metric(labels[rest], second[rest]))
        parts.append((len(left) - 1) / len(left) * np.sum((left - np.mean(left)) ** 2))
    free = sum(parts) ** 2 / (parts[0] ** 2 / 7 + parts[1] ** 2 / 11)
    value, error = metric(labels, first) - metric(labels, second), math.sqrt(sum(parts))
    found = metric_difference(name, first, second, labels, level=0.9)
    assert found.value == pytest.approx(value, rel=1e-9)
    ends = stats.t.interval(0.9, free, loc=value, scale=error)
    assert (found.low, found.high) == pytest.approx((max(-1, ends[0]), min(1, ends[1])), rel=1e-8)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(value) / error, free), rel=1e-8)
    assert found.how == "jackknife, Student's t"


def test_p_and_interval_agree_for_every_small_case():
    """p < 5 % if and only if 0 lies outside of the 95 % interval; before, 3 of 80 such cases disagreed."""
    outside = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        labels = np.repeat([1, 0], rng.integers(3, 15, size=2))
        noise = rng.normal(size=(2, len(labels)))
        first = noise[0] + 1.5 * labels
        second = first * rng.random() * 0.3 + noise[1]
        if seed % 3 == 0:
            first, second = np.round(first), np.round(second)
        for name in METRICS:
            found = metric_difference(name, first, second, labels, level=0.95)
            if math.isnan(found.p):
                assert math.isnan(found.low)
                continue
            assert (found.p < 0.05) == (found.low > 0 or found.high < 0), (seed, name, found)
            outside += found.p < 0.05
    assert 30 < outside < 570, "both verdicts are met"


def test_large_classes_are_left_out_in_groups():
    """The standard error of a difference of means of 5,000 and 40 is known; 1,000 groups tell it to 5 %."""
    rng = np.random.default_rng(0)
    high, low = rng.normal(size=5000), rng.exponential(size=40)

    def gap(true, false):
        return true @ high / true.sum(1) - false @ low / false.sum(1)

    parts = high.var(ddof=1) / 5000, low.var(ddof=1) / 40
    each, grouped = jackknife(gap, (5000, 40)), jackknife(gap, (5000, 40), MOST_GROUPS)
    assert each[0] == pytest.approx(math.sqrt(sum(parts)), rel=1e-9), "of means the jackknife is exact"
    assert each[1] == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 / 4999 + parts[1] ** 2 / 39), rel=1e-9)
    assert grouped[0] == pytest.approx(each[0], rel=0.05)
    assert grouped == jackknife(gap, (5000, 40), MOST_GROUPS), "the same seed, the same groups"
    assert grouped != each


def test_a_users_own_metric_has_the_error_of_a_bootstrap():
    """Of medians, for which the jackknife is wrong."""
    first, second, labels = two(12, 20)

    def gap(scores, labels):
        return float(np.median(scores[labels == 1]) - np.median(scores[labels == 0]))

    def statistic(high, low):
        medians = [np.median(scores[rows]) for scores in (first, second) for rows in (high, low)]
        return medians[0] - medians[1] - (medians[2] - medians[3])

    classes = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
    generator = {GENERATOR: np.random.default_rng(5)}
    wanted = stats.bootstrap(classes, statistic, n_resamples=200, vectorized=False, method="percentile", **generator)
    found = metric_difference(gap, first, second, labels, draws=200, seed=5)
    error = wanted.standard_error
    assert found.how == "bootstrap, 200 draws, Student's t"
    assert found.p == pytest.approx(2 * stats.t.sf(abs(found.value) / error, 11), rel=1e-9)
    assert (found.low, found.high) == pytest.approx(stats.t.interval(0.95, 11, found.value, error), rel=1e-9)


def test_jackknife_and_delong_agree_where_both_apply():
    first, second, labels = two(150, 200)
    exact, found = delong_difference(first, second, labels), metric_difference("auroc", first, second, labels)
    assert found.value == pytest.approx(exact.value, rel=1e-12)
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=0.01)
    assert found.p == pytest.approx(exact.p, abs=0.01)


def test_the_same_ranking_is_no_difference_and_others_may_be_undefined():
    first, second, labels = two()
    for found in (
        delong_difference(first, np.exp(first), labels),
        metric_difference("ap", first, 3 * first, labels),
    ):
        assert found[:4] == (0.0, 0.0, 0.0, 1.0)
    perfect = [1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 4.0], [0, 0, 1, 1]
    found = delong_difference(*perfect)
    bound = delong(*perfect[::2]).low
    assert (found.value, found.low, found.high) == pytest.approx((0, bound - 1, 1 - bound))
    assert math.isnan(found.p)
    constant = delong_difference(first, np.zeros(len(labels)), labels)
    alone = delong(first, labels)
    assert constant[:3] == pytest.approx([end - 0.5 for end in alone[:3]]), "AUROC of equal scores is 1/2"
    assert "no example makes a difference" in metric_difference("ap", *perfect).how
    assert "one class" in delong_difference([1, 2], [2, 1], [1, 1]).how
    assert "one class" in metric_difference("ap", [1, 2], [2, 1], [1, 1]).how
    assert "not finite" in delong_difference(first, second * math.nan, labels).how


def test_runs_on_the_same_examples_are_paired_by_rows_and_sites():
    first, other = scored(10, 20), scored(10, 20, seed=1)
    second = dataclasses.replace(first, scores=other.scores)
    shuffled = second.take(np.random.default_rng(0).permutation(len(second)))
    for pair in (paired(first, second), paired(first, shuffled)):
        np.testing.assert_array_equal(pair.first, first.scores)
        np.testing.assert_array_equal(pair.second, second.scores)
        np.testing.assert_array_equal(pair.labels, first.labels)
    renamed = dataclasses.replace(second, names=("c", "a", "b"), sites=(second.sites + 1) % 3)
    np.testing.assert_array_equal(paired(first, renamed).second, second.scores)  # sites have names, not numbers


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s.take(np.arange(29)), "one has 30 examples, the other 29"),
        (lambda s: dataclasses.replace(s, rows=(*s.rows[:-1], "new")), "row 'r29' is in one of them only"),
        (lambda s: dataclasses.replace(s, rows=("r1", *s.rows[1:])), "row 'r0' is in one of them only"),
        (lambda s: dataclasses.replace(s, rows=("r3", *s.rows[1:])), "a row appears twice"),
        (lambda s: dataclasses.replace(s, labels=1 - s.labels), "labels differ"),
        (lambda s: dataclasses.replace(s, rows=(), labels=s.labels[::-1]), "labels differ"),
        (lambda s: dataclasses.replace(s, rows=(), sites=(s.sites + 1) % 3), "sites differ"),
        (lambda s: dataclasses.replace(s, names=("a", "b", "x")), "is in one of them only"),
    ],
)
def test_runs_on_other_examples_are_refused_in_one_line(change, why):
    first = scored(10, 20)
    with pytest.raises(UserError, match=why) as error:
        paired(first, change(first))
    assert str(error.value).startswith("the two runs were not scored on the same examples")


def test_a_row_that_appears_twice_is_noticed_in_either_run():
    first = dataclasses.replace(scored(10, 20), labels=np.repeat([1, 0], [10, 20]))  # so that labels do not tell
    twice = dataclasses.replace(first, rows=("r3", *first.rows[1:]))
    for one, two in ((first, twice), (twice, first)):
        with pytest.raises(UserError, match="a row appears twice"):
            paired(one, two)


def test_rows_are_enough_where_one_run_does_not_know_sites():
    first = scored(10, 20)
    without = Scored(first.scores[::-1], first.labels[::-1], rows=first.rows[::-1])
    np.testing.assert_array_equal(paired(first, without).second, first.scores)


def test_all_differences_of_two_runs():
    first = scored(40, 60, shift=2.0)
    second = dataclasses.replace(first, scores=first.scores + 2 * np.random.default_rng(0).normal(size=100))
    found = differences(first, second, fpr=0.2)
    assert list(found) == ["auroc", "pauc@0.2", "ap"]
    for difference in found.values():
        assert 0 < difference.low < difference.value < difference.high
        assert difference.p < 0.05


def test_models_that_differ_within_a_class_alone_have_no_interval():
    labels = [1, 1, 1, 0, 0, 0]
    one, two = [0.9, 0.8, 0.3, 0.5, 0.2, 0.1], [0.8, 0.9, 0.3, 0.5, 0.1, 0.2]
    found = delong_difference(one, two, labels)
    assert found.value == 0
    assert np.isnan([found.low, found.high, found.p]).all()
    assert found.how == "not defined: both models rank positives against negatives alike"
