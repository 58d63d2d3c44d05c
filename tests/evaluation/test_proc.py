"""AUROC, partial AUC, DeLong's variances and paired test, beside those of the R package pROC.

pROC 1.18.0, R 4.2.2. To make the table again, for each case of m, n, k:

    i <- seq_len(m + n); y <- c(rep(1, m), rep(0, n))
    a <- (31 * i * i + 17 * i * k) %% 101 + 35 * y
    b <- (57 * i * i + 23 * i * k) %% 97 + 20 * y + a %/% 2
    first <- roc(y, a, direction = "<"); second <- roc(y, b, direction = "<")
    auc(first); auc(second); var(first, method = "delong"); cov(first, second, method = "delong")
    ci.auc(first, method = "delong"); roc.test(first, second, method = "delong", paired = TRUE)
    auc(first, partial.auc = c(1, 0.7)); auc(first, partial.auc = c(1, 0.7), partial.auc.correct = TRUE)
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from fedxl import metrics
from fedxl.evaluation.compare import delong_difference
from fedxl.evaluation.delong import covariance, placements
from fedxl.evaluation.intervals import delong

NAMES = ("first", "second", "low", "high", "variance", "covariance", "z", "p", "pauc_raw", "pauc")
PROC = {
    (12, 30, 1): (
        0.793055555556,
        0.841666666667,
        0.651507688460,
        0.934603422651,
        0.005215674464956,
        0.001879716707303,
        -0.599387420125,
        0.548914563881,
        0.130555555556,
        0.667755991285,
    ),
    (40, 200, 2): (
        0.784875000000,
        0.776687500000,
        0.714507777815,
        0.855242222185,
        0.001288975409902,
        0.000515998628962,
        0.203206374982,
        0.838973730272,
        0.134125000000,
        0.674754901961,
    ),
    (100, 100, 3): (
        0.809800000000,
        0.803550000000,
        0.752569709316,
        0.867030290684,
        0.000852620404040,
        0.000319133030303,
        0.187321809734,
        0.851408323946,
        0.159050000000,
        0.723627450980,
    ),
}


def scores(m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    i, y = np.arange(1, m + n + 1), np.repeat([1, 0], [m, n])
    a = (31 * i * i + 17 * i * k) % 101 + 35 * y
    return a.astype(float), ((57 * i * i + 23 * i * k) % 97 + 20 * y + a // 2).astype(float), y


@pytest.mark.parametrize("case", PROC, ids=str)
def test_our_figures_are_those_of_proc(case):
    known, (a, b, y) = dict(zip(NAMES, PROC[case], strict=True)), scores(*case)
    found = covariance(placements(a, y), placements(b, y))
    assert metrics.auroc(a, y) == pytest.approx(known["first"], abs=1e-11)
    assert metrics.auroc(b, y) == pytest.approx(known["second"], abs=1e-11)
    assert found[0, 0] == pytest.approx(known["variance"], abs=1e-14)
    assert found[0, 1] == pytest.approx(known["covariance"], abs=1e-14)
    assert metrics.partial_auc_raw(a, y, 0.3) == pytest.approx(known["pauc_raw"], abs=1e-11)
    assert metrics.partial_auc(a, y, 0.3) == pytest.approx(known["pauc"], abs=1e-11)


@pytest.mark.parametrize("case", PROC, ids=str)
def test_with_many_examples_our_interval_and_p_are_those_of_proc(case):
    """With few, ours leans, and that of pROC is symmetric. With copies of all examples both are the same."""
    known, (a, b, y) = dict(zip(NAMES, PROC[case], strict=True)), scores(*case)
    copies = 400
    many = [np.tile(each, copies) for each in (a, b, y)]
    # DeLong's variances of copies, from pROC's: (m - 1) S / m is the same, and m is `copies` times as large.
    found = delong(many[0], many[2])
    reach = float(norm.ppf(0.975)) * math.sqrt(covariance(placements(many[0], many[2]))[0, 0])
    assert found.low == pytest.approx(known["first"] - reach, abs=0.02 * reach)
    assert found.high == pytest.approx(known["first"] + reach, abs=0.02 * reach)
    assert known["high"] - known["first"] == pytest.approx(float(norm.ppf(0.975)) * math.sqrt(known["variance"]))
    gap = delong_difference(a, b, y)
    assert gap.value == pytest.approx(known["first"] - known["second"], abs=1e-11)
    assert abs(gap.p - known["p"]) < 0.03, "pROC's p is of a symmetric interval, ours of one that leans"
