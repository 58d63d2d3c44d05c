"""Differential privacy of single examples: bounded gradients, noise, and nothing that couples examples.

Each example's gradient is cut to the length C, and noise is added to their sum (Abadi, Chu, Goodfellow, McMahan,
Mironov, Talwar, Zhang. Deep Learning with Differential Privacy. CCS 2016):

    gradient = unit * (sum_i trunc(clip(g_i, C) / unit) + K) / (B1 + B2),    unit = noise * C / 2^20

g_i is example i's part of the gradient, times B1 + B2. In FeDXL it depends on example i, on its own u_i, on the
weights and on passive scores. So it is bounded one by one, if the passive scores were themselves made private and
nothing else mixes the examples of a batch. The sum and K, a discrete Gaussian with standard deviation 2^20, are whole
numbers, and their sum is exact: the last bits of a rounded sum would tell which examples are in it.
docs/differential-privacy.md has the promise and its proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedxl import tree
from fedxl.algorithms.gradient import Back, Exact
from fedxl.errors import UserError, first_line, require
from fedxl.models import Score, Weights
from fedxl.risks.pairing import Entry
from fedxl.risks.xrisk import ScoreRange, XRisk

# Rounding may leave a clipped gradient a little longer than the clip; so it is cut to a little less.
SHORTER = 1 - 1e-5
LEAST = 1e-9  # of dp_clip: single precision holds its grid, and what is that short trains nothing
UNITS = 2**20  # the standard deviation of the noise, in units of the grid that it is added on


class Noise(NamedTuple):
    """The noise of a step: whole numbers, draws of a discrete Gaussian with standard deviation UNITS."""

    gradient: dict[str, Tensor]  # as the weights; {} if the round has no gradient
    scores: Tensor  # [B1 + B2]


@dataclass(frozen=True)
class ByExample(Exact):
    """Each example's gradient, cut to dp_clip, with noise on their sum; noise on every score that leaves."""

    private: ClassVar[bool] = True

    dp_clip: float
    dp_noise: float
    dp_score_noise: float
    dp_delta: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("dp_clip", "dp_noise", "dp_score_noise"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} must be a finite number and not negative, got {value}")
        require(0 < self.dp_delta < 1, f"dp_delta must lie in (0, 1), got {self.dp_delta}")
        require(self.dp_clip > 0, "dp_noise and dp_score_noise need dp_clip, the bound of a gradient")
        require(self.dp_clip >= LEAST, f"dp_clip must be at least {LEAST:g}, got {self.dp_clip:g}")
        require(
            self.dp_noise > 0 and self.dp_score_noise > 0,
            "dp_clip needs noise: set dp_noise (for gradients) and dp_score_noise (for uploaded scores), too",
        )

    def check(self, algorithm: Any) -> None:
        """Raises UserError for a setting that couples examples, or that releases something without noise."""
        pool = algorithm.pool
        wanted = (
            (algorithm.level.level == "free", "set level = 'free': other levels mix the scores of a batch"),
            (not pool.fresh, "set fresh = false: fresh scores are read in an order of their own"),
            (pool.pool_u == "server", "set pool_u = 'server': clients' u have no noise"),
        )
        for fine, why in wanted:
            require(fine, f"with dp_clip, {why}")
        _check_risk(algorithm.risk)

    def check_weights(self, weights: Weights) -> None:
        names = ", ".join(list(weights.buffers)[:2])
        require(
            not weights.buffers,
            f"with dp_clip, the network must have no buffers ({names}): statistics of a batch have no noise; use "
            "norm = 'group'",
        )

    def outputs(
        self, score: Score, weights: Weights, x: Tensor, noise: Noise
    ) -> tuple[Tensor, Back, dict[str, Tensor]]:
        def output(params: dict[str, Tensor], each: Tensor) -> Tensor:
            return _alone(score, weights._replace(params=params), each)

        slopes, h = _each(grad_and_value(output), weights.params, x)  # [B, ...] of each example
        return h, lambda d: (noisy_mean(slopes, d, noise.gradient, self.dp_clip, self.dp_noise),), weights.buffers

    def scorer(self, score: Score) -> Score:
        return one_by_one(score)

    def noise_like(self, params: dict[str, Tensor], count: int, trains: bool) -> Any:
        return Noise(params if trains else {}, next(iter(params.values())).new_zeros(count))

    def disclose(self, a: Entry, b: Entry, noise: Noise, within: ScoreRange) -> tuple[Entry, Entry]:
        parts = noise.scores.split([len(a.score), len(b.score)])
        pairs = zip((a, b), parts, strict=True)
        found = [e._replace(score=noisy_scores(e.score, z, self.dp_score_noise, within)) for e, z in pairs]
        return found[0], found[1]

    def blank(self, entry: Entry, mass: Tensor, within: ScoreRange) -> Entry:
        """Scores of a side that the client does not hold are of other examples, and stay at home."""
        middle = torch.full_like(entry.score, 0.5 * (within.low + within.high))
        return entry._replace(score=torch.where(mass > 0, entry.score, middle))


def gradient(
    dp_clip: float = 0.0,  # differential privacy: the length that an example's gradient is cut to; 0: no privacy
    dp_noise: float = 0.0,  # standard deviation of the noise on the sum of a step's gradients, in units of dp_clip
    dp_score_noise: float = 0.0,  # standard deviation of the noise on an uploaded score, which lies in [0, 1]
    dp_delta: float = 1e-5,  # the delta at which epsilon is reported; below one in the number of examples
) -> Exact:
    """The gradient that these options ask for."""
    if not (dp_clip or dp_noise or dp_score_noise):
        return Exact()
    return ByExample(dp_clip, dp_noise, dp_score_noise, dp_delta)


def one_by_one(score: Score) -> Score:
    """Scores of examples each of which the network sees alone, so that no layer mixes them."""

    def apart(weights: Weights, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return _each(lambda found, each: _alone(score, found, each), weights, x), weights.buffers

    return apart


def _each(call: Callable[..., Any], weights: Any, x: Tensor) -> Any:
    """The call for each example alone."""
    try:
        return vmap(call, in_dims=(None, 0), randomness="different")(weights, x)
    except (RuntimeError, ValueError) as error:  # the latter of layers that want more than one example
        why = "dp_clip needs each example's own gradient, and torch cannot vectorise this model"
        raise UserError(f"{why}: {first_line(error)}") from error


def _alone(score: Score, weights: Weights, x: Tensor) -> Tensor:
    h, _ = score(weights, x.unsqueeze(0))
    return h.reshape(())


def noisy_mean(
    slopes: dict[str, Tensor], d: Tensor, noise: dict[str, Tensor], clip: float, sigma: float
) -> dict[str, Tensor]:
    """The sum of d_i slope_i, each clipped to C / B, plus noise. slopes: [B, ...]; d: [B]."""
    size, unit = d.shape[0], sigma * clip / UNITS
    weight = bounded(slopes, d * size, clip) / unit

    def mean(leaf: Tensor, z: Tensor) -> Tensor:
        # 0 * infinity is not 0: an example whose gradient is not finite must not be there at all. Nor must one whose
        # weight the leaf's precision cannot hold, as for tiny slopes: it would become infinite, and the sum tell so.
        finite = torch.where(leaf.isfinite(), leaf, torch.zeros_like(leaf))
        held = torch.where(weight.abs() <= torch.finfo(leaf.dtype).max, weight, torch.zeros_like(weight))
        # Cut to whole numbers one by one: towards 0, which makes none longer. Doubles add them without rounding.
        each = torch.trunc(held.to(leaf.dtype).view(-1, *[1] * (leaf.ndim - 1)) * finite)
        return ((each.sum(0, dtype=torch.float64) + z) * (unit / size)).to(leaf.dtype)

    return tree.map(mean, slopes, noise)


def bounded(slopes: dict[str, Tensor], d: Tensor, clip: float) -> Tensor:
    """d_i in double, lowered so that d_i slope_i is no longer than `clip`; 0 if its length is not a number."""
    each = [leaf.reshape(len(d), -1).norm(dim=1, dtype=torch.float64) for leaf in slopes.values()]
    lengths = torch.stack(each).norm(dim=0) * d.abs()  # [B]
    most = clip * SHORTER
    lowered = d * (most / lengths.clamp(min=most))
    return torch.where(lengths.isfinite(), lowered, torch.zeros_like(lowered))


def noisy_scores(scores: Tensor, noise: Tensor, sigma: float, within: ScoreRange) -> Tensor:
    """Scores as they may leave a client: in range, with noise, and in range again."""
    width, middle = within.high - within.low, 0.5 * (within.low + within.high)
    known = torch.where(scores.isnan(), torch.full_like(scores, middle), scores).clamp(within.low, within.high)
    unit = sigma * width / UNITS  # whole numbers of it, as of gradients
    noisy = (torch.trunc((known.double() - middle) / unit) + noise) * unit + middle
    return noisy.clamp(within.low, within.high).to(scores.dtype)


def _check_risk(risk: XRisk) -> None:
    plain = not risk.pairing.labels and not risk.pairing.ranked and not risk.pairing.timed
    require(plain, "dp_clip is for risks of one label, not for several labels or queries")
    require(
        not risk.mixes_pairs,
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
