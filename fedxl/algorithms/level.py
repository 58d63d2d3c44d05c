"""The level of scores: where all of them lie together. A pairwise risk hardly sees it, and skewed sites move it.

Gradients by scores sum to zero over all pairs of a federation, but not at one site: a site that counts more for its
positives than for its negatives moves all of its scores up, step after step, until the link is flat. The average over
sites cannot undo that. docs/maths.md has the algebra.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# What a client's steps may do to the level of its scores.
# free: anything, as in the paper.
# bounded: where a client holds both classes, it stays where the link passes gradient.
# even: besides, such a client pulls as hard on S1 as on S2, whatever it counts for on either.
# balanced: bounded, and no step of such a client moves its level at all.
Level = Literal["even", "balanced", "bounded", "free"]
# Whether the guard below is used where `level` asks for it. auto: unless the network norms its scores itself.
Guard = Literal["auto", "on", "off"]
# What a client with one class does. lend: it scores, and does not train. train: it trains like all others.
# centre: it trains on its pull less the mean. auto: it lends where levels are
# even or balanced and some client holds both classes, and trains otherwise.
OneClass = Literal["auto", "lend", "train", "centre"]

# The limits of the guard. Within them a sigmoid passes most of its gradient.
MOST_SPREAD = 1.0
MOST_LEVEL = 1.0
TINY = 1e-12


def guarded(h: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Outputs with their spread scaled down to MOST_SPREAD and their level moved to within MOST_LEVEL.

    Level and spread are those of the outputs of S1 and of S2, which count the same, however many there are.
    Unchanged within these limits. Beyond them no gradient moves the level, or the spread, any further.
    """
    mean = 0.5 * (first.mean(0) + second.mean(0))
    variance = 0.5 * ((first - mean).square().mean(0) + (second - mean).square().mean(0))
    spread = torch.sqrt(variance + TINY)
    return (h - mean) * (MOST_SPREAD / spread).clamp(max=1) + mean.clamp(-MOST_LEVEL, MOST_LEVEL)


def even(factors: Tensor) -> Tensor:
    """Factors [2, ...] of S1 and of S2, both replaced by their geometric mean."""
    return (factors[0] * factors[1]).sqrt().expand_as(factors)


def balanced(d: Tensor, size1: int) -> Tensor:
    """Gradients by outputs [B1 + B2], each side shifted by half of their sum, so that together they sum to zero."""
    half, size2 = 0.5 * d.sum(0), d.shape[0] - size1
    return torch.cat((d[:size1] - half / size1, d[size1:] - half / size2))


def centred(d: Tensor, size1: int) -> Tensor:
    """Gradients by outputs, each side less its mean: they sum to zero on either side."""
    return torch.cat((d[:size1] - d[:size1].mean(0), d[size1:] - d[size1:].mean(0)))


def pace(d: Tensor, descent: Tensor, moved: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """By how much to shorten a step, and how far the level has moved then, so that it moves by `reach` at most.

    The mean output, weighted by its gradients d, has gradient g / sum(d), where g is that of the weights. A step s
    moves it by <g, s> / sum(d); `descent` is <g, s>.
    """
    total = d.sum()
    ahead = (descent / torch.where(total == 0, torch.ones_like(total), total)).abs()
    scale = ((reach - moved) / ahead.clamp(min=TINY)).clamp(0, 1)
    return scale, moved + scale * ahead
