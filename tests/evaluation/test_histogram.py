"""Counts in bins: what follows from them against the metrics of the scores themselves, the bounds, and the bins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as reference
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression

from fedxl import censored, metrics
from fedxl.errors import UserError
from fedxl.evaluation import histogram
from fedxl.evaluation.bins import MOST_BINS, Bins, Spread
from fedxl.evaluation.hazard import hazard_sums
from fedxl.evaluation.histogram import Histogram, count, pooled
from fedxl.evaluation.noise import noise, variance

METRICS = {
    "auroc": (Histogram.auroc, metrics.auroc),
    "ap": (Histogram.average_precision, metrics.average_precision),
    "pauc@0.3": (lambda b: b.partial_auc(0.3), lambda s, y: metrics.partial_auc(s, y, 0.3)),
    "pauc_raw@0.05": (lambda b: b.partial_auc_raw(0.05), lambda s, y: metrics.partial_auc_raw(s, y, 0.05)),
}
ROUNDING = 1e-10


def cases(number: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray, Bins]]:
    """Scores of any size, level and number, some with ties, and bins coarse and fine."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        n = int(rng.integers(2, 2000))
        labels = (rng.random(n) < rng.uniform(0.02, 0.98)).astype(np.int64)
        labels[:2] = [0, 1]
        scores = rng.normal(size=n) + rng.uniform(0, 2) * labels
        scores = scores * 10 ** rng.uniform(-3, 3) + rng.choice([0.0, 1.0, 10.0]) * rng.normal()
        scores = np.round(scores, 1) if rng.random() < 0.3 else scores
        yield scores, labels, Bins(int(rng.choice([4, 8, 32, 128, 512, 2048])))


def example(n: int = 1000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = (rng.random(n) < 0.3).astype(np.int64)
    return rng.normal(size=n) + 1.5 * labels, labels


def test_the_metrics_of_scores_lie_within_the_bounds_in_a_thousand_random_cases():
    ratios: dict[str, list[float]] = {name: [] for name in METRICS}
    for scores, labels, bins in cases(1000):
        found = count(bins.edges(), scores, labels)
        for name, (from_counts, exact) in METRICS.items():
            value, low, high = bounded = from_counts(found)
            true = exact(scores, labels)
            assert low - ROUNDING <= true <= high + ROUNDING
            assert low - ROUNDING <= value <= high + ROUNDING
            assert abs(true - value) <= bounded.bound + ROUNDING
            if bounded.bound > ROUNDING:
                ratios[name].append(abs(true - value) / bounded.bound)
    for name, each in ratios.items():  # for docs/deployment.md: pytest -s
        print(f"{name}: error / bound at most {max(each):.3f}, median {np.median(each):.3f}, {len(each)} cases")
        assert 0.9 < max(each) < 1 + 1e-6, "the bound is kept, and no larger than it must be"


def test_the_value_is_the_metric_of_scores_that_are_equal_within_their_bin():
    scores, labels = example()
    edges = Bins(64).edges()
    found, places = count(edges, scores, labels), np.searchsorted(edges, scores, side="right")
    assert found.auroc().value == pytest.approx(reference.roc_auc_score(labels, places), abs=1e-12)
    assert found.average_precision().value == pytest.approx(
        reference.average_precision_score(labels, places), abs=1e-12
    )
    assert found.partial_auc(0.3).value == pytest.approx(
        reference.roc_auc_score(labels, places, max_fpr=0.3), abs=1e-12
    )


def test_no_order_within_a_bin_is_beyond_the_bounds_and_some_order_reaches_each():
    """All orders of two positives and three negatives in a bin, with ties, above which there are others."""
    fixed, labels = [9.0, 9.5, 9.7], np.array([1, 0, 1, 1, 1, 0, 0, 0])
    ranks = list(product(range(1, 6), repeat=5))
    for name, (from_counts, exact) in METRICS.items():
        each = [exact(np.array([*fixed, *order]), labels) for order in ranks]
        _, low, high = from_counts(count(np.array([0.5, 8.0, 9.2, 9.6]), np.array([*fixed, 1, 1, 1, 1, 1]), labels))
        assert min(each) == pytest.approx(low, abs=1e-12), name
        assert max(each) == pytest.approx(high, abs=1e-12), name


def test_curves_and_operating_points_at_edges_are_exact():
    scores, labels = example()
    found = count(Bins(128).edges(), scores, labels)
    for point in (found.at_specificity(0.9), found.at_sensitivity(0.8)):
        above = scores >= point.threshold
        assert point.sensitivity == pytest.approx(above[labels == 1].mean(), abs=1e-12)
        assert point.specificity == pytest.approx(1 - above[labels == 0].mean(), abs=1e-12)
    point = found.at_specificity(0.9)
    assert point.specificity >= 0.9
    fpr, tpr, _ = reference.roc_curve(labels, scores)
    best = tpr[fpr <= 0.1].max()
    assert point.sensitivity <= best <= point.sensitivity + point.more
    assert found.at_sensitivity(0.8).sensitivity >= 0.8
    false, true = found.counts()
    above = scores[:, None] >= found.edges[::-1]
    np.testing.assert_array_equal(true[1:-1], (above & (labels == 1)[:, None]).sum(0))
    np.testing.assert_array_equal(false[1:-1], (above & (labels == 0)[:, None]).sum(0))


def test_extreme_operating_points_exist():
    found = count(Bins(16).edges(), *example(50))
    assert found.at_specificity(1.0).specificity == 1
    assert found.at_sensitivity(1.0).sensitivity == 1
    assert found.at_specificity(0.0).sensitivity == 1


def test_counts_of_sites_add_up_to_the_counts_of_all():
    scores, labels = example()
    edges = Bins(64).edges()
    parts = [count(edges, scores[part::3], labels[part::3]) for part in range(3)]
    together, whole = pooled(parts), count(edges, scores, labels)
    np.testing.assert_array_equal(together.positives, whole.positives)
    np.testing.assert_array_equal(together.negatives, whole.negatives)
    with pytest.raises(UserError, match="only if their bins are the same"):
        pooled([parts[0], count(Bins(65).edges(), scores, labels)])


def test_one_class_has_counts_but_no_metrics():
    found = count(Bins(8).edges(), np.array([0.0, 1.0]), np.array([1, 1]))
    named = metrics.resolve(["auroc", "ap", "pauc"], [0.3])
    assert all(np.isnan(each.value) for each in histogram.measure_one(named, found).values())
    counted = histogram.measure(named, {"": {"a": found}})
    assert {name: counted.values[name] for name in metrics.COUNTS} == {"positives": 2, "negatives": 0}
    assert np.isnan(counted.values["auroc"])


def test_what_follows_from_counts_is_computed_under_its_name_and_the_rest_left_out():
    scores, labels = example()
    named = metrics.resolve([*metrics.usual(), tenth], [0.1])
    found = histogram.measure_one(named, count(Bins().edges(), scores, labels))
    assert list(found) == ["auroc", "pauc@0.1", "pauc_raw@0.1", "ap"]
    assert found["pauc@0.1"].value == pytest.approx(metrics.partial_auc(scores, labels, 0.1), abs=0.01)


def tenth(scores: Any, labels: Any) -> float:
    return 0.1


def test_scores_in_the_middle_of_their_bins_stand_for_those_that_nobody_sees():
    scores, labels = example()
    found = count(Bins().edges(), scores, labels)
    middles, same = found.as_scores().flat
    assert (same.sum(), len(same)) == (labels.sum(), len(labels))
    for side in (0, 1):
        gap = np.abs(np.sort(middles[same == side]) - np.sort(scores[labels == side]))
        assert (gap <= 0.03 * np.abs(np.sort(scores[labels == side])) + 0.001).all()


def test_calibration_from_counts_is_that_of_the_scores():
    """Logistic regression (Platt's scaling) and the observed rate by predicted probability, by scikit-learn."""
    scores, labels = example(3000)
    exact = LogisticRegression(C=1e9).fit(scores[:, None], labels)
    middles, same = count(Bins().edges(), scores, labels).as_scores().flat
    found = LogisticRegression(C=1e9).fit(middles[:, None], same)
    assert found.coef_[0, 0] == pytest.approx(exact.coef_[0, 0], rel=0.01)
    assert found.intercept_[0] == pytest.approx(exact.intercept_[0], rel=0.01)
    rates = [
        calibration_curve(y, exact.predict_proba(s[:, None])[:, 1], n_bins=5)[0]
        for s, y in ((scores, labels), (middles, same))
    ]
    np.testing.assert_allclose(*rates, atol=0.02)


def test_bins_around_counts_bound_more_tightly_wherever_scores_lie():
    scores, labels = example()
    for level, size in ((0, 1), (300, 2), (-1e4, 0.01), (0, 1e3)):
        moved = level + size * scores
        first = count(Bins(512).edges(), moved, labels)
        for _ in range(3):
            first = count(first.bins_around(512).edges(), moved, labels)
        assert first.auroc().bound < 5e-3


def test_bins_around_scores_can_be_made_whatever_they_are():
    for scores in ([0.0], [5.0] * 9, [-1e4, 1e4], [1e4, 1e4 + 1e-9], [1e-9, 2e-9], [-745.0, 37.0]):
        spread = Spread.of(np.array(scores, np.float32))
        edges = Bins.around(512, spread, 1e4).edges()
        assert edges[0] < min(scores) <= max(scores) < edges[-1]


def test_counts_beyond_memory_are_not_written_out():
    many = Histogram(Bins(8).edges(), np.full(8, 10**11), np.full(8, 10**11))
    with pytest.raises(UserError, match="too many to stand for scores"):
        many.as_scores()
    assert many.bins_around(8).bins == 8
    assert many.auroc().value == 0.5


def test_numbers_that_are_none_count_as_lowest_and_infinite_ones_at_the_ends():
    found = count(Bins(8).edges(), np.array([np.nan, -np.inf, np.inf]), np.array([1, 0, 1]))
    assert (found.positives[0], found.negatives[0], found.positives[-1]) == (1, 1, 1)


def noisy(found: Histogram, epsilon: str, seed: int) -> Histogram:
    more = noise(Fraction(epsilon), 2 * len(found.positives), Random(seed).randrange).reshape(2, -1)
    both = found.positives + more[0], found.negatives + more[1]
    return Histogram(found.edges, *both, variance(float(epsilon)))


def test_noise_is_taken_out_as_far_as_it_can_be_and_its_error_is_known():
    """Over 40 draws, the error of AUROC by noise is as large as the standard error says, and there is no bias."""
    scores, labels = example(2000)
    exact = count(Bins(64, scale=0.2, reach=20.0).edges(), scores, labels)
    true = exact.auroc().value
    found = [noisy(exact, "0.5", seed) for seed in range(40)]
    errors = np.array([each.auroc().value - true for each in found])
    named = metrics.resolve(["auroc"])
    said = np.mean([histogram.noise_errors(named, [each])["auroc"] for each in found[:5]])
    assert 0.6 * said < errors.std() < 1.6 * said
    assert abs(errors.mean()) < said
    for each in found:
        assert min(map(np.min, each.counts())) >= 0
        assert sum(each.totals()) == pytest.approx(each.positives.sum() + each.negatives.sum())
        assert (np.diff(each.roc()) >= 0).all()


def test_the_noise_of_many_small_sites_is_known_with_the_bias_that_it_causes():
    """Ten sites of 200 examples each, whose noise is nearly as large as their data."""
    scores, labels = example(2000)
    edges = Bins(32, scale=0.2, reach=20.0).edges()
    exact = [count(edges, scores[part::10], labels[part::10]) for part in range(10)]
    true, named = pooled(exact).auroc().value, metrics.resolve(["auroc"])
    drawn = [
        [noisy(part, "0.5", 10 * seed + n).without_noise() for n, part in enumerate(exact)] for seed in range(20)
    ]
    errors = np.array([pooled(parts).auroc().value - true for parts in drawn])
    said = histogram.noise_errors(named, drawn[0])["auroc"]
    assert 0.5 < said / np.sqrt(np.mean(errors**2)) < 2
    assert histogram.noise_errors(named, exact)["auroc"] == 0


def test_noise_that_drowns_a_class_leaves_no_metric():
    found = Histogram(Bins(4).edges(), np.array([-3, 1, 0, 0]), np.array([1, 0, 5, 2]), 1.0)
    assert np.isnan(found.auroc().value)
    assert found.totals() == (0, 8)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"positives": np.array([1, -1, 0])}, "cannot hold -1"),
        ({"positives": np.array([1, 1])}, "need 3 counts"),
        ({"edges": np.array([1.0, 0.0])}, "ascending"),
        ({"edges": np.array([0.0, np.nan])}, "finite"),
        ({"edges": np.zeros(0)}, "need edges"),
        ({"noise": -1.0}, "variance"),
        ({"noise": np.nan}, "variance"),
    ],
)
def test_counts_that_cannot_be_are_refused(changes, why):
    given = {"edges": np.array([0.0, 1.0]), "positives": np.array([1, 0, 2]), "negatives": np.array([0, 3, 0])}
    Histogram(**given)
    with pytest.raises(UserError, match=why):
        Histogram(**{**given, **changes})


def test_counts_come_back_from_a_file_as_they_were(tmp_path):
    scores, labels = example(100)
    one = count(Bins(16).edges(), scores, labels)
    two = Histogram(one.edges, one.positives - 1, one.negatives, 1.5)
    given = {"test": {"": {"a": one, "é": two}}, "validation": {"": {"a": one}}}
    histogram.save(tmp_path / "curves.npz", given)
    found = histogram.load(tmp_path / "curves.npz")
    assert list(found) == ["test", "validation"]
    assert list(found["test"]) == [""]
    assert list(found["test"][""]) == ["a", "é"]
    np.testing.assert_array_equal(found["test"][""]["é"].positives, two.positives)
    assert found["test"][""]["é"].noise == 1.5
    assert histogram.load(tmp_path / "none.npz") == {}


@pytest.mark.parametrize("names", [("é", "a/b"), ("test", ""), ("positives", "x/positives")])
def test_counts_of_several_labels_come_back_whatever_they_are_called(tmp_path, names):
    scores, labels = example(100)
    one = count(Bins(16).edges(), scores, labels)
    two = count(Bins(8, centre=1.0).edges(), scores[:60], labels[:60])
    given = dict(zip(names, ({"s": one}, {"s": two, "t": two}), strict=True))
    histogram.save(tmp_path / "curves.npz", {"test": given})
    found = histogram.load(tmp_path / "curves.npz")["test"]
    assert list(found) == list(names)
    assert [list(sites) for sites in found.values()] == [["s"], ["s", "t"]]
    np.testing.assert_array_equal(found[names[1]]["t"].edges, two.edges)
    np.testing.assert_array_equal(found[names[0]]["s"].negatives, one.negatives)


def test_curves_stand_for_scores_of_all_sites_where_scores_are_asked_for():
    scores, labels = example(300)
    edges = Bins(64).edges()
    parts = {"a": count(edges, scores[:100], labels[:100]), "b": count(edges, scores[100:], labels[100:])}
    found = histogram.as_scores(parts)
    assert found.sites == ("a", "b")
    assert metrics.auroc(*found.flat) == pytest.approx(pooled(parts.values()).auroc().value, abs=1e-12)
    mine = found.by_site()["b"]
    assert metrics.average_precision(*mine.flat) == pytest.approx(parts["b"].average_precision().value, abs=1e-12)


def test_noisy_curves_stand_for_scores_of_all_sites_together_and_decide_alike_for_one_label_and_several():
    """Noise that is left of each site's own counts would stay in far bins, where it flattens every probability."""
    edges = Bins(128).edges()
    parts = {}
    for site in range(8):
        scores, labels = example(400, seed=site)
        parts[f"s{site}"] = noisy(count(edges, scores, labels), "1", site)
    found = histogram.as_scores(parts)
    assert found.site is None, "whose a score is cannot be said"
    whole = pooled(parts.values())
    # Whole counts of scores, rounded once: the curve's own value to within what rounding does.
    assert metrics.auroc(*found.flat) == pytest.approx(whole.auroc().value, abs=0.005)
    (several,) = histogram.by_label({}, {"validation": {"a": parts}})["validation"].values()
    (one,) = histogram.by_label({}, {"validation": {"": parts}})["validation"].values()
    np.testing.assert_array_equal(several.scores, one.scores)
    np.testing.assert_array_equal(several.y, one.y)
    assert one.site is None


def test_a_damaged_file_is_told_in_one_line(tmp_path):
    path = tmp_path / "curves.npz"
    for content in (b"", b"PK\x03\x04 cut", b"no archive"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read .*curves\.npz"):
            histogram.load(path)
    found = count(Bins(4).edges(), *example(10))
    right = {"edges": found.edges, "sites": ["a"], "positives": [found.positives], "negatives": [found.negatives]}
    for wrong, why in (
        ({"sites": ["a", "b"]}, "one site each"),
        ({"sites": ["a", "a"], "positives": [found.positives] * 2}, "one site each"),
        ({"positives": [[1, 2, -3, 4]]}, "hold -3"),
        ({"positives": np.zeros((1, 4), "f4,i4")}, "cannot read"),
    ):
        given = {"noise": [0.0], **right, **wrong}
        with path.open("wb") as file:
            np.savez(file, **{f"test//{name}": array for name, array in given.items()})
        with pytest.raises(UserError, match=why):
            histogram.load(path)
    with path.open("wb") as file:  # as older versions of fedxl wrote it
        np.savez(file, test_edges=found.edges, test_names=["a"], test_positives=[found.positives])
    with pytest.raises(UserError, match=r"cannot read .*curves\.npz"):
        histogram.load(path)


# Bins fixed beforehand


@pytest.mark.parametrize("bins", [4, 5, 64, 512, 4096])
def test_edges_ascend_are_symmetric_and_widen_in_proportion(bins):
    edges = Bins(bins, centre=3.0).edges()
    assert len(edges) == bins - 1
    assert (np.diff(edges) > 0).all()
    np.testing.assert_allclose(edges - 3, -(edges - 3)[::-1], rtol=1e-9, atol=1e-9)
    if bins >= 64:
        far = edges[edges > 3 + 1] - 3
        ratios = far[1:] / far[:-1]
        np.testing.assert_allclose(ratios, ratios[0], rtol=1e-3)


def test_bins_come_back_from_json():
    bins = Bins(64, 1.5, 0.1, 50.0)
    assert Bins.from_json(bins.to_json()) == bins


WRONG = {
    "a billion bins": {"bins": 10**9},
    "more than any": {"bins": MOST_BINS + 1},
    "one bin": {"bins": 1},
    "few bins": {"bins": 3},
    "negative": {"bins": -5},
    "part of a bin": {"bins": 2.5},
    "a truth": {"bins": True},
    "a word": {"centre": "0"},
    "no number": {"centre": math.nan},
    "infinite": {"reach": math.inf},
    "beyond floats": {"reach": 10**400},
    "no scale": {"scale": 0},
    "a negative scale": {"scale": -1.0},
    "a scale beyond all reach": {"scale": 1e5},
    "a scale for one example": {"scale": 1e-300},
    "edges that coincide": {"centre": 1e12, "scale": 1e-6},
    "a list": {"scale": [0.01]},
}


@pytest.mark.parametrize("kind", list(WRONG))
def test_what_are_no_bins_is_refused_in_one_line(kind):
    with pytest.raises(UserError, match="bins"):
        Bins.from_json(Bins().to_json() | WRONG[kind])


@pytest.mark.parametrize("content", [None, [], {}, 7, "512", {**Bins().to_json(), "edges": [0, 1]}])
def test_what_does_not_describe_bins_is_refused(content):
    with pytest.raises(UserError, match="bins are described by bins, centre, reach, scale"):
        Bins.from_json(content)


def timed(n: int, seed: int, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Histogram]:
    """Scores, events and times up to 10, and their counts between whole times."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=n)
    at = np.minimum(rng.exponential(4 * np.exp(-scores)), 9.99)
    events = (rng.random(n) < 0.7).astype(np.int64)
    edges = np.linspace(-2, 2, bins - 1)
    return scores, events, at, count(edges, scores, events, at, np.arange(10.0))


def test_concordance_of_counts_is_that_of_equal_scores_and_times_and_its_bounds_hold_all_others():
    for seed in range(200):
        scores, events, at, found = timed(2 + seed, seed, 4 + seed % 40)
        equal = censored.harrell(np.searchsorted(found.edges, scores, side="right"), events, np.floor(at))
        exact = censored.harrell(scores, events, at)
        value, low, high = found.concordance()
        assert value == pytest.approx(equal, nan_ok=True)
        assert math.isnan(exact) or low - ROUNDING <= exact <= high + ROUNDING


def test_some_order_within_bins_reaches_each_bound_of_concordance():
    """All examples of a bin are told apart by one number: times that fall with it, and times that rise with it."""
    for seed in range(50):
        scores, events, at, found = timed(60, seed, 5)
        bins, times = np.searchsorted(found.edges, scores, side="right"), np.floor(at)
        reached = []
        for sign in (1, -1):
            order = np.lexsort((-sign * events, sign * times, bins))
            place = np.empty(60)
            place[order] = np.arange(60) / 60  # by score; within a bin of scores by time, forwards or backwards
            reached.append(censored.harrell(place, events, times + (place if sign > 0 else 1 - place) / 2))
        _, low, high = found.concordance()
        assert reached == pytest.approx([low, high])


def test_counts_of_times_of_several_sites_are_added_saved_and_stand_for_scores(tmp_path):
    parts = {f"s{seed}": timed(80, seed, 16)[3] for seed in range(3)}
    histogram.save(tmp_path / "curves.npz", {"test": {"": parts}})
    ((_, sites),) = histogram.load(tmp_path / "curves.npz")["test"].items()
    together, again = pooled(parts.values()), pooled(sites.values())
    assert again.concordance() == together.concordance()
    assert np.array_equal(again.times, np.arange(10.0))
    stand_in = histogram.as_scores(parts)
    counted = count(together.edges, *stand_in.flat, stand_in.time, together.times)
    for side in ("positives", "negatives"):  # who is in the lowest bin stands at its edge, with which the next begins
        mine, wanted = (
            np.hstack([each[:, :2].sum(1, keepdims=True), each[:, 2:]])
            for each in (getattr(counted, side), getattr(together, side))
        )
        assert np.array_equal(mine, wanted)
    assert stand_in.sites == ("s0", "s1", "s2")
    with pytest.raises(UserError, match="their bins are the same"):
        pooled([parts["s0"], replace(parts["s1"], times=np.arange(10.0) + 1)])


def test_a_hazard_of_counts_is_that_of_their_examples_up_to_the_width_of_bins():
    scores, events, at, found = timed(3000, 0, 2000)
    told = found.hazard()
    assert told is not None
    wanted = hazard_sums(scores, events, at, np.arange(10.0), told.centre)
    assert np.array_equal(told.events, wanted.events)
    inside = np.abs(scores) < 2  # beyond the outermost edges a score counts as one there
    shifted = hazard_sums(np.where(inside, scores, 2 * np.sign(scores)), events, at, np.arange(10.0), told.centre)
    np.testing.assert_allclose(told.at_risk, shifted.at_risk, rtol=2e-3)


def test_noise_in_counts_of_times_is_removed_row_by_row():
    *_, exact = timed(2000, 1, 12)
    rng = np.random.default_rng(0)
    added = rng.integers(-3, 4, (2, *exact.positives.shape))
    noisy_ = Histogram(exact.edges, exact.positives + added[0], exact.negatives + added[1], 4.0, exact.times)
    likely = noisy_.without_noise()
    assert int(likely.positives.min()) >= 0
    np.testing.assert_allclose(likely.positives.sum(1), noisy_.positives.sum(1), atol=1)
    assert likely.concordance().value == pytest.approx(exact.concordance().value, abs=0.02)
