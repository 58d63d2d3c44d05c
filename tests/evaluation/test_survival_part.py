"""An assessment of times: chosen on validation data, measured on test data; against scikit-survival and lifelines."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from fedxl.errors import UserError
from fedxl.evaluation import survival, survival_curves
from fedxl.evaluation.assess import assess
from fedxl.evaluation.compare import differences, paired
from fedxl.evaluation.decision import Survival
from fedxl.evaluation.intervals import reported
from fedxl.evaluation.scores import Scores
from fedxl.evaluation.survival_part import SurvivalPart, metrics_at, tau
from tests.evaluation.sets import patients


def timed(size: int = 300, seed: int = 0, **options: float) -> Scores:
    """Rounded times, as days are; three sites."""
    scores, events, times = patients(size, seed=seed, **options)
    site = np.arange(size) % 3
    return Scores.of(scores, events, time=np.ceil(200 * times), site=site, sites=("a", "b", "c"))


VALIDATION, TEST = timed(200, 1), timed(300, 2)
BOTH = {"validation": VALIDATION, "test": TEST}


def breslow(held: Scores, scores: np.ndarray, at: float) -> np.ndarray:
    """Survival up to a time, written out: events over sums of exp(score) at risk."""
    (h, events), times = held.flat, held.time
    hazard = sum(1 / np.exp(h[times >= time]).sum() for time in times[(events > 0) & (times <= at)])
    return np.exp(-hazard * np.exp(scores))


def test_every_metric_is_that_of_scikit_survival_at_what_validation_data_chose():
    found = assess(BOTH)
    metrics, util = (
        pytest.importorskip(f"sksurv.{name}", reason="needs scikit-survival") for name in ("metrics", "util")
    )
    (scores, events), times = TEST.flat, TEST.time
    outcome = util.Surv.from_arrays(events > 0, times)
    happened = VALIDATION.time[VALIDATION.y[:, 0] > 0]
    horizons = [float(f"{at:.2g}") for at in np.quantile(happened, (0.25, 0.5, 0.75), method="nearest")]
    assert list(found.survival.survival.horizons) == horizons
    limit = tau(VALIDATION)
    expected = {
        "cindex": metrics.concordance_index_censored(events > 0, times, scores)[0],
        f"uno@{limit:g}": metrics.concordance_index_ipcw(outcome, outcome, scores, limit)[0],
    }
    aucs, _ = metrics.cumulative_dynamic_auc(outcome, outcome, scores, horizons)
    expected |= {f"auc_at@{at:g}": auc for at, auc in zip(horizons, aucs, strict=True)}
    values = {name: one.value for name, one in found.pooled.mean.items()}
    assert values == pytest.approx(expected, abs=1e-10)
    predicted = np.stack([breslow(VALIDATION, scores, at) for at in horizons], 1)
    _, briers = metrics.brier_score(outcome, outcome, predicted, horizons)
    part = found.survival
    assert {at: one.value for at, one in part.brier.items()} == pytest.approx(
        dict(zip(horizons, briers, strict=True))
    )
    grid = np.linspace(horizons[0], horizons[-1], 50)
    over_time = np.stack([breslow(VALIDATION, scores, at) for at in grid], 1)
    whole = metrics.integrated_brier_score(outcome, outcome, over_time, grid)
    assert part.integrated_brier.value == pytest.approx(whole)
    for name, one in {**found.pooled.mean, **part.brier, "over time": part.integrated_brier}.items():
        assert one.low < one.value < one.high, name


@pytest.mark.filterwarnings("ignore")  # lifelines calls pandas in ways that pandas 3 warns of
def test_what_follows_is_that_of_the_functions_themselves():
    found, (scores, events), times = assess(BOTH, level=0.9), TEST.flat, TEST.time
    for name, one in found.pooled.mean.items():
        assert one == survival.interval(name, scores, events, times, 0.9)
    for at in found.survival.survival.horizons:
        predicted = breslow(VALIDATION, scores, at)
        ends = survival.brier_interval(predicted, events, times, at, 0.9)[:4]
        assert found.survival.brier[at][:4] == pytest.approx(ends)
        expected = survival_curves.calibration(predicted, events, times, at, level=0.9)
        np.testing.assert_allclose(found.survival.calibration[at].low, expected.low)
    edges = np.quantile(VALIDATION.scores, [1 / 3, 2 / 3])
    np.testing.assert_allclose(found.survival.edges, edges)
    which = np.digitize(scores, edges)
    lifelines = pytest.importorskip("lifelines", reason="needs lifelines")
    for group, curve in enumerate(found.survival.curves):
        fitter = lifelines.KaplanMeierFitter().fit(times[which == group], events[which == group])
        expected = fitter.survival_function_.loc[curve.times].iloc[:, 0]
        np.testing.assert_allclose(curve.survival, expected, atol=1e-12)


def test_test_data_choose_nothing():
    moved = dataclasses.replace(TEST, scores=TEST.scores + 5, time=3 * TEST.time)
    first, second = (assess({"validation": VALIDATION, "test": test}) for test in (TEST, moved))
    assert list(first.pooled.mean) == list(second.pooled.mean)
    np.testing.assert_array_equal(first.survival.edges, second.survival.edges)
    assert first.survival.survival.to_json() == second.survival.survival.to_json()


def test_tau_leaves_a_fifth_under_observation():
    held = timed(600, 3, share=0.8)
    limit, times, events = tau(held), held.time, held.y[:, 0]

    def uncensored(at: float) -> float:
        """Kaplan-Meier of censoring, by its definition: events of one time come first."""
        left = 1.0
        for time in np.unique(times[times <= at]):
            gone = ((times == time) & (events == 0)).sum()
            at_risk = (times >= time).sum() - ((times == time) & (events > 0)).sum()
            left *= 1 - gone / at_risk if gone else 1.0
        return left

    last = max(time for time in times if uncensored(time) >= 0.2)
    assert 0.9 * last < limit <= last, "rounded down to two digits, so that it is no patient's time"
    assert limit == float(f"{limit:.2g}")
    assert uncensored(limit) >= 0.2
    assert metrics_at(Survival.of(held), held)[0] == f"uno@{limit:g}"
    assert reported(True, 0.3) == ["cindex"], "without tau, Uno's C is of something else"


def test_sites_have_their_concordance():
    found = assess(BOTH)
    assert list(found.sites) == ["a", "b", "c"]
    for name, part in TEST.by_site().items():
        assert found.sites[name].mean == {"cindex": survival.interval("cindex", *part.flat, part.time)}
        assert found.sites[name].one.positives == part.positives


LACKS = "no survival up to a horizon:"
NONE = "there are no validation data: no horizon was chosen"


@pytest.mark.parametrize(
    ("held", "note"),
    [
        (None, NONE),
        (Scores.of([], [], time=np.zeros(0)), NONE),
        (dataclasses.replace(VALIDATION, y=0 * VALIDATION.y), f"{LACKS} no validation example has an event"),
        (dataclasses.replace(VALIDATION, scores=VALIDATION.scores * math.nan), f"{LACKS} its validation scores"),
    ],
)  # fmt: skip
def test_without_a_hazard_there_is_the_concordance(held, note):
    found = assess({"test": TEST} | ({} if held is None else {"validation": held}))
    assert found.survival is None
    assert list(found.pooled.mean) == ["cindex"]
    assert found.timed
    assert found.notes[0].startswith(note)


@pytest.mark.parametrize(
    "test",
    [
        dataclasses.replace(TEST, y=np.ones_like(TEST.y)),
        dataclasses.replace(TEST, y=np.zeros_like(TEST.y)),
        dataclasses.replace(TEST, scores=TEST.scores * math.nan),
        dataclasses.replace(TEST, time=TEST.time / 1000),
        TEST.take(np.arange(1)),
    ],
    ids=["all events", "none", "not finite", "seen briefly", "one"],
)
def test_it_is_json_whatever_is_not_defined(test):
    found = assess({"validation": VALIDATION, "test": test})
    content = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (content["survival"] is None) == (not np.isfinite(test.scores).all())
    assert content["timed"]
    defined = test.positives > 0 and np.isfinite(test.scores).all() and len(test) > 1
    assert math.isfinite(found.pooled.mean["cindex"].value) == defined


def test_horizons_that_were_asked_for():
    found = assess(BOTH, horizons=(20, 50.5))
    assert list(found.survival.brier) == [20.0, 50.5]
    assert list(found.pooled.mean)[2:] == ["auc_at@20", "auc_at@50.5"]
    one = assess(BOTH, horizons=[20.0]).survival
    assert isinstance(one, SurvivalPart)
    assert one.integrated_brier is None, "one horizon is no time to integrate over"
    on_validation = assess({"validation": VALIDATION})
    assert on_validation.survival is not None
    assert "no test data" in on_validation.notes[0]


def test_runs_are_compared_by_the_metrics_that_are_asked_for():
    other = dataclasses.replace(TEST, scores=np.random.default_rng(0).normal(size=TEST.scores.shape))
    assert list(differences(other, TEST)) == ["cindex"]
    names = list(assess(BOTH).pooled.mean)
    found = differences(other, TEST, names=names)
    for name in names:
        assert found[name] == survival.difference(name, other.scores[:, 0], *TEST.flat, TEST.time)
    seeds = differences([other, other], [TEST, TEST], names=names)
    assert all(one.high < 0 for one in seeds.values())
    with pytest.raises(UserError, match="times differ"):
        paired(TEST, dataclasses.replace(TEST, time=TEST.time + 1))


def test_a_hazard_of_thousands_of_events_is_kept_at_a_thousand_times():
    """Events count at the latest of these times; beside Breslow's hazard of all times."""
    rng = np.random.default_rng(0)
    scores, last = rng.normal(size=6000), rng.exponential(2, 6000)
    event = rng.exponential(np.exp(-scores))
    held = Scores.of(scores, event <= last, time=np.minimum(event, last))
    assert held.positives > 3000
    found = Survival.of(held, (0.2, 0.7, 1.5))
    assert len(found.baseline.grid) == 1000
    assert found.baseline.grid[0] == held.time[held.y[:, 0] > 0].min(), "no event lies before it"
    (h, events), times = held.flat, held.time
    horizons = found.horizons
    exact = [sum(1 / np.exp(h[times >= t]).sum() for t in times[(events > 0) & (times <= at)]) for at in horizons]
    near = found.baseline.at(horizons) * np.exp(-found.baseline.centre)
    np.testing.assert_allclose(near, exact, rtol=0.01)
