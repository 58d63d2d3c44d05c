"""Two models on the same examples, against formulas written out and scikit-learn; examples that are not the same."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score

from fedxl.errors import UserError
from fedxl.evaluation.compare import (
    MOST_GROUPS,
    delong_difference,
    differences,
    metric_difference,
    over_seeds,
    paired,
    seed_intervals,
)
from fedxl.evaluation.delong import covariance, placements
from fedxl.evaluation.intervals import delong, intervals
from fedxl.evaluation.resampling import GENERATOR, jackknife
from fedxl.evaluation.scores import Scores
from tests.evaluation.sets import made, scored, written_out


def two(positives=12, negatives=20, tied=False):
    first, labels = made(positives, negatives, tied=tied)
    noise = np.random.default_rng(9).normal(size=len(labels))
    return first, first + (np.round(noise, 1) if tied else noise), labels


@pytest.mark.parametrize("tied", [False, True])
def test_p_is_one_less_the_level_whose_interval_ends_at_no_difference(tied):
    """And near that of the paper: chi-square with one degree."""
    first, second, labels = two(tied=tied)
    areas, spread = written_out([first, second], labels)
    contrast = np.array([1.0, -1.0])
    z = contrast @ areas / math.sqrt(contrast @ spread @ contrast)
    found = delong_difference(first, second, labels)
    assert found.value == pytest.approx(contrast @ areas, rel=1e-12)
    edge = delong_difference(first, second, labels, level=1 - found.p)
    assert min(abs(edge.low), abs(edge.high)) == pytest.approx(0, abs=1e-9)
    assert found.p == pytest.approx(stats.chi2.sf(z**2, 1), abs=0.03)


def test_p_of_an_auroc_difference_is_below_5_percent_exactly_if_the_interval_leaves_out_0():
    """Of 300 simulated pairs with 34 positives and 66 negatives."""
    labels, rng, outside = np.repeat([1, 0], [34, 66]), np.random.default_rng(0), 0
    for _ in range(300):
        shared, own = rng.normal(size=100), rng.normal(size=(2, 100))
        first, second = (math.sqrt(0.5) * (shared + own[k]) + shift * labels for k, shift in enumerate((1.5, 1.1)))
        found = delong_difference(first, second, labels)
        assert (found.p < 0.05) == (found.low > 0 or found.high < 0), found
        outside += found.p < 0.05
    assert 30 < outside < 270, "both verdicts are met"


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
    # V10 differ by (1/2, 0): variance 1/8; V01 differ by (0, 1/2): variance 1/8; each over two examples. Without what
    # the models share, it would be that of the first, 1/16 + 1/16, and that of the second, 0 + 1/4: a third is left.
    found, one, other = delong_difference(first, second, labels), delong(first, labels), delong(second, labels)
    assert found.value == 0.25
    down = math.hypot(one.value - one.low, other.high - other.value) / math.sqrt(3)
    up = math.hypot(one.high - one.value, other.value - other.low) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((0.25 - down, 0.25 + up), rel=1e-12)


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
        np.testing.assert_array_equal(pair[0].scores, first.scores)
        np.testing.assert_array_equal(pair[1].scores, second.scores)
        np.testing.assert_array_equal(pair[1].y, first.y)
    renamed = dataclasses.replace(second, sites=("c", "a", "b"), site=(second.site + 1) % 3)
    np.testing.assert_array_equal(paired(first, renamed)[1].scores, second.scores)  # sites have names, not numbers


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s.take(np.arange(29)), "one has 30 examples, the other 29"),
        (lambda s: dataclasses.replace(s, row=(*s.row[:-1], "new")), "row 'r29' is in one of them only"),
        (lambda s: dataclasses.replace(s, row=("r1", *s.row[1:])), "row 'r0' is in one of them only"),
        (lambda s: dataclasses.replace(s, row=("r3", *s.row[1:])), "a row appears twice"),
        (lambda s: dataclasses.replace(s, y=1 - s.y), "labels differ"),
        (lambda s: dataclasses.replace(s, row=(), y=s.y[::-1]), "labels differ"),
        (lambda s: dataclasses.replace(s, row=(), site=(s.site + 1) % 3), "sites differ"),
        (lambda s: dataclasses.replace(s, sites=("a", "b", "x")), "is in one of them only"),
    ],
)
def test_runs_on_other_examples_are_refused_in_one_line(change, why):
    first = scored(10, 20)
    with pytest.raises(UserError, match=why) as error:
        paired(first, change(first))
    assert str(error.value).startswith("the two runs were not scored on the same examples")


def test_a_row_that_appears_twice_is_noticed_in_either_run():
    first = dataclasses.replace(scored(10, 20), y=np.repeat([1, 0], [10, 20])[:, None])  # so that labels do not tell
    twice = dataclasses.replace(first, row=("r3", *first.row[1:]))
    for one, two in ((first, twice), (twice, first)):
        with pytest.raises(UserError, match="a row appears twice"):
            paired(one, two)


def test_rows_are_enough_where_one_run_does_not_know_sites():
    first = scored(10, 20)
    without = Scores(first.scores[::-1], first.y[::-1], row=first.row[::-1])
    np.testing.assert_array_equal(paired(first, without)[1].scores, first.scores)


def test_all_differences_of_two_runs():
    first = scored(40, 60, shift=2.0)
    second = dataclasses.replace(first, scores=first.scores + 2 * np.random.default_rng(0).normal(size=(100, 1)))
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


# Several seeds


def seeds(count, several=False):
    """Runs on the same examples that differ by noise of their own."""
    rng = np.random.default_rng(0)
    labels = (rng.random((60, 3 if several else 1)) < 0.4).astype(np.int64)
    shared, names = rng.normal(size=labels.shape) + 1.2 * labels, ("a", "b", "c") if several else ("",)
    return [Scores(shared + 0.5 * rng.normal(size=labels.shape), labels, names) for _ in range(count)]


def without_each(metric, runs):
    """The squared standard error of the mean over runs, by leaving one example out after another, and its freedom."""
    labels, parts, free = runs[0].flat[1], [], []
    for side in (1, 0):
        rest = [np.delete(np.arange(len(labels)), row) for row in np.flatnonzero(labels == side)]
        left = [np.mean([metric(labels[some], run.flat[0][some]) for run in runs]) for some in rest]
        parts.append((len(left) - 1) * np.var(left))
        free.append(len(left) - 1)
    return sum(parts), sum(parts) ** 2 / sum(part**2 / of for part, of in zip(parts, free, strict=True))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", ["auroc", *METRICS])
def test_seeds_that_agree_leave_the_variance_of_the_examples(name, several):
    one, other = seeds(2, several)
    alone, difference = over_seeds(name, [one], [], True), over_seeds(name, [one], [other], True)
    assert alone[1] > 0
    assert over_seeds(name, [one] * 4, [], True) == pytest.approx(alone, rel=1e-9)
    assert over_seeds(name, [one] * 4, [other] * 4, True) == pytest.approx(difference, rel=1e-9)
    if not several:
        metric = METRICS.get(name, roc_auc_score)
        variance, free = without_each(metric, [one])
        assert alone == pytest.approx((metric(one.y, one.scores), math.sqrt(variance), free), rel=1e-8)


def test_where_examples_make_no_difference_the_variance_is_that_of_the_seeds():
    """Of rankings that are perfect, upside down, and of equal scores: AUROC is 1, 0 or 1/2, whatever the examples."""
    labels = np.repeat([1, 0], [6, 14])
    runs = [Scores.of(sign * labels, labels) for sign in (1, 1, 0, -1)]
    values = [1, 1, 0.5, 0]
    error = math.sqrt(np.var(values, ddof=1) / 4)
    assert over_seeds("auroc", runs, [], True) == pytest.approx((np.mean(values), error, 3), rel=1e-12)
    apart = over_seeds("auroc", runs, [runs[2]] * 4, True)
    assert apart == pytest.approx((np.mean(values) - 0.5, error, 3), rel=1e-12)
    assert over_seeds("auroc", [runs[0]] * 3, [], True)[:2] == (1, 0)


@pytest.mark.parametrize("name", ["auroc", *METRICS])
def test_on_the_same_examples_the_variances_of_examples_and_of_seeds_are_added(name):
    runs, metric = seeds(3), METRICS.get(name, roc_auc_score)
    values = [metric(run.y, run.scores) for run in runs]
    examples, free = without_each(metric, runs)
    drawn = np.var(values, ddof=1) / 3
    total = examples + drawn
    wanted = np.mean(values), math.sqrt(total), total**2 / (examples**2 / free + drawn**2 / 2)
    assert over_seeds(name, runs, [], True) == pytest.approx(wanted, rel=1e-8)
    reach = stats.t.ppf(0.95, wanted[2]) * wanted[1]
    found = seed_intervals([name], runs, True, 0.9)[name]
    assert found[:3] == pytest.approx((wanted[0], wanted[0] - reach, min(1, wanted[0] + reach)), rel=1e-8)
    assert found.how == "3 seeds and jackknife, Student's t"


@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_on_examples_of_their_own_runs_vary_by_both_and_no_less_than_by_examples(noise):
    rng, runs = np.random.default_rng(1), []
    for run in seeds(1) * 3:
        chosen = np.arange(60) if noise == 0 else rng.permutation(60)[:50]
        moved = dataclasses.replace(run, scores=run.scores + noise * rng.normal() * run.y)
        runs.append(moved.take(chosen))
    values = [roc_auc_score(run.y, run.scores) for run in runs]
    between = np.var(values, ddof=1) / 3
    each = np.array([without_each(roc_auc_score, [run]) for run in runs])
    within, free = each[:, 0].mean() / 3, each[:, 1].sum()
    training = max(0, between - within)
    assert (training > 0) == (noise > 0), "either is met"
    freedom = (within + training) ** 2 / (within**2 / free + training**2 / 2)
    wanted = np.mean(values), math.sqrt(max(between, within)), freedom
    assert over_seeds("auroc", runs, [], False) == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize("several", [False, True])
def test_one_run_has_the_intervals_of_its_examples(several):
    (run,) = seeds(1, several)
    wanted = ["auroc", "pauc@0.3", "ap"]
    assert seed_intervals(wanted, [run], True) == intervals(wanted, run)


def test_seeds_that_all_rank_perfectly_are_not_certain():
    labels = np.repeat([1, 0], [6, 14])
    found = seed_intervals(["auroc"], [Scores.of(labels, labels)] * 3, True)["auroc"]
    assert found.value == 1
    assert np.isnan([found.low, found.high]).all()
    assert found.how == "not defined: no example makes a difference"


@pytest.mark.parametrize("same", [True, False])
def test_seeds_do_not_hide_that_a_class_has_one_example(same):
    rng, labels = np.random.default_rng(0), np.repeat([1, 0], [1, 20])
    runs = [Scores.of(rng.normal(size=21) + labels, labels) for _ in range(3)]
    assert math.isnan(seed_intervals(["auroc"], runs, same)["auroc"].low)
    found = differences(runs, runs[::-1], same=same)["auroc"]
    assert np.isnan([found.low, found.high, found.p]).all()


@pytest.mark.parametrize(("count", "several"), [(1, True), (2, True), (3, False)])
def test_the_same_ranking_is_no_difference_of_several_labels_and_seeds_either(count, several):
    firsts = seeds(count, several)
    same = [dataclasses.replace(run, scores=np.exp(run.scores)) for run in firsts]
    assert all(each[:4] == (0.0, 0.0, 0.0, 1.0) for each in differences(firsts, same).values())
    unknown = [dataclasses.replace(run, y=np.full_like(run.y, 0)) for run in (*firsts, *same)]
    assert all(math.isnan(each.p) for each in differences(unknown[:count], unknown[count:]).values())


def test_differences_of_seeds_are_of_pairs_on_the_same_examples():
    firsts, seconds = seeds(6)[:3], seeds(6)[3:]
    found = differences(firsts, seconds)
    assert list(found) == ["auroc", "pauc@0.3", "ap"]
    for name, each in found.items():
        value, error, free = over_seeds(name, firsts, seconds, True)
        assert each[:3] == pytest.approx((value, *stats.t.interval(0.95, free, value, error)), rel=1e-9)
        assert each.p == pytest.approx(2 * stats.t.sf(abs(value) / error, free), rel=1e-9)
    turned = differences(seconds, firsts)
    for name, each in found.items():
        assert turned[name][:4] == pytest.approx((-each.value, -each.high, -each.low, each.p), rel=1e-9)
    with pytest.raises(UserError, match="not scored on the same examples"):
        differences(firsts, [*seconds[:2], dataclasses.replace(seconds[2], y=1 - seconds[2].y)])
