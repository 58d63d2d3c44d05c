"""Metrics by label against scikit-learn, and the interval of their mean against a jackknife written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize, stats
from sklearn.metrics import average_precision_score, roc_auc_score

from fedxl import metrics
from fedxl.errors import UserError
from fedxl.evaluation.intervals import Interval, delong, intervals, label_table, means
from fedxl.evaluation.scores import Scores, load, measure, save


def scores() -> Scores:
    """Three labels of which some are not known; the last has one class."""
    rng = np.random.default_rng(0)
    y = (rng.random((80, 4)) < [0.5, 0.3, 0.2, 0.0]).astype(np.int64)
    h = y + rng.normal(size=y.shape)
    y[rng.random(y.shape) < 0.2] = -1
    return Scores(h, y, ("a", "b", "c", "d"))


def mean_auroc(found: Scores) -> Interval:
    return means(["auroc"], found)["auroc"]


def own(found: Scores, label: int) -> tuple[np.ndarray, np.ndarray]:
    known = found.y[:, label] >= 0
    return found.y[known, label], found.scores[known, label]


def test_metrics_by_label_and_their_mean():
    found = scores()
    mean, each = measure(metrics.resolve(["auroc", "ap"]), found)
    auroc = [roc_auc_score(*own(found, label)) for label in range(3)]
    ap = [average_precision_score(*own(found, label)) for label in range(3)]
    assert [each[name]["auroc"] for name in "abc"] == pytest.approx(auroc, abs=1e-12)
    assert np.isnan(each["d"]["auroc"])
    assert mean["auroc"] == pytest.approx(np.mean(auroc), abs=1e-12)
    assert mean["ap"] == pytest.approx(np.mean(ap), abs=1e-12)
    assert mean["positives"] + mean["negatives"] == (found.y >= 0).sum()


def test_the_table_has_delong_by_label_and_the_mean():
    found = scores()
    rows = label_table(found)
    assert [row.name for row in rows] == ["a", "b", "c", "d", "mean"]
    for label in range(3):
        y, h = own(found, label)
        assert rows[label].auroc == delong(h, y)
        assert (rows[label].positives, rows[label].negatives) == (y.sum(), (1 - y).sum())
    assert rows[-1].auroc == means(["auroc"], found)["auroc"]
    assert rows[-1].auroc.value == pytest.approx(np.mean([row.auroc.value for row in rows[:3]]), abs=1e-12)
    assert "one class" in rows[3].auroc.how


def less_biased(labels: np.ndarray, values: np.ndarray) -> float:
    """Average precision in which a positive counts itself half, pair by pair."""
    found = []
    for one in values[labels == 1]:
        true = (values[labels == 1] >= one).sum() - 0.5
        found.append(true / (true + (values[labels == 0] >= one).sum()))
    return float(np.mean(found))


def ends(value: float, left: list[float], level: float = 0.95) -> tuple[float, float]:
    """All t that are compatible with the pseudo-values' mean, by search: the variance is that of t."""
    count = len(left)
    pseudo = count * value - (count - 1) * np.array(left)
    centre, error = pseudo.mean(), stats.sem(pseudo)
    free = 2 * count / (stats.kurtosis(pseudo, fisher=False) - (count - 3) / (count - 1))
    reach = stats.t.ppf((1 + level) / 2, free)

    def beyond(t: float) -> float:
        return (centre - t) ** 2 - reach**2 * error**2 * t * (1 - t) / (centre * (1 - centre))

    return optimize.brentq(beyond, 0, centre), optimize.brentq(beyond, centre, 1)


def test_means_of_all_metrics_against_a_jackknife_of_whole_examples():
    """With labels that are not known, and scikit-learn's metrics, without one example after another."""
    found = scores()
    wanted = {
        "auroc": (roc_auc_score, roc_auc_score),
        "pauc@0.3": (lambda y, h: roc_auc_score(y, h, max_fpr=0.3),) * 2,
        "ap": (average_precision_score, less_biased),
    }
    said = means(list(wanted), found)
    assert intervals(list(wanted), found) == said
    for name, (shown, metric) in wanted.items():
        left = []
        for row in range(80):
            rest = np.delete(np.arange(80), row)
            part = found.take(rest)
            left.append(np.mean([metric(*own(part, label)) for label in range(3)]))
        value = np.mean([metric(*own(found, label)) for label in range(3)])
        assert said[name].value == pytest.approx(np.mean([shown(*own(found, label)) for label in range(3)]))
        assert said[name][1:3] == pytest.approx(ends(value, left), abs=1e-7)
        assert said[name].how == "jackknife of examples, Wilson's form"


@pytest.mark.parametrize(("name", "truth"), [("auroc", 0.8), ("ap", 0.2269)])
def test_intervals_of_means_cover_where_positives_are_rare(name, truth):
    """95 % intervals of 300 sets of 14 labels, 5 % positives of 200; percentiles cover average precision in 68 %."""
    rng, inside = np.random.default_rng(0), []
    for _ in range(300):
        y = (rng.random((200, 14)) < 0.05).astype(np.int64)
        h = (rng.normal(size=(200, 1)) + rng.normal(size=y.shape)) * 0.5**0.5
        found = means([name], Scores(h + y * 2**0.5 * stats.norm.ppf(0.8), y, tuple("abcdefghijklmn")))[name]
        inside.append(found.low <= truth <= found.high)
    assert 0.92 <= np.mean(inside) <= 0.98


def test_many_examples_are_left_out_in_groups():
    """Whose interval is about as wide as that without one example after another."""
    rng = np.random.default_rng(0)
    y = (rng.random((600, 3)) < 0.3).astype(np.int64)
    found = Scores(rng.normal(size=y.shape) + y, y, tuple("abc"))
    each, grouped = (means(["auroc", "ap"], found, groups=count) for count in (600, 450))
    for name, one in each.items():
        assert grouped[name] != one
        assert grouped[name][1:3] == pytest.approx(one[1:3], abs=0.1 * (one.high - one.low))


def test_labels_that_say_the_same_narrow_nothing():
    """Ten copies of one label know no more than it does: a bootstrap of labels would think they do."""
    alone = scores().by_label()["a"]
    copied = Scores(*(np.repeat(each, 10, 1) for each in (alone.scores, alone.y)), tuple("abcdefghij"))
    assert mean_auroc(copied)[:3] == pytest.approx(mean_auroc(alone)[:3], abs=1e-12)


def test_without_a_class_of_a_label_the_label_does_not_count():
    """The second label has one positive: without it, the first label alone is the mean."""
    rng = np.random.default_rng(1)
    y = np.stack((np.arange(30) % 2, np.arange(30) == 7), 1).astype(np.int64)
    found = Scores(rng.normal(size=y.shape) + y, y, ("a", "b"))
    left = []
    for row in range(30):
        rest = np.delete(np.arange(30), row)
        some = [label for label in (0, 1) if y[rest, label].any()]
        left.append(np.mean([roc_auc_score(y[rest, label], found.scores[rest, label]) for label in some]))
    value = mean_auroc(found)
    assert value[1:3] == pytest.approx(ends(value.value, left), abs=1e-7)
    alone = found.by_label()["b"]
    assert mean_auroc(alone).how == "not defined: a class has one example"


def test_no_label_with_both_classes_has_no_interval():
    found = Scores(np.zeros((4, 2)), np.zeros((4, 2), np.int64), ("a", "b"))
    assert np.isnan(mean_auroc(found).value)


def test_a_perfect_ranking_of_few_examples_is_not_certain():
    y = np.array([[1, 0], [1, 0], [0, 1], [0, 1]])
    for found in means(["auroc", "ap"], Scores(y.astype(float), y, ("a", "b"))).values():
        assert found.value == 1
        assert np.isnan([found.low, found.high]).all()
        assert found.how == "not defined: no example makes a difference"


def test_scores_are_kept_and_found_again(tmp_path):
    found = replace(scores(), site=np.arange(80) % 3, sites=("x", "y", "z", "w"))
    save(tmp_path / "scores.npz", {"test": found})
    again = load(tmp_path / "scores.npz")["test"]
    np.testing.assert_array_equal(again.scores, found.scores)
    np.testing.assert_array_equal(again.y, found.y)
    assert (again.labels, again.sites) == (found.labels, found.sites)
    np.testing.assert_array_equal(again.site, found.site)
    parts = again.by_site()
    assert list(parts) == ["x", "y", "z"], "nobody holds data of w"
    np.testing.assert_array_equal(parts["y"].scores, found.scores[1::3])
    np.testing.assert_array_equal(again.by_label()["b"].by_site()["z"].scores[:, 0], own(parts["z"], 1)[1])
    assert load(tmp_path / "none.npz") == {}
    (tmp_path / "scores.npz").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="cannot read"):
        load(tmp_path / "scores.npz")
