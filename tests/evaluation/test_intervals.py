"""Intervals against DeLong's formulas written out, SciPy, scikit-learn, published figures and simulated truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, stats
from sklearn.metrics import roc_auc_score

from fedxl import metrics
from fedxl.errors import UserError
from fedxl.evaluation.delong import covariance, placements, satterthwaite
from fedxl.evaluation.intervals import bootstrap, delong, interval, one_metric, proportion
from fedxl.evaluation.resampling import CURVES, GENERATOR, MOST_FOR_BCA, measured
from tests.evaluation.sets import made, written_out

# Ratings of 51 abnormal and 58 normal CT images: J. Hanley, B. McNeil, Radiology 143, 1982, table I.
ABNORMAL, NORMAL = (3, 2, 2, 11, 33), (33, 6, 6, 11, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_the_covariance_is_that_of_the_paper(tied):
    first, labels = made(13, 21, tied=tied)
    second = first + made(13, 21, seed=1, tied=tied)[0]
    areas, wanted = written_out([first, second], labels)
    found = placements(first, labels), placements(second, labels)
    np.testing.assert_allclose(covariance(*found), wanted, rtol=1e-12)
    np.testing.assert_allclose([each.auroc for each in found], areas, rtol=1e-12)
    assert found[0].auroc == pytest.approx(roc_auc_score(labels, first), rel=1e-12)


def test_published_figures_of_hanley_and_mcneils_images():
    """AUROC 0.893 by the paper; standard error 0.0307, interval 0.83295 to 0.95339 by Stata's manual (roctab)."""
    ratings = np.arange(1, 6)
    scores = np.concatenate([np.repeat(ratings, ABNORMAL), np.repeat(ratings, NORMAL)])
    labels = np.repeat([1, 0], [sum(ABNORMAL), sum(NORMAL)])
    placed = placements(scores, labels)
    error = math.sqrt(covariance(placed)[0, 0])
    assert round(placed.auroc, 4) == 0.8932
    assert round(error, 4) == 0.0307
    ends = [round(placed.auroc + side * stats.norm.ppf(0.975) * error, 5) for side in (-1, 1)]
    assert ends == [0.83295, 0.95339], "the plain interval"
    found = delong(scores, labels)
    assert found.low < 0.83295 < found.high < 0.95339, "the logit scale leans away from 1"


@pytest.mark.parametrize("tied", [False, True])
def test_variance_and_degrees_of_freedom_are_brunner_and_munzels(tied):
    scores, labels = made(9, 25, tied=tied, shift=0.4)
    placed = placements(scores, labels)
    reference = stats.brunnermunzel(scores[labels == 0], scores[labels == 1])
    w = (placed.auroc - 0.5) / math.sqrt(covariance(placed)[0, 0])
    assert abs(reference.statistic) == pytest.approx(abs(w), rel=1e-10)
    parts = [side.var(ddof=1) / len(side) for side in placed]
    free = satterthwaite(parts, [len(side) - 1 for side in placed])
    assert reference.pvalue == pytest.approx(2 * stats.t.sf(abs(w), free), rel=1e-8)


def lower_end(scores, labels, level):
    """Pair by pair, and by search instead of a formula: the least t with |A - t| <= reach sqrt(t (1 - t) / N)."""
    high, low = scores[labels == 1], scores[labels == 0]
    pairs = np.array([[1.0 if x > y else 0.5 if x == y else 0.0 for y in low] for x in high])
    area, parts, sizes = pairs.mean(), [], pairs.shape
    for each in (pairs.mean(1), pairs.mean(0)):
        wrong = 1 - each
        errors = wrong.sum() ** 2 / (wrong**2).sum()
        parts.append((max(0, errors - 1), each.var(ddof=1) / (area * (1 - area)), len(each)))

    def beyond(tested):
        """Hanley and McNeil's model, whose probabilities are of two positives above a negative and the other way."""
        q1, q2 = tested / (2 - tested), 2 * tested**2 / (1 + tested)
        model = (q1 + q2 - 2 * tested**2) / 2 / (tested * (1 - tested))
        each = [(count * r + model) / (count + 1) / size for count, r, size in parts]
        free = sum(each) ** 2 / sum(part**2 / size for part, size in zip(each, sizes, strict=True))
        reach = stats.t.ppf((1 + level) / 2, free / min(1, 2 * area))
        return (area - tested) ** 2 - reach**2 * tested * (1 - tested) * sum(each)

    return optimize.brentq(beyond, 1e-9, area, xtol=1e-15)


@pytest.mark.parametrize("shift", [-0.6, 0.5, 2.0])
@pytest.mark.parametrize("tied", [False, True])
def test_the_interval_is_wilsons_with_delongs_variance(tied, shift):
    scores, labels = made(6, 25, shift=shift, tied=tied)
    found = delong(scores, labels, 0.9)
    assert found.how == "DeLong, Wilson's form"
    wanted = lower_end(scores, labels, 0.9), 1 - lower_end(-scores, labels, 0.9)
    assert (found.low, found.high) == pytest.approx(wanted, rel=1e-9)


def test_the_interval_does_not_depend_on_which_class_is_called_positive():
    scores, labels = made(7, 30, tied=True)
    low, high = delong(scores, labels)[1:3]
    assert delong(-scores, 1 - labels)[1:3] == pytest.approx((low, high), rel=1e-12)
    assert delong(-scores, labels)[1:3] == pytest.approx((1 - high, 1 - low), rel=1e-12)


def test_with_many_examples_the_interval_is_delongs():
    """To 1 % of its width, with 20,000 examples of each class."""
    scores, labels = made(20_000, 20_000)
    placed = placements(scores, labels)
    reach = stats.norm.ppf(0.975) * math.sqrt(covariance(placed)[0, 0])
    found = delong(scores, labels)
    assert (found.low, found.high) == pytest.approx((placed.auroc - reach, placed.auroc + reach), abs=0.02 * reach)


def test_examples_that_are_all_right_or_all_wrong_are_trials():
    """90 of 100 positives are above all negatives, and 10 below: Wilson's interval of 90 of 100, to 0.01."""
    labels = np.repeat([1, 0], [100, 2000])
    scores = np.concatenate([np.repeat([1.0, -1.0], [90, 10]), np.zeros(2000)])
    assert delong(scores, labels)[:3] == pytest.approx(proportion(90, 100)[:3], abs=0.01)


@pytest.mark.parametrize("wrong", [4, 5, 20])
def test_the_more_pairs_are_wrong_the_lower_are_both_ends(wrong):
    """One negative moves up, past one positive after another."""
    labels = np.repeat([1, 0], [25, 25])
    ends = []
    for count in (wrong, wrong + 1):
        scores = np.concatenate([np.arange(25.0), np.full(24, -1.0), [count - 0.5]])
        ends.append(delong(scores, labels)[1:3])
    assert 0 < ends[1][0] < ends[0][0] < ends[1][1] <= ends[0][1] < 1


def test_a_higher_level_is_wider_and_scales_do_not_matter():
    scores, labels = made(20, 30)
    narrow, wide = delong(scores, labels, 0.9), delong(np.exp(scores) * 1e-9, labels, 0.99)
    assert wide.value == narrow.value
    assert 0 < wide.low < narrow.low < narrow.value < narrow.high < wide.high < 1


@pytest.mark.parametrize("metric", ["auroc", "pauc@0.3", "ap"])
@pytest.mark.parametrize(
    ("scores", "labels", "why"),
    [
        ([0.1, 0.2, 0.3], [1, 1, 1], "one class"),
        ([0.1, 0.2, 0.3], [0, 0, 0], "one class"),
        ([], [], "one class"),
        ([0.1, 0.2, 0.3], [0, 0, 1], "a class has one example"),
        ([0.1, math.nan, 0.3, 0.4], [0, 0, 1, 1], "not finite"),
    ],
)
def test_what_has_no_interval_says_why(metric, scores, labels, why):
    for found in (delong(scores, labels), bootstrap(metric, scores, labels)):
        assert math.isnan(found.low)
        assert math.isnan(found.high)
        assert found.how.startswith("not defined")
        assert why in found.how


def test_constant_scores_have_no_interval():
    for name in ("auroc", "pauc@0.3", "ap"):
        found = interval(name, [1, 1, 1, 1], [0, 1, 0, 1])
        assert found.value == 0.5
        assert math.isnan(found.low)
        assert found.how.startswith("not defined")


@pytest.mark.parametrize(("positives", "negatives"), [(8, 30), (30, 8), (8, 8), (8, 997), (2, 2)])
def test_a_perfect_ranking_has_an_interval_on_one_side(positives, negatives):
    """(1 - t)^2 = z^2 t (1 - t) r(t) (1 / m + 1 / n) with the model's r, divided by 1 - t."""
    labels = np.repeat([1, 0], [positives, negatives])
    scores = np.arange(len(labels))[::-1]
    free = (1 / positives + 1 / negatives) ** 2 / (1 / positives**3 + 1 / negatives**3)
    over = stats.t.ppf(0.975, free) ** 2 * (1 / positives + 1 / negatives)
    wanted = optimize.brentq(lambda t: 1 - t - over * t * (1 + 2 * t * (1 - t)) / (4 + 2 * t * (1 - t)), 0, 1)
    found = delong(scores, labels)
    assert found.how == "Wilson's form, a model's variance: all pairs agree"
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(wanted, rel=1e-9)
    upside_down = delong(-scores, labels)
    assert (upside_down.low, upside_down.high) == (0.0, pytest.approx(1 - wanted, rel=1e-9))
    assert interval("auroc", scores, labels) == found


@pytest.mark.parametrize("negatives", [2, 5, 25, 190])
@pytest.mark.parametrize("positives", [2, 5, 10, 25])
def test_a_wrong_pair_never_raises_the_lower_end(positives, negatives):
    """From a perfect ranking over a tie to one wrong pair. With the disjoint pairs of before it rose by 0.08."""
    labels = np.repeat([1, 0], [positives, negatives])
    perfect = np.arange(len(labels), 0.0, -1)
    tied, wrong = perfect.copy(), perfect.copy()
    tied[positives] = perfect[positives - 1]
    wrong[[positives - 1, positives]] = perfect[[positives, positives - 1]]
    lows = [delong(scores, labels).low for scores in (wrong, tied, perfect)]
    assert 0 < lows[0] < lows[1] < lows[2] < 1


@pytest.mark.parametrize(("positives", "negatives"), [(5, 5), (10, 190)])
def test_a_perfect_ranking_is_rare_where_auroc_is_at_its_lower_end(positives, negatives):
    """Rarer than 2.5 % for normal scores, than 6 % for positives of which some score like negatives."""
    low = delong(np.arange(positives + negatives), np.repeat([0, 1], [negatives, positives])).low
    rng = np.random.default_rng(0)
    highest = rng.normal(size=(20_000, negatives)).max(1)
    high = rng.normal(math.sqrt(2) * stats.norm.ppf(low), size=(20_000, positives))
    hidden = rng.normal(size=high.shape) + 9 * (rng.random(high.shape) > 2 * (1 - low))
    for positive, most in ((high, 0.025), (hidden, 0.06)):
        assert (positive.min(1) > highest).mean() < most


@pytest.mark.parametrize("hits", [0, 3, 10])
def test_a_proportions_interval_is_wilsons(hits):
    n, z, share = 10, stats.norm.ppf(0.975), hits / 10
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    found = proportion(hits, n)
    assert found.low == pytest.approx(centre - reach, abs=1e-12)
    assert found.high == pytest.approx(centre + reach, abs=1e-12)
    assert math.isnan(proportion(0, 0).value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["auroc", "pauc@0.3", "pauc@1", "pauc_raw@0.17", "ap"])
def test_many_draws_at_once_are_the_metric_of_each(name, tied):
    scores, labels = made(15, 40, tied=tied)
    named = one_metric(name)
    assert named.metric.compute in CURVES
    rng, total = np.random.default_rng(0), len(labels)
    weights = np.stack([rng.multinomial(total, np.full(total, 1 / total)) for _ in range(20)]).astype(np.float64)
    found = measured(named, scores, labels)(weights[:, labels == 1], weights[:, labels == 0])
    for value, row in zip(found, weights, strict=True):
        chosen = np.repeat(np.arange(total), row.astype(int))
        assert value == pytest.approx(named.value(scores[chosen], labels[chosen]), rel=1e-12)


def test_every_metric_of_the_table_is_computed_for_many_draws_at_once():
    assert {metric.compute for metric in metrics.METRICS.values() if metric.compute} == set(CURVES)


@pytest.mark.parametrize("tied", [False, True])
def test_bca_is_that_of_scipy_on_scikit_learns_metric(tied):
    scores, labels = made(8, 14, tied=tied)

    def statistic(high, low):
        value = roc_auc_score(np.repeat([1, 0], [len(high), len(low)]), np.concatenate([high, low]), max_fpr=0.3)
        return round(value, 12)  # draws that give the same value are ties for BCa

    wanted = stats.bootstrap(
        (scores[labels == 1], scores[labels == 0]), statistic, n_resamples=200, vectorized=False,
        method="BCa", **{GENERATOR: np.random.default_rng(7)},
    ).confidence_interval  # fmt: skip
    found = bootstrap("pauc@0.3", scores, labels, draws=200, seed=7)
    assert found.how == "BCa bootstrap, 200 draws"
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-10)


def test_the_estimate_for_intervals_of_average_precision_is_less_biased():
    """20 positives of 100, whose average precision is 0.3740 in endless data, by quadrature of the binormal curve."""
    found, named = {True: [], False: []}, one_metric("ap")
    for seed in range(400):
        scores, labels = made(20, 80, seed=seed, shift=math.sqrt(2) * stats.norm.ppf(0.7))
        for corrected, values in found.items():
            values.append(measured(named, scores, labels, corrected=corrected)(np.ones((1, 20)), np.ones((1, 80)))[0])
    bias = {corrected: np.mean(values) - 0.3740 for corrected, values in found.items()}
    assert 0 < bias[True] < 0.7 * bias[False]


def test_a_users_own_metric_is_taken():
    scores, labels = made(10, 15)

    def gap(scores, labels):
        return scores[labels == 1].mean() - scores[labels == 0].mean()

    found = bootstrap(gap, scores, labels, draws=300)
    assert found.value == pytest.approx(gap(scores, labels))
    assert found.low < found.value < found.high
    error = math.sqrt(sum(scores[labels == side].var(ddof=1) / (labels == side).sum() for side in (0, 1)))
    assert (found.high - found.low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.2)


def test_draws_are_repeatable_and_follow_the_seed():
    scores, labels = made(20, 30)
    one, two, other = (bootstrap("ap", scores, labels, draws=200, seed=seed) for seed in (1, 1, 2))
    assert one == two
    assert one != other


def test_where_bca_is_not_defined_percentiles_stand_in_and_say_so():
    """Every draw has fewer distinct scores than the data, so that BCa's correction is infinite."""
    scores, labels = made(10, 10)

    def distinct(scores, labels):
        return len(np.unique(scores))

    found = bootstrap(distinct, scores, labels, draws=100)
    assert found.how == "percentile bootstrap, 100 draws (BCa is not defined)"
    assert found.low <= found.high < found.value


def test_many_examples_get_percentiles():
    scores, labels = made(1000, MOST_FOR_BCA - 999)
    found = bootstrap("auroc", scores, labels, draws=100)
    assert found.how == "percentile bootstrap, 100 draws"
    exact = delong(scores, labels)
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=0.006)


@pytest.mark.parametrize(("positives", "negatives", "truth"), [(40, 60, 0.85), (10, 190, 0.9), (50, 450, 0.99)])
def test_delongs_intervals_cover(positives, negatives, truth):
    """95 % intervals of 1,000 simulated sets; on the logit scale the last two cells cover 90 to 91 %.

    studies/coverage.py has all kinds and 2,000 sets.
    """
    rng, labels = np.random.default_rng(0), np.repeat([1, 0], [positives, negatives])
    shift = math.sqrt(2) * stats.norm.ppf(truth)
    found = [delong(rng.normal(size=len(labels)) + shift * labels, labels) for _ in range(1000)]
    assert 0.93 <= np.mean([each.low <= truth <= each.high for each in found]) <= 0.97


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: delong([1, 2], [0, 1, 1]), r"not of shapes \(2,\) and \(3,\)"),
        (lambda: delong([[1], [2]], [[0], [1]]), "two lists of one length"),
        (lambda: delong([1, 2], [0, 2]), "labels must be 0 or 1"),
        (lambda: delong([1, 2], [0, 1], 95), "level must lie between 0 and 1"),
        (lambda: bootstrap("pauc", [1, 2], [0, 1]), "needs a limit"),
        (lambda: bootstrap("aurok", [1, 2], [0, 1]), "did you mean 'auroc'"),
        (lambda: bootstrap("ap", *made(5, 5), draws=1), "draws must be at least 100"),
    ],
)
def test_mistakes_are_one_line(call, message):
    with pytest.raises(UserError, match=message):
        call()
