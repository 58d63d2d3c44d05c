"""Noise: exactly two-sided geometric, as private as it says, and never from a seed that others know."""

from __future__ import annotations

import inspect
import math
import random
import secrets
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from fedxl.errors import UserError
from fedxl.evaluation.noise import exactly, noise, two_sided_geometric, variance

DRAWS = 20_000


def drawn(epsilon: float, seed: int = 0, draws: int = DRAWS) -> np.ndarray:
    return noise(exactly(epsilon), draws, random.Random(seed).randrange)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.5])
def test_draws_follow_the_two_sided_geometric_distribution(epsilon):
    """scipy's dlaplace is the reference, with a chi-square test over values that are expected often."""
    found = drawn(epsilon)
    reach = int(stats.dlaplace(epsilon).ppf(0.999))
    values = np.arange(-reach, reach + 1)
    counted = Counter(np.clip(found, -reach - 1, reach + 1).tolist())
    expected = np.array([stats.dlaplace(epsilon).pmf(k) for k in values])
    tail = (1 - expected.sum()) / 2
    observed = [counted[k] for k in (-reach - 1, *values, reach + 1)]
    chance = stats.chisquare(observed, DRAWS * np.array([tail, *expected, tail])).pvalue
    assert chance > 1e-3
    assert found.var() == pytest.approx(variance(epsilon), rel=0.1)
    assert variance(epsilon) == pytest.approx(stats.dlaplace(epsilon).var())


def test_one_example_more_changes_no_answer_by_more_than_epsilon():
    """Counts 5 and 6: of every answer that is seen often, the logarithm of the ratio of its chances."""
    epsilon, draws = 0.5, 60_000
    five, six = Counter((5 + drawn(epsilon, 1, draws)).tolist()), Counter((6 + drawn(epsilon, 2, draws)).tolist())
    often = [k for k in range(-20, 30) if min(five[k], six[k]) >= 400]
    assert len(often) > 10
    losses = [abs(math.log(five[k] / six[k])) for k in often]
    errors = [math.sqrt(1 / five[k] + 1 / six[k]) for k in often]
    assert all(loss <= epsilon + 4 * error for loss, error in zip(losses, errors, strict=True))
    assert np.mean(losses) == pytest.approx(epsilon, abs=0.05), "nor is there more noise than it takes"


def test_it_comes_from_the_operating_system():
    assert inspect.signature(two_sided_geometric).parameters["below"].default is secrets.randbelow
    assert inspect.signature(noise).parameters["below"].default is secrets.randbelow
    assert len(set(noise(Fraction(1, 100), 50).tolist())) > 10


def test_epsilon_is_the_number_that_was_written():
    assert exactly(0.1) == Fraction(1, 10)
    for wrong in (0.0, -1.0, 1e-9, 1e9, math.nan, math.inf):
        with pytest.raises(UserError, match="epsilon must lie between"):
            exactly(wrong)
