"""Metrics of time to event against pairs written out, scikit-survival and lifelines; their intervals."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from fedxl import UserError, censored, metrics
from fedxl.evaluation import hazard, survival, survival_curves
from fedxl.evaluation.intervals import Interval
from fedxl.evaluation.scores import Scores, measure
from tests.evaluation.sets import PATIENTS, patients


def outlives(events, times):
    """[i, j]: i has the event while j is still at risk."""
    later = (times[None] > times[:, None]) | ((times[None] == times[:, None]) & (events[None] == 0))
    return later & (events[:, None] == 1)


def written_out(scores, events, times, weights):
    """The concordance and, for each example, its pairs as event and as the other, pair by pair."""
    met = weights[:, None] * outlives(events, times)
    right = (scores[:, None] > scores) + 0.5 * (scores[:, None] == scores)
    return met, met * right


def censoring_left(events, times, at):
    """G after a time, factor by factor; events of the same time are gone."""
    share = 1.0
    for moment in np.unique(times[times <= at]):
        at_risk = (times > moment).sum() + ((times == moment) & (events == 0)).sum()
        if at_risk:
            share *= 1 - ((times == moment) & (events == 0)).sum() / at_risk
    return share


def sksurv(events, times):
    """scikit-survival's metrics, and its form of these outcomes."""
    found = pytest.importorskip("sksurv.metrics", reason="needs scikit-survival")
    from sksurv.util import Surv

    return found, Surv.from_arrays(events > 0, times)


def accepted(events, times):
    """Whether somebody is left uncensored at every event. Else scikit-survival refuses; ours leaves the event out."""
    return all(censoring_left(events, times, at) > 0 for at in np.unique(times[events > 0])[-1:])


# The numbers


@pytest.mark.parametrize("case", PATIENTS, ids=str)
def test_pairs_are_those_that_are_written_out(case):
    scores, events, times = patients(*case)
    weights = np.random.default_rng(1).random(len(times)) * events
    met, won = written_out(scores, events, times, weights)
    found = censored.pairs(scores, events, times, weights)
    np.testing.assert_allclose(found.met_first, met.sum(1), atol=1e-10)
    np.testing.assert_allclose(found.met_last, met.sum(0), atol=1e-10)
    np.testing.assert_allclose(found.won_first, won.sum(1), atol=1e-10)
    np.testing.assert_allclose(found.won_last, won.sum(0), atol=1e-10)


@pytest.mark.parametrize("case", [case for case in PATIENTS if case[0] < 400], ids=str)
def test_the_censoring_curve_is_the_product_written_out(case):
    _, events, times = patients(*case)
    curve = censored.censoring_curve(events, times)
    at = np.append(times, [0.0, 1e9])
    np.testing.assert_allclose(curve.at(at), [censoring_left(events, times, each) for each in at], atol=1e-12)


@pytest.mark.parametrize("case", PATIENTS, ids=str)
def test_concordance_is_that_of_scikit_survival_and_lifelines(case):
    scores, events, times = patients(*case)
    theirs, outcome = sksurv(events, times)
    found = censored.harrell(scores, events, times)
    assert found == pytest.approx(theirs.concordance_index_censored(events > 0, times, scores)[0], abs=1e-10)
    if accepted(events, times):
        tau = float(np.quantile(times, 0.7)) + 0.5
        expected = theirs.concordance_index_ipcw(outcome, outcome, scores, tau)[0]
        assert censored.uno(scores, events, times, tau) == pytest.approx(expected, abs=1e-10)
        expected = theirs.concordance_index_ipcw(outcome, outcome, scores)[0]
        assert censored.uno(scores, events, times) == pytest.approx(expected, abs=1e-10)
    lifelines = pytest.importorskip("lifelines.utils", reason="needs lifelines")
    assert found == pytest.approx(lifelines.concordance_index(times, -scores, events), abs=1e-10)


@pytest.mark.parametrize("case", PATIENTS, ids=str)
def test_auc_and_brier_at_horizons_are_those_of_scikit_survival(case):
    scores, events, times = patients(*case)
    theirs, outcome = sksurv(events, times)
    grid = np.unique(np.quantile(times, [0.1, 0.25, 0.4, 0.5, 0.6]))
    grid = grid[(grid >= times[events > 0].min()) & (grid < times.max())]  # they refuse other horizons
    if not len(grid):
        return
    if accepted(events, times):
        expected, _ = theirs.cumulative_dynamic_auc(outcome, outcome, scores, grid)
        found = [censored.auc_at(scores, events, times, float(at)) for at in grid]
        np.testing.assert_allclose(found, expected, atol=1e-10)
    predicted = np.exp(-np.exp(scores)[:, None] * grid / 5)
    _, expected = theirs.brier_score(outcome, outcome, predicted, grid)
    columns = zip(predicted.T, grid, strict=True)
    found = [survival.brier_interval(column, events, times, float(at)).value for column, at in columns]
    np.testing.assert_allclose(found, expected, atol=1e-10)
    if len(grid) > 1:
        whole = survival.integrated_brier_interval(predicted, events, times, grid.tolist()).value
        assert whole == pytest.approx(theirs.integrated_brier_score(outcome, outcome, predicted, grid), abs=1e-10)


def test_metrics_of_time_by_their_names():
    scores, events, times = patients(60)
    each = metrics.resolve(["cindex", "uno", "uno@1.5", "auc_at@0.5", "auc_at"])
    assert [metric.name for metric in each] == ["cindex", "uno", "uno@1.5", "auc_at@0.5"], "a horizon has no default"
    found, _ = measure(each, Scores.of(scores, events, time=times))
    assert found["cindex"] == censored.harrell(scores, events, times)
    assert found["uno@1.5"] == censored.uno(scores, events, times, 1.5) != found["uno"]
    assert found["auc_at@0.5"] == censored.auc_at(scores, events, times, 0.5)
    for wrong in ("auc_at@0", "uno@-1", "auc_at@inf", "auc_at@nan"):
        with pytest.raises(UserError, match="must be a time above 0"):
            metrics.resolve([wrong])


def test_a_hundred_thousand_examples_need_no_matrix_of_pairs():
    """A matrix of 20,000 x 20,000 booleans alone would be 400 MB."""
    scores, events, times = patients(20_000, tied=True)
    tracemalloc.start()
    survival.interval("uno@4", scores, events, times)
    survival.difference("cindex", scores, -scores, events, times)
    survival.interval("auc_at@2", scores, events, times)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    blocks = [(times[each], scores[each]) for each in np.array_split(np.flatnonzero(events), 100)]
    won = met = 0.0
    for at, ranked in blocks:
        later = (times > at[:, None]) | ((times == at[:, None]) & (events == 0))
        met += later.sum()
        won += (later & (scores < ranked[:, None])).sum() + (later & (scores == ranked[:, None])).sum() / 2
    assert censored.harrell(scores, events, times) == pytest.approx(won / met, abs=1e-10)
    assert 0 < survival.interval("cindex", *patients(100_000)).low < 1


# Their intervals

ESTIMATES = {
    "harrell": lambda h, e, t: survival.harrell(h, e, t),
    "uno": lambda h, e, t: survival.uno(h, e, t),
    "uno to tau": lambda h, e, t: survival.uno(h, e, t, 1.2),
    "auc": lambda h, e, t: survival.auc_at(h, e, t, 0.6),
    "brier": lambda h, e, t: survival.brier(1 / (1 + np.exp(h)), e, t, 0.6),
    "integrated brier": lambda h, e, t: survival.integrated_brier(
        1 / (1 + np.exp(h[:, None] + [0.0, 0.2, 0.3])), e, t, np.array([0.2, 0.5, 0.8])
    ),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ESTIMATES)
def test_an_influence_is_the_derivative_by_an_examples_weight(name, tied):
    """By copies: of 300 of each example, one more of one. Copies have one time, so that they are not compared."""
    scores, events, times = patients(30, tied, 0.5, seed=1)
    times = times / 4 if tied else times
    found, copies = ESTIMATES[name](scores, events, times), 300
    assert found.influence.sum() == pytest.approx(0, abs=1e-10)
    assert (found.influence**2).sum() > 1e-3
    many = [np.tile(each, copies) for each in (scores, events, times)]
    whole = ESTIMATES[name](*many).value
    assert whole == pytest.approx(found.value, abs=1e-10)
    for one in range(30):
        more = [np.append(each, each[one]) for each in many]
        moved = (ESTIMATES[name](*more).value - whole) * copies
        assert moved == pytest.approx(found.influence[one], abs=2e-3 * np.abs(found.influence).max())


@pytest.mark.parametrize("name", ["cindex", "uno@1.5", "auc_at@0.5"])
@pytest.mark.parametrize("seed", range(3))
def test_an_interval_of_many_examples_is_two_standard_errors_of_leaving_each_out(name, seed):
    scores, events, times = patients(400, seed=seed)
    found = survival.interval(name, scores, events, times)
    each = np.arange(400)
    left = [
        survival.interval(name, scores[rest], events[rest], times[rest]).value
        for rest in (each[each != one] for one in range(400))
    ]
    error = math.sqrt(399 / 400 * ((np.array(left) - np.mean(left)) ** 2).sum())
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert 0 < found.low < found.value < found.high < 1


def test_unos_c_of_all_events_has_an_interval_where_a_fifth_are_uncensored_at_the_last():
    """Otherwise its intervals miss the truth (docs/results/coverage.md); with a time they cover it."""
    scores, events, times = patients(200, share=0.8)
    found = survival.interval("uno", scores, events, times)
    assert found.value == censored.uno(scores, events, times)
    assert math.isnan(found.low)
    assert "give a time, as in uno@1000" in found.how
    assert math.isnan(survival.difference("uno", scores, -scores, events, times).low)
    assert survival.interval("uno@0.3", scores, events, times).low > 0
    followed = np.minimum(times, 1.0), np.where(times <= 1, np.ones(200), 0.0)  # all censoring is at the end
    everybody = survival.interval("uno", scores, followed[1], followed[0])
    assert everybody.low < everybody.value < everybody.high


def test_a_difference_of_many_examples_is_two_standard_errors_of_leaving_each_out():
    scores, events, times = patients(300)
    both = scores, scores + np.random.default_rng(1).normal(size=300)
    found, each = survival.difference("cindex", *both, events, times), np.arange(300)
    left = []
    for rest in (each[each != one] for one in each):
        first, second = (censored.harrell(one[rest], events[rest], times[rest]) for one in both)
        left.append(first - second)
    error = math.sqrt(299 / 300 * ((np.array(left) - np.mean(left)) ** 2).sum())
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.05)


def test_a_perfect_ranking_has_an_interval_that_ends_at_one():
    times, events = np.arange(1.0, 41.0), np.tile([1, 0], 20)
    for name in ("cindex", "uno@30", "auc_at@20"):
        found = survival.interval(name, -times, events, times)
        assert (found.value, found.high) == pytest.approx((1, 1), abs=1e-12)
        assert 0.6 < found.low < 0.99
        turned = survival.interval(name, times, events, times)
        assert (turned.value, turned.low, turned.high) == pytest.approx((0, 0, 1 - found.low), abs=1e-12)


def test_what_is_not_defined_says_why():
    scores, events, times = patients(10)

    def why(*case: object) -> str:
        found = survival.interval(*case)
        assert isinstance(found, Interval)
        assert math.isnan(found.low)
        assert math.isnan(found.high)
        return found.how

    assert why("cindex", scores, 0 * events, times) == "not defined: no two examples can be compared"
    one = np.arange(10) == np.argmin(times)
    assert why("cindex", scores, one, times) == "not defined: there are too few examples"
    assert why("cindex", [2, 1], [1, 1], [1, 2]) == "not defined: there are too few examples"
    assert why("cindex", scores * math.nan, events, times) == "not defined: scores are not finite"
    assert why("cindex", 0 * scores, events, times) == "not defined: no example makes a difference"
    assert why("auc_at@99", scores, events, times) == "not defined: no two examples can be compared"
    found = survival.brier_interval(np.full(10, 0.5), events, times, float(times.max()))
    assert math.isnan(found.value)
    assert found.how.startswith("not defined: nobody was seen beyond")


@pytest.mark.parametrize("name", ["cindex", "uno@1.5", "auc_at@0.5"])
def test_a_difference_and_its_p_are_of_one_method(name):
    scores, events, times = patients(200)
    rng = np.random.default_rng(3)
    for noise in (0.3, 1.0, 3.0):
        other = scores + noise * rng.normal(size=200)
        found = survival.difference(name, scores, other, events, times)
        each = [survival.interval(name, one, events, times).value for one in (scores, other)]
        assert found.value == pytest.approx(each[0] - each[1], abs=1e-12)
        assert (found.p < 0.05) == (not found.low <= 0 <= found.high)
        at_p = survival.difference(name, scores, other, events, times, 1 - found.p)
        assert min(abs(at_p.low), abs(at_p.high)) < 1e-6, "this interval ends at 0"
        turned = survival.difference(name, other, scores, events, times)
        np.testing.assert_allclose(turned[:4], (-found.value, -found.high, -found.low, found.p), atol=1e-7)
    assert survival.difference(name, scores, np.exp(scores), events, times)[:4] == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda h, e, t: survival.interval("auroc", h, e, t),
            "'auroc' is no metric of time to event; those are cindex",
        ),
        (lambda h, e, t: survival.interval("auc_at", h, e, t), "'auc_at' needs a limit, as in 'auc_at@365'"),
        (
            lambda h, e, t: survival.interval("cindex", h[1:], e, t),
            "must be three lists of one length, not of shapes",
        ),
        (lambda h, e, t: survival.interval("cindex", h, 2 * e, t), "events must be 0 or 1"),
        (lambda h, e, t: survival.interval("cindex", h, e, -t), "times must be finite and from 0 on"),
        (lambda h, e, t: survival.brier_interval(h + 9, e, t, 1), "probabilities to survive must lie in [0, 1]"),
        (
            lambda h, e, t: survival.brier_interval(np.ones((10, 2)), e, t, 1),
            "one probability to survive the horizon",
        ),
        (lambda h, e, t: survival.integrated_brier_interval(0 * h, e, t, [2, 1]), "horizons must be at least two"),
        (lambda h, e, t: survival.integrated_brier_interval(0 * h, e, t, [1, 2]), "(10, 2), not (10,)"),
        (lambda h, e, t: survival_curves.risk_edges(h, 1), "groups must be 2 to 100, not 1"),
        (lambda h, e, t: hazard.hazard_sums(h, e, t, [1e9]), "before the first time of the grid"),
        (lambda h, e, t: hazard.hazard_sums(h, e, t, [2.0, 1.0]), "the times of a grid must ascend"),
        (lambda h, e, t: hazard.hazard_sums(h + 999, e, t, [0.0]), "choose a centre near the highest"),
        (
            lambda h, e, t: hazard.Baseline.of(hazard.hazard_sums(h, e, t, [0.0], 999)),
            "choose a centre nearer to the scores",
        ),
    ],
)
def test_mistakes_are_one_line(call, line):
    with pytest.raises(UserError) as error:
        call(*patients(10))
    assert line in str(error.value)
    assert "\n" not in str(error.value)
