"""A membership attack: was this example among those that the model was trained on?

Carlini, Chien, Nasr, Song, Terzis, Tramèr. Membership Inference Attacks From First Principles. S&P 2022. Many models
are trained, each on a random half of the candidates. For each example, the scores of models that have seen it and of
those that have not are two distributions, and a new model's score is more likely under one or the other. Here both
are Gaussian with one variance, so the likelihood ratio is a difference of squares.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import nn

from fedxl import metrics
from fedxl.algorithms import build
from fedxl.data.examples import Splits
from fedxl.data.sets.digits import digits
from fedxl.progress import progress
from fedxl.risks import partial_auc
from fedxl.training.fit import fit
from fedxl.training.privacy import Spent
from fedxl.training.settings import Hooks

Floats = npt.NDArray[np.float64]
Masks = npt.NDArray[np.bool_]
MODELS = 16
DELTA = 1e-4
# Few examples and many steps, so that a model without privacy knows its examples by heart.
DATA = {"clients": 4, "one_class": 0, "copies": 1}
THINNED = 5  # one of so many negatives is a candidate
PLAIN = {"lr": 1.0}
PRIVATE = {
    "lr": 20.0, "dp_clip": 0.1, "dp_noise": 9.0, "dp_score_noise": 7.0, "uploads": 2, "pool_rounds": 10,
    "dp_delta": DELTA,
}  # fmt: skip
STEPS = {"plain": (30, 16), "private": (20, 2)}  # rounds, and local steps per round
BATCH = (8, 16)


class Shadow(NamedTuple):
    """A model that was trained on some of the candidates."""

    outputs: Floats  # [n] of all candidates
    seen: Masks  # [n]
    auroc: float  # on test data
    spent: Spent | None


class Attacked(NamedTuple):
    """AUROC of telling members from others, of each model; 0.5 is chance."""

    likelihood: Floats  # [models]
    threshold: Floats  # [models] by how right the model is, without other models


def halves(count: int, models: int) -> Masks:
    """Which candidates each model sees: a random half, and the next model the other half."""
    rng = np.random.default_rng(5)
    return np.concatenate([[half, ~half] for half in rng.random((models // 2, count)) < 0.5])


def train(kind: str, models: int = MODELS) -> tuple[list[Shadow], Floats]:
    """Shadow models with (`private`) or without privacy (`plain`), and the candidates' labels."""
    splits = candidates(digits(**DATA))  # type: ignore[arg-type]
    labels = splits.train.y[:, 0].double().numpy()
    found = []
    with progress(f"membership attack, {kind}", models) as advance:
        for number, seen in enumerate(halves(len(labels), models)):
            found.append(_shadow(splits, kind, number, seen))
            advance(1)
    return found, labels


def candidates(splits: Splits) -> Splits:
    """The positives, and some of the negatives; the others take no part."""
    train = splits.train
    kept = np.flatnonzero((train.y[:, 0].numpy() > 0) | (np.arange(len(train)) % THINNED == 0))
    return splits._replace(train=train.take(kept))


def _shadow(splits: Splits, kind: str, number: int, seen: Masks) -> Shadow:
    (rounds, steps), some = STEPS[kind], splits.train.take(np.flatnonzero(seen))
    options = PRIVATE if kind == "private" else PLAIN
    risk = partial_auc(lam=0.5, scores="sigmoid")
    algorithm = build("fedxl2", risk, level="free", pool_u="server", **options)
    result = fit(
        network(number), some, algorithm, rounds=rounds, local_steps=steps, batch_size=BATCH, seed=number,
        eval_every=rounds, executor="vmap", device="cpu", test=splits.test, hooks=Hooks(say=lambda line: None),
    )  # fmt: skip
    everyone = splits.train.fetch(torch.arange(len(seen))).float()
    with torch.no_grad():
        outputs = result.model(everyone).squeeze(-1).double().numpy()
    spent = Spent(**result.history[-1]["privacy"]) if kind == "private" else None
    return Shadow(outputs, seen, float(result.metrics["test"]["auroc"]), spent)


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))


def attack(shadows: list[Shadow], labels: Floats) -> Attacked:
    """Each model in turn is the target; the others, but for its other half, say what is usual."""
    right = np.where(labels > 0, 1.0, -1.0) * np.stack([each.outputs - np.median(each.outputs) for each in shadows])
    seen = np.stack([each.seen for each in shadows])
    likelihood, threshold = [], []
    for target in range(len(shadows)):
        # Its other half goes, too: else one of the two means would rest on fewer models, and tell by that alone.
        others = np.arange(len(shadows)) // 2 != target // 2
        inside, outside = (np.nanmean(np.where(which[others], right[others], np.nan), 0) for which in (seen, ~seen))
        ratio = (right[target] - outside) ** 2 - (right[target] - inside) ** 2
        likelihood.append(metrics.auroc(ratio, seen[target].astype(float)))
        threshold.append(metrics.auroc(right[target], seen[target].astype(float)))
    return Attacked(np.array(likelihood), np.array(threshold))


def interval(values: Floats) -> tuple[float, float]:
    """The mean over models, and half of its interval of 95% (Student's)."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1)) * error


def most(spent: Spent) -> float:
    """The AUROC that no attack exceeds: that of one Gaussian mechanism, Phi(mu / sqrt 2) (Dong, Roth, Su 2022)."""
    gradients = spent.gradients / PRIVATE["dp_noise"] ** 2
    scores = spent.scores / (2 * PRIVATE["dp_score_noise"]) ** 2  # a score moves by at most half of its range
    return float(stats.norm.cdf(math.sqrt((gradients + scores) / 2)))
