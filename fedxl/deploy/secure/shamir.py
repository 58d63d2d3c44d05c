"""Shamir's secret sharing (CACM 1979): any `threshold` shares give the secret, fewer tell nothing."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**521 - 1  # a Mersenne prime: room for any secret of 64 bytes
BYTES = 66  # of a share


def split(secret: int, threshold: int, places: Sequence[int]) -> dict[int, int]:
    """A share for each place: the value there of a random polynomial of degree threshold - 1 with the secret at 0."""
    assert 0 <= secret < PRIME
    assert 1 <= threshold <= len(places) == len(set(places))
    assert min(places) > 0
    coefficients = [secret, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {place: _value(coefficients, place) for place in places}


def combine(shares: Mapping[int, int]) -> int:
    """The secret: Lagrange's polynomial through exactly `threshold` shares, at 0."""
    secret = 0
    for place, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        secret += share * above * pow(below, -1, PRIME)
    return secret % PRIME


def _value(coefficients: Sequence[int], place: int) -> int:
    """Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value
