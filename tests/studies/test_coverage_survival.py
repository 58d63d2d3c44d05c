"""The simulated patients of the coverage study: what it takes for true is what many of them have."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedxl import censored
from fedxl.evaluation import survival
from studies import coverage_survival as study
from tests.studies.running import command

COHORTS = [study.Cohort(0.65, 0.8), study.Cohort(0.85, 0.3)]


@pytest.mark.parametrize("cohort", COHORTS, ids=str)
def test_true_values_are_those_of_many_patients(cohort):
    rng = np.random.default_rng(0)
    found = study.draw(cohort, 200_000, rng)
    assert (found.events == 0).mean() == pytest.approx(cohort.censored, abs=0.005)
    left = censored.censoring_curve(found.events, found.times).at([cohort.horizon, cohort.tau])
    np.testing.assert_allclose(left, [0.5, 0.2], atol=0.01)
    for kind in set(study.KINDS) - {"uno of all events", "calibration"}:
        ends = study.KINDS[kind](cohort, found, rng)
        assert ends.high - ends.low < 0.02
        middle, reach = (ends.low + ends.high) / 2, (ends.high - ends.low) / 2
        assert abs(middle - ends.truth) < 2 * reach, f"{kind}: four standard errors"


def test_without_censoring_both_concordances_are_the_same():
    cohort = COHORTS[1]
    assert study.true_concordance(cohort.strength, 0.0) == pytest.approx(cohort.concordance)
    h = np.random.default_rng(0).normal(size=100_000)
    times = np.random.default_rng(1).exponential(size=100_000) / np.exp(cohort.strength * h)
    found = survival.interval("cindex", h, np.ones(100_000), times)
    assert found.low < cohort.concordance < found.high
    assert censored.uno(h, np.ones(100_000), times) == pytest.approx(found.value, abs=1e-12)


def test_its_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "PATIENTS", (40,))
    monkeypatch.setattr(study, "CONCORDANCE", (0.6, 0.8))
    words = ("coverage", "--only", "survival", "--sets", "3", "--out", str(tmp_path))
    code, text, err = command(monkeypatch, capsys, *words)
    assert code == 0, err
    assert text.count("| patients, censored | C 0.6 | 0.8 |") == len(study.KINDS)
    assert text.count("| 40, 30 % |") == text.count("| 40, 80 % |") == len(study.KINDS)
    assert not math.isnan(study.censoring(0.6, 0.3))
