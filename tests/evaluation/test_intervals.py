"""Intervals against DeLong's formulas written out, SciPy, scikit-learn, published figures and simulated truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, stats
from sklearn.metrics import average_precision_score, roc_auc_score

from fedxl import metrics
from fedxl.errors import UserError
from fedxl.evaluation.intervals import bootstrap, delong, freedom, one_metric, proportion
from fedxl.evaluation.placements import covariance, placements
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
    assert reference.pvalue == pytest.approx(2 * stats.t.sf(abs(w), freedom(placed)), rel=1e-8)


def test_the_interval_is_students_on_the_logit_scale():
    """Degrees of freedom from Brunner and Munzel's p, by SciPy: the t distribution that gives it."""
    scores, labels = made(6, 25, shift=0.5)
    (area,), ((variance,),) = written_out([scores], labels)
    reference = stats.brunnermunzel(scores[labels == 0], scores[labels == 1])
    free = optimize.brentq(lambda df: 2 * stats.t.sf(abs(reference.statistic), df) - reference.pvalue, 1, 1000)
    reach = stats.t.ppf(0.975, free) * math.sqrt(variance) / (area * (1 - area))
    wanted = [1 / (1 + math.exp(-(math.log(area / (1 - area)) + side * reach))) for side in (-1, 1)]
    assert delong(scores, labels)[1:3] == pytest.approx(wanted, rel=1e-8)


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
    for found in (delong([1, 1, 1, 1], [0, 1, 0, 1]), bootstrap("pauc@0.3", [1, 1, 1, 1], [0, 1, 0, 1])):
        assert found.value == 0.5
        assert math.isnan(found.low)
        assert found.how.startswith("not defined")


@pytest.mark.parametrize(("positives", "negatives"), [(8, 30), (30, 8), (8, 8), (8, 997)])
def test_a_perfect_ranking_has_a_bound_on_one_side(positives, negatives):
    labels = np.repeat([1, 0], [positives, negatives])
    scores = np.arange(len(labels))[::-1]
    wanted = stats.binomtest(8, 8).proportion_ci(0.95, method="exact").low  # of eight pairs, eight are right
    found = delong(scores, labels)
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(wanted, rel=1e-12)
    upside_down = delong(-scores, labels)
    assert (upside_down.low, upside_down.high) == (0.0, pytest.approx(1 - wanted, rel=1e-12))
    assert bootstrap("auroc", scores, labels)[:3] == found[:3]
    raw, scaled = bootstrap("pauc_raw@0.3", scores, labels), bootstrap("pauc@0.3", scores, labels)
    assert raw.value == raw.high == 0.3
    assert raw.low == pytest.approx(max(0, 0.3 - (1 - found.low)), rel=1e-12)
    assert scaled.value == scaled.high == 1.0
    assert scaled.low == pytest.approx(0.5 * (1 + (0.3 - (1 - found.low) - 0.045) / (0.3 - 0.045)), rel=1e-12)
    assert math.isnan(bootstrap("ap", scores, labels).low)


def test_the_bound_of_a_perfect_ranking_holds():
    """Where AUROC is at the bound, a perfect ranking is rarer than the bound says."""
    pairs = 5
    bound = delong(np.arange(10), np.repeat([0, 1], 5)).low
    shift = math.sqrt(2) * stats.norm.ppf(bound)
    rng = np.random.default_rng(0)
    high, low = rng.normal(shift, size=(20_000, pairs)), rng.normal(size=(20_000, pairs))
    assert 0 < (high.min(1) > low.max(1)).mean() < 0.025


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
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("ap", lambda labels, scores: average_precision_score(labels, scores)),
        ("pauc@0.3", lambda labels, scores: roc_auc_score(labels, scores, max_fpr=0.3)),
    ],
)
def test_bca_is_that_of_scipy_on_scikit_learns_metric(name, reference, tied):
    scores, labels = made(8, 14, tied=tied)

    def statistic(high, low):
        value = reference(np.repeat([1, 0], [len(high), len(low)]), np.concatenate([high, low]))
        return round(value, 12)  # draws that give the same value are ties for BCa

    wanted = stats.bootstrap(
        (scores[labels == 1], scores[labels == 0]), statistic, n_resamples=200, vectorized=False,
        method="BCa", **{GENERATOR: np.random.default_rng(7)},
    ).confidence_interval  # fmt: skip
    found = bootstrap(name, scores, labels, draws=200, seed=7)
    assert found.how == "BCa bootstrap, 200 draws"
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-10)


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


def test_delongs_intervals_cover():
    """95 % intervals of 1,000 simulated sets; benchmarks/coverage.py has all kinds and 2,000 sets."""
    rng, truth, labels = np.random.default_rng(0), 0.85, np.repeat([1, 0], [40, 60])
    shift = math.sqrt(2) * stats.norm.ppf(truth)
    found = [delong(rng.normal(size=100) + shift * labels, labels) for _ in range(1000)]
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
