"""Made-up scores and patients for tests, and DeLong's covariance written out."""

from __future__ import annotations

import numpy as np

from fedxl.evaluation.scores import Scores


def made(positives: int, negatives: int, seed: int = 0, shift: float = 1.2, tied: bool = False):
    """Scores and labels in random order; tied: rounded, so that many scores are the same."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat([1, 0], [positives, negatives]))
    scores = rng.normal(size=len(labels)) + shift * labels
    return (np.round(scores, 1) if tied else scores), labels


def scored(positives: int, negatives: int, seed: int = 0, shift: float = 1.2, sites: int = 3) -> Scores:
    scores, labels = made(positives, negatives, seed, shift)
    rows = tuple(f"r{number}" for number in range(len(labels)))
    site = np.arange(len(labels)) % sites
    return Scores.of(scores, labels, site=site, sites=tuple("abcdef"[:sites]), row=rows)


def written_out(models, labels):
    """DeLong, DeLong and Clarke-Pearson's covariance, pair by pair, as their equations have it."""
    labels = np.asarray(labels)
    v10, v01, areas = [], [], []
    for scores in models:
        x, y = np.asarray(scores)[labels == 1], np.asarray(scores)[labels == 0]
        psi = np.array([[1.0 if a > b else 0.5 if a == b else 0.0 for b in y] for a in x])
        v10, v01, areas = [*v10, psi.mean(1)], [*v01, psi.mean(0)], [*areas, psi.mean()]
    m, n, k = len(v10[0]), len(v01[0]), len(models)
    found = np.zeros((k, k))
    for r in range(k):
        for s in range(k):
            s10 = sum((v10[r][i] - areas[r]) * (v10[s][i] - areas[s]) for i in range(m)) / (m - 1)
            s01 = sum((v01[r][j] - areas[r]) * (v01[s][j] - areas[s]) for j in range(n)) / (n - 1)
            found[r, s] = s10 / m + s01 / n
    return np.array(areas), found


PATIENTS = [  # arguments of `patients`
    (size, tied, share, seed)
    for size in (3, 10, 60, 400)
    for tied in (False, True)
    for share in (0.3, 0.8)
    for seed in range(3)
]


def patients(size: int, tied: bool = False, share: float = 0.3, seed: int = 0):
    """Scores, events and times; tied: many times and scores are the same. One at least has an event, one none."""
    rng = np.random.default_rng([seed, size, int(100 * share)])
    h = rng.normal(size=size)
    times = rng.exponential(size=size) * np.exp(-h) + 0.01
    events = (rng.random(size) > share).astype(int)
    events[np.argsort(times)[:2]] = 1
    events[np.argmax(times)] = 0
    scores = h + rng.normal(size=size)
    return (np.round(2 * scores), events, np.ceil(4 * times)) if tied else (scores, events, times)
