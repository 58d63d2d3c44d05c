"""Made-up scores for tests."""

from __future__ import annotations

import numpy as np

from fedxl.evaluation.scored import Scored


def made(positives: int, negatives: int, seed: int = 0, shift: float = 1.2, tied: bool = False):
    """Scores and labels in random order; tied: rounded, so that many scores are the same."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat([1, 0], [positives, negatives]))
    scores = rng.normal(size=len(labels)) + shift * labels
    return (np.round(scores, 1) if tied else scores), labels


def scored(positives: int, negatives: int, seed: int = 0, shift: float = 1.2, sites: int = 3) -> Scored:
    scores, labels = made(positives, negatives, seed, shift)
    rows = tuple(f"r{number}" for number in range(len(labels)))
    return Scored(scores, labels, np.arange(len(labels)) % sites, tuple("abcdef"[:sites]), rows)
