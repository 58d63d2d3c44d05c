"""Metrics by label against scikit-learn, and the interval of their mean against a plain bootstrap."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from fedxl import metrics
from fedxl.errors import UserError
from fedxl.evaluation import labelled
from fedxl.evaluation.intervals import delong
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
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert rows[-1].auroc[:3] == pytest.approx((np.mean([row.auroc.value for row in rows[:3]]), low, high), abs=1e-12)
    assert "| mean |" in as_markdown(rows)
    assert "one class" in as_markdown(rows)


def test_no_label_with_both_classes_has_no_interval():
    found = LabelScores(np.zeros((4, 2)), np.zeros((4, 2), np.int64), ("a", "b"))
    assert np.isnan(mean_auroc(found).value)


def test_scores_are_kept_and_found_again(tmp_path):
    found = scores()
    labelled.save(tmp_path / "scores.npz", {"test": found})
    again = labelled.load(tmp_path / "scores.npz")["test"]
    np.testing.assert_array_equal(again.scores, found.scores)
    np.testing.assert_array_equal(again.labels, found.labels)
    assert again.names == found.names
    assert labelled.load(tmp_path / "none.npz") == {}
    (tmp_path / "scores.npz").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="cannot read"):
        labelled.load(tmp_path / "scores.npz")
