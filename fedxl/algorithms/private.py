"""Differential privacy of single examples: bounded gradients, noise, and nothing that couples examples.

Each example's gradient is cut to the length C, and noise is added to their sum (Abadi, Chu, Goodfellow, McMahan,
Mironov, Talwar, Zhang. Deep Learning with Differential Privacy. CCS 2016):

    gradient = (sum_i clip(g_i, C) + noise * C * N(0, 1)) / (B1 + B2)

g_i is example i's part of the gradient, times B1 + B2. In FeDXL it depends on example i, on its own u_i, on the
weights and on passive scores. So it is bounded one by one, if the passive scores were themselves made private and
nothing else mixes the examples of a batch. docs/differential-privacy.md has the promise and its proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedxl import tree
from fedxl.errors import require
from fedxl.models import Score, Weights
from fedxl.risks import XRisk
from fedxl.risks.scores import ScoreRange

# Rounding may leave a clipped gradient a little longer than the clip; so it is cut to a little less.
SHORTER = 1 - 1e-5


class Noise(NamedTuple):
    """The noise of a step: draws of N(0, 1)."""

    gradient: dict[str, Tensor]  # as the weights; {}: the phase has no gradient
    scores: Tensor  # [B1 + B2]


class PrivacySettings(NamedTuple):
    """What an algorithm promises its examples."""

    clip: float  # C
    noise: float  # standard deviation on the sum of gradients, in units of C
    score_noise: float  # standard deviation on an uploaded score, in units of the scores' range
    delta: float


def one_by_one(score: Score) -> Score:
    """Scores of examples each of which the network sees alone, so that no layer mixes them."""

    def apart(weights: Weights, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        alone = vmap(lambda each: _alone(score, weights, each), randomness="different")
        h: Tensor = alone(x)
        return h, weights.buffers

    return apart


def _alone(score: Score, weights: Weights, x: Tensor) -> Tensor:
    h, _ = score(weights, x.unsqueeze(0))
    return h.reshape(())


def private_outputs(
    score: Score, weights: Weights, x: Tensor, noise: Noise, settings: PrivacySettings
) -> tuple[Tensor, Callable[[Tensor], tuple[dict[str, Tensor]]], dict[str, Tensor]]:
    """Outputs [B], and how gradients by them become a private gradient by the weights, in place of a vjp."""

    def output(params: dict[str, Tensor], each: Tensor) -> Tensor:
        return _alone(score, weights._replace(params=params), each)

    found: Any = vmap(grad_and_value(output), in_dims=(None, 0), randomness="different")(weights.params, x)
    slopes, h = found  # [B, ...] of each example
    return h, lambda d: (noisy_mean(slopes, d, noise.gradient, settings),), weights.buffers


def noisy_mean(
    slopes: dict[str, Tensor], d: Tensor, noise: dict[str, Tensor], settings: PrivacySettings
) -> dict[str, Tensor]:
    """The sum of d_i slope_i, each clipped to C / B, plus noise. slopes: [B, ...]; d: [B]."""
    size, clip = d.shape[0], settings.clip
    weight = bounded(slopes, d * size, clip)
    # 0 * infinity is not 0: an example whose gradient is not finite must not be there at all.
    finite = tree.map(lambda leaf: torch.where(leaf.isfinite(), leaf, torch.zeros_like(leaf)), slopes)
    return tree.map(
        lambda leaf, z: (torch.tensordot(weight, leaf, 1) + settings.noise * clip * z) / size, finite, noise
    )


def bounded(slopes: dict[str, Tensor], d: Tensor, clip: float) -> Tensor:
    """d_i, lowered so that d_i slope_i is no longer than `clip`; 0 if its length is not a number."""
    each = [leaf.reshape(len(d), -1).norm(dim=1) for leaf in slopes.values()]
    lengths = torch.stack(each).norm(dim=0) * d.abs()  # [B]
    most = clip * SHORTER
    lowered = d * (most / lengths.clamp(min=most))
    return torch.where(lengths.isfinite(), lowered, torch.zeros_like(d))


def noisy_scores(scores: Tensor, noise: Tensor, settings: PrivacySettings, within: ScoreRange) -> Tensor:
    """Scores as they may leave a client: in range, with noise, and in range again."""
    width, middle = within.high - within.low, 0.5 * (within.low + within.high)
    known = torch.where(scores.isnan(), torch.full_like(scores, middle), scores).clamp(within.low, within.high)
    return (known + settings.score_noise * width * noise).clamp(within.low, within.high)


def blank(scores: Tensor, mass: Tensor, within: ScoreRange) -> Tensor:
    """Scores of a side that the client does not hold are of other examples, and stay at home."""
    return torch.where(mass > 0, scores, torch.full_like(scores, 0.5 * (within.low + within.high)))


def check_settings(settings: PrivacySettings) -> None:
    clip, noise, score_noise, delta = settings
    numbers = {"dp_clip": clip, "dp_noise": noise, "dp_score_noise": score_noise}
    for name, value in numbers.items():
        require(0 <= value < math.inf, f"{name} must be a finite number and not negative, got {value}")
    require(0 < delta < 1, f"dp_delta must lie in (0, 1), got {delta}")
    require(
        clip > 0 or not (noise or score_noise), "dp_noise and dp_score_noise need dp_clip, the bound of a gradient"
    )
    require(
        not clip or (noise > 0 and score_noise > 0),
        "dp_clip needs noise: set dp_noise (for gradients) and dp_score_noise (for uploaded scores), too",
    )


def check_method(algorithm: Any) -> None:
    """One line for a setting that couples examples, or that releases something without noise."""
    wanted = {
        "level": (algorithm.level == "free", "set level = 'free': other levels mix the scores of a batch"),
        "one_class": (algorithm.one_class != "centre", "one_class = 'centre' mixes the gradients of a batch"),
        "reach": (not algorithm.reach, "set reach = 0: it shortens steps by gradients without noise"),
        "mix": (not algorithm.mix, "set mix = 0: it pairs a client's examples with each other"),
        "worst_site": (not algorithm.worst_site, "set worst_site = 0: a client's own risk is sent without noise"),
        "estimator": (algorithm.estimator == "average", "set estimator = 'average': msvr scores a batch twice"),
        "fresh": (not algorithm.fresh, "set fresh = false: fresh scores are read in an order of their own"),
        "pool_u": (algorithm.pool_u == "server", "set pool_u = 'server': clients' u have no noise"),
    }
    for fine, why in wanted.values():
        require(fine, f"with dp_clip, {why}")
    _check_risk(algorithm.risk)


def _check_risk(risk: XRisk) -> None:
    require(
        not risk.thresholds,
        f"with dp_clip, an example must not change the gradients of others, and ties of {risk!r} do; use partial_auc",
    )
    require(
        risk.score_range.bounded and not risk.score_shape,
        "with dp_clip, scores must have a range: set scores = 'sigmoid' in [risk]",
    )
    require(
        set(risk.sides) == {"positive", "negative"},
        f"with dp_clip, a risk must pair positives with negatives; {risk!r} pairs {' with '.join(risk.sides)} "
        "examples, so that labels would leave clients without noise",
    )


def check_weights(weights: Weights) -> None:
    names = ", ".join(list(weights.buffers)[:2])
    require(
        not weights.buffers,
        f"with dp_clip, the network must have no buffers ({names}): statistics of a batch have no noise; use norm = "
        "'group'",
    )
