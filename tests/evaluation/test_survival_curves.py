"""Curves of survival, calibration and the baseline hazard against lifelines; sums of sites."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import beta

from fedxl import UserError
from fedxl.evaluation import hazard, survival_curves
from tests.evaluation.sets import PATIENTS, patients

# lifelines calls pandas in ways that pandas 3 warns of.
old_pandas = pytest.mark.filterwarnings("ignore")


@old_pandas
@pytest.mark.parametrize("case", PATIENTS, ids=str)
def test_kaplan_meier_and_greenwood_are_lifelines(case):
    _, events, times = patients(*case)
    lifelines = pytest.importorskip("lifelines", reason="needs lifelines")
    fitter = lifelines.KaplanMeierFitter().fit(times, events)
    found = survival_curves.kaplan_meier(events, times)
    table = fitter.event_table.loc[found.times]
    np.testing.assert_array_equal(found.at_risk, table["at_risk"])
    np.testing.assert_array_equal(found.events, table["observed"])
    np.testing.assert_allclose(found.survival, fitter.survival_function_.loc[found.times].iloc[:, 0], atol=1e-10)
    inside = (found.survival > 0) & (found.survival < 1)
    ends = fitter.confidence_interval_.loc[found.times].to_numpy()
    np.testing.assert_allclose(np.stack([found.low, found.high], 1)[inside], ends[inside], atol=1e-10)
    ticks = np.array([0.0, *np.quantile(times, [0.2, 0.5, 0.9]), 1e9])
    np.testing.assert_array_equal(found.numbers_at_risk(ticks), [(times >= tick).sum() for tick in ticks])


def test_ends_where_greenwood_says_nothing():
    """All 20 survive, or none: Clopper and Pearson's ends of a share of 1, or 0."""
    times = np.arange(1.0, 21.0)
    none = survival_curves.kaplan_meier(0 * times, times)
    np.testing.assert_allclose(none.low, beta.ppf(0.025, none.at_risk, 1), atol=1e-12)
    assert (none.high == 1).all()
    assert [float(each) for each in none.at(0.5)] == [1, pytest.approx(none.low[0]), 1]
    every = survival_curves.kaplan_meier(np.ones(20), np.ones(20))
    assert [float(each) for each in every.at(3.0)] == [0, 0, pytest.approx(beta.ppf(0.975, 1, 20))]
    lasting = survival_curves.kaplan_meier(np.ones(20), times)
    assert lasting.survival[-1] == lasting.low[-1] == 0
    assert lasting.high[-1] == lasting.high[-2] < 1, "a curve does not rise"
    assert np.isnan(none.at(99.0)).all(), "nobody was seen so long"


def test_groups_by_risk():
    scores, events, times = patients(300, tied=True)
    edges = survival_curves.risk_edges(scores)
    found = survival_curves.by_risk(scores, events, times, edges)
    which = np.searchsorted(edges, scores)
    for group, curve in enumerate(found):
        assert curve.at_risk[0] == (which == group).sum()
        expected = survival_curves.kaplan_meier(events[which == group], times[which == group])
        np.testing.assert_array_equal(curve.survival, expected.survival)
    shares = [float(curve.at(4.0)[0]) for curve in found]
    assert shares == sorted(shares, reverse=True), "the lowest risk comes first"
    assert survival_curves.by_risk(scores, events, times, [99.0])[1] is None


@old_pandas
def test_calibration_is_lifelines_curve_of_each_group():
    scores, events, times = patients(400, share=0.5)
    lifelines = pytest.importorskip("lifelines", reason="needs lifelines")
    predicted = np.exp(-np.exp(scores) / 3)
    found = survival_curves.calibration(predicted, events, times, 0.5, 4)
    order = np.argsort(predicted)
    for group, chosen in enumerate(np.split(order, 4)):
        curve = lifelines.KaplanMeierFitter().fit(times[chosen], events[chosen])
        assert found.counts[group] == 100
        assert found.predicted[group] == pytest.approx(predicted[chosen].mean(), abs=1e-12)
        assert found.observed[group] == pytest.approx(curve.predict(0.5), abs=1e-10)
        low, high = curve.confidence_interval_.loc[:0.5].iloc[-1]
        assert (found.low[group], found.high[group]) == pytest.approx((low, high), abs=1e-10)
    assert found.error > 0
    unseen = survival_curves.calibration(predicted, 0 * events, times, 1e9)
    assert not len(unseen.counts), "nobody was seen so long"


@old_pandas
@pytest.mark.parametrize("tied", [False, True])
def test_the_baseline_of_sites_is_lifelines_on_all_data(tied):
    lifelines = pytest.importorskip("lifelines", reason="needs lifelines")
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    scores, events, times = patients(300, tied)
    frame = pandas.DataFrame({"x": scores, "time": times, "event": events})
    model = lifelines.CoxPHFitter().fit(frame, "time", "event")
    h = model.predict_log_partial_hazard(frame).to_numpy()
    grid = np.unique(times[events > 0])
    sites = np.array_split(np.random.default_rng(0).permutation(300), 3)
    parts = [hazard.hazard_sums(h[one], events[one], times[one], grid, 2.0) for one in sites]
    baseline = hazard.Baseline.of(hazard.pooled(parts))
    horizons = grid[:: len(grid) // 4].tolist()  # between these lifelines draws straight lines
    cumulative = model.baseline_cumulative_hazard_.iloc[:, 0]
    expected = [cumulative.loc[:at].iloc[-1] for at in horizons]
    np.testing.assert_allclose(baseline.at(horizons) * math.exp(-2.0), expected, rtol=1e-10)
    expected = model.predict_survival_function(frame, horizons).to_numpy().T
    np.testing.assert_allclose(baseline.survival(h, horizons), expected, atol=1e-10)
    with pytest.raises(UserError, match="only if their grid and centre are the same"):
        hazard.pooled([parts[0], hazard.hazard_sums(h, events, times, grid, 1.0)])


def test_a_coarse_grid_comes_near_the_exact_hazard():
    """50 times for 4,000 patients: spread over an interval, its events are where they belong on average."""
    scores, events, times = patients(4000)
    horizons = np.quantile(times, np.linspace(0.05, 0.9, 30)).tolist()
    exact = hazard.hazard_sums(scores, events, times, np.unique(times))
    expected = hazard.Baseline.of(exact).survival(np.zeros(1), horizons)
    grid = np.append(0.0, np.quantile(times, np.linspace(0.02, 0.98, 49)))
    sums = hazard.hazard_sums(scores, events, times, grid)
    each = [hazard.Baseline.of(sums, linear=linear) for linear in (True, False)]
    apart = [np.abs(one.survival(np.zeros(1), horizons) - expected).max() for one in each]
    assert apart[0] < 0.005 < apart[1]
    with pytest.raises(UserError, match="beyond"):
        each[0].survival(np.zeros(1), [1e9])


def test_extreme_scores_survive_or_do_not():
    found = hazard.Baseline(np.array([1.0]), np.array([0.5]))
    assert found.survival([-1e5, 0.0, 1e5], [0.5, 2.0]).tolist() == [[1, 1], [1, math.exp(-0.5)], [1, 0]]
