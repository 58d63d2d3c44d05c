"""Metrics by label against scikit-learn, and the interval of their mean against a plain bootstrap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import average_precision_score, roc_auc_score

from fedxl import metrics
from fedxl.errors import UserError
from fedxl.evaluation import labelled
from fedxl.evaluation.intervals import delong
from fedxl.evaluation.label_means import means
from fedxl.evaluation.label_table import as_markdown, label_table, mean_auroc
from fedxl.evaluation.labelled import LabelScores


def scores() -> LabelScores:
    """Three labels of which some are not known; the last has one class."""
    rng = np.random.default_rng(0)
    y = (rng.random((80, 4)) < [0.5, 0.3, 0.2, 0.0]).astype(np.int64)
    h = y + rng.normal(size=y.shape)
    y[rng.random(y.shape) < 0.2] = -1
    return LabelScores(h, y, ("a", "b", "c", "d"))


def own(found: LabelScores, label: int) -> tuple[np.ndarray, np.ndarray]:
    known = found.labels[:, label] >= 0
    return found.labels[known, label], found.scores[known, label]


def test_metrics_by_label_and_their_mean():
    found = scores()
    mean, each = labelled.judge(metrics.resolve(["auroc", "ap"]), found)
    auroc = [roc_auc_score(*own(found, label)) for label in range(3)]
    ap = [average_precision_score(*own(found, label)) for label in range(3)]
    assert [each[name]["auroc"] for name in "abc"] == pytest.approx(auroc, abs=1e-12)
    assert np.isnan(each["d"]["auroc"])
    assert mean["auroc"] == pytest.approx(np.mean(auroc), abs=1e-12)
    assert mean["ap"] == pytest.approx(np.mean(ap), abs=1e-12)
    assert mean["positives"] + mean["negatives"] == (found.labels >= 0).sum()


def test_the_table_has_delong_by_label_and_a_bootstrap_of_examples_for_the_mean():
    found = scores()
    rows = label_table(found, draws=40)
    assert [row.name for row in rows] == ["a", "b", "c", "d", "mean"]
    for label in range(3):
        y, h = own(found, label)
        assert rows[label].auroc == delong(h, y)
        assert (rows[label].positives, rows[label].negatives) == (y.sum(), (1 - y).sum())
    rng, drawn = np.random.default_rng(0), []
    for _ in range(40):
        chosen = rng.integers(80, size=80)
        part = LabelScores(found.scores[chosen], found.labels[chosen], found.names)
        drawn.append(np.mean([roc_auc_score(*own(part, label)) for label in range(3)]))
    mean = np.mean([row.auroc.value for row in rows[:3]])
    assert rows[-1].auroc[:3] == pytest.approx((mean, *corrected(mean, drawn)), abs=1e-12)
    assert "| mean |" in as_markdown(rows)
    assert "one class" in as_markdown(rows)


def corrected(value: float, drawn: list[float]) -> np.ndarray:
    """The bias-corrected percentile interval, as Efron writes it."""
    shift = norm.ppf(np.mean(np.array(drawn) < value))
    return np.quantile(drawn, norm.cdf(2 * shift + norm.ppf([0.025, 0.975])))


def test_means_of_all_metrics_against_a_bootstrap_of_whole_examples():
    """With labels that are not known, and scikit-learn's metrics, one draw after another."""
    found = scores()
    wanted = {
        "auroc": roc_auc_score,
        "pauc@0.3": lambda y, h: roc_auc_score(y, h, max_fpr=0.3),
        "ap": average_precision_score,
    }
    intervals = means(list(wanted), found, draws=60, seed=3)
    rng = np.random.default_rng(3)
    draws = [rng.integers(80, size=80) for _ in range(60)]
    for name, metric in wanted.items():
        drawn = []
        for chosen in draws:
            part = LabelScores(found.scores[chosen], found.labels[chosen], found.names)
            drawn.append(np.mean([metric(*own(part, label)) for label in range(3)]))
        value = np.mean([metric(*own(found, label)) for label in range(3)])
        assert intervals[name][:3] == pytest.approx((value, *corrected(value, drawn)), abs=1e-9)


def test_labels_that_say_the_same_narrow_nothing():
    """Ten copies of one label know no more than it does: a bootstrap of labels would think they do."""
    one = scores().label(0)
    copied = LabelScores(*(np.repeat(each[:, None], 10, 1) for each in (one.scores, one.labels)), tuple("abcdefghij"))
    alone = LabelScores(one.scores[:, None], one.labels[:, None], ("a",))
    assert mean_auroc(copied, draws=200)[:3] == pytest.approx(mean_auroc(alone, draws=200)[:3], abs=1e-12)


def test_a_draw_without_a_class_of_a_label_does_without_the_label():
    """The second label has one positive, which a third of the draws lack."""
    rng = np.random.default_rng(1)
    y = np.stack((np.arange(30) % 2, np.arange(30) == 7), 1).astype(np.int64)
    found = LabelScores(rng.normal(size=y.shape) + y, y, ("a", "b"))
    rng, drawn = np.random.default_rng(0), []
    for _ in range(100):
        chosen = rng.integers(30, size=30)
        some = [label for label in (0, 1) if 0 < y[chosen, label].sum() < 30]
        drawn.append(np.mean([roc_auc_score(y[chosen, label], found.scores[chosen, label]) for label in some]))
    value = mean_auroc(found, draws=100)
    assert value[1:3] == pytest.approx(tuple(corrected(value.value, drawn)), abs=1e-12)


def test_no_label_with_both_classes_has_no_interval():
    found = LabelScores(np.zeros((4, 2)), np.zeros((4, 2), np.int64), ("a", "b"))
    assert np.isnan(mean_auroc(found).value)


def test_a_perfect_ranking_of_few_examples_is_not_certain():
    y = np.array([[1, 0], [1, 0], [0, 1], [0, 1]])
    for found in means(["auroc", "ap"], LabelScores(y.astype(float), y, ("a", "b"))).values():
        assert found.value == 1
        assert np.isnan([found.low, found.high]).all()
        assert found.how == "not defined: all draws agree"


def test_scores_are_kept_and_found_again(tmp_path):
    found = replace(scores(), sites=np.arange(80) % 3, site_names=("x", "y", "z", "w"))
    labelled.save(tmp_path / "scores.npz", {"test": found})
    again = labelled.load(tmp_path / "scores.npz")["test"]
    np.testing.assert_array_equal(again.scores, found.scores)
    np.testing.assert_array_equal(again.labels, found.labels)
    assert (again.names, again.site_names) == (found.names, found.site_names)
    np.testing.assert_array_equal(again.sites, found.sites)
    parts = again.by_site()
    assert list(parts) == ["x", "y", "z"], "nobody holds data of w"
    np.testing.assert_array_equal(parts["y"].scores, found.scores[1::3])
    np.testing.assert_array_equal(again.by_label()["b"].by_site()["z"].scores, own(parts["z"], 1)[1])
    assert labelled.load(tmp_path / "none.npz") == {}
    (tmp_path / "scores.npz").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="cannot read"):
        labelled.load(tmp_path / "scores.npz")
