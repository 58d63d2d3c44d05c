"""Noise for differential privacy: whole numbers, drawn exactly, from the operating system's randomness.

The two-sided geometric distribution, P(k) in proportion to exp(-epsilon |k|), is the Laplace mechanism on whole
numbers. Floating-point samplers leak by the last bits of their results (Mironov 2012), so it is drawn by integers
alone, after Canonne, Kamath, Steinke: The Discrete Gaussian for Differential Privacy (2020), algorithms 1 and 2.
Never from a run's seed: the server knows it, and would subtract the noise.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fedxl.errors import require

LEAST_EPSILON = 0.001  # below it, noise hides everything
MOST_EPSILON = 100.0
Below = Callable[[int], int]  # a whole number from 0 up to, but not including, its argument; all alike


def exactly(epsilon: float) -> Fraction:
    """An epsilon as it was written: 0.1 is one tenth, which no float is."""
    known = LEAST_EPSILON <= epsilon <= MOST_EPSILON
    require(known, f"epsilon must lie between {LEAST_EPSILON:g} and {MOST_EPSILON:g}, got {epsilon:g}")
    return written(epsilon)


def written(number: float) -> Fraction:
    """A finite number as its shortest decimal form."""
    return Fraction(repr(float(number)))


def noise(epsilon: Fraction, count: int, below: Below = secrets.randbelow) -> npt.NDArray[np.int64]:
    """So many independent draws of the two-sided geometric distribution."""
    return np.array([two_sided_geometric(epsilon, below) for _ in range(count)], dtype=np.int64)


def two_sided_geometric(epsilon: Fraction, below: Below = secrets.randbelow) -> int:
    """One draw: k with a probability in proportion to exp(-epsilon |k|). Algorithm 2 with s / t = epsilon."""
    s, t = epsilon.numerator, epsilon.denominator
    while True:
        u = below(t)
        if not _with_probability_exp(u, t, below):
            continue
        v = 0
        while _with_probability_exp(1, 1, below):
            v += 1
        size, negative = (u + t * v) // s, below(2) == 1
        if not (negative and size == 0):  # or 0 would come twice as often as it should
            return -size if negative else size


def variance(epsilon: float) -> float:
    """Of one draw; 0 without noise.

    >>> round(variance(1.0), 4)
    1.8413
    """
    return 2 * math.exp(-epsilon) / math.expm1(-epsilon) ** 2 if epsilon else 0.0


def _with_probability_exp(numerator: int, denominator: int, below: Below) -> bool:
    """True with probability exp(-numerator / denominator), a fraction of at most 1. Algorithm 1."""
    k = 1
    while below(denominator * k) < numerator:
        k += 1
    return k % 2 == 1
