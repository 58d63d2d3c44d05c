"""The level of scores: where all of them lie together. A pairwise risk hardly sees it, and skewed sites move it.

Gradients by scores sum to zero over all pairs of a federation, but not at one site: a site that counts more for its
positives than for its negatives moves all of its scores up, step after step, until the link is flat. The average over
sites cannot undo that. docs/maths.md has the algebra.

free: steps may do anything, as in the paper. bounded: if a client holds both classes, its level stays where the link
passes gradient. even: besides, such a client pulls as hard on S1 as on S2, whatever it counts for on either.
balanced: bounded, and no step of such a client moves its level at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.options import require_types
from fedxl.risks.xrisk import XRisk

Kind = Literal["even", "balanced", "bounded", "free"]
Guard = Literal["auto", "on", "off"]
Members = Any  # which outputs [B, *t] are those of S1, and which are those of S2: `pairing.Slices`, or the like

# The limits of the guard. Within them a sigmoid passes most of its gradient.
MOST_SPREAD = 1.0
MOST_LEVEL = 1.0
TINY = 1e-12


@dataclass(frozen=True)
class Level:
    """What a client's steps may do to the level of its scores."""

    level: Kind = "free"  # what steps may do to the level of all scores: free, bounded, even or balanced
    guard: Guard = "auto"  # whether such levels guard outputs: on, off; auto: on unless the network norms its scores

    def __post_init__(self) -> None:
        require_types(type(self), vars(self))
        on = self.guard == "on" and self.level == "free"
        require(not on, "guard = 'on' needs a level that guards: set level = 'bounded', 'even' or 'balanced'")

    def guards(self, risk: XRisk) -> bool:
        """Whether there is anything to guard: an unbounded link never saturates, and vectors have no level."""
        wanted = self.level != "free" and self.guard != "off"
        return wanted and risk.score_range.bounded and risk.single_score

    def guard_outputs(self, risk: XRisk, h: Tensor, members: Members, both: Tensor) -> Tensor:
        """Outputs [B, *t] with their spread scaled down to MOST_SPREAD and their level moved to within MOST_LEVEL.

        Level and spread are those of the outputs of S1 and of S2, which count the same, however many there are.
        Unchanged within these limits. Beyond them no gradient moves the level, or the spread, any further. A client
        with one class keeps its outputs (both: [*t]): their level is what it has learned.
        """
        if not self.guards(risk):
            return h
        middle = members.mean(h)
        spread = torch.sqrt(members.mean((h - middle).square()) + TINY)
        moved = (h - middle) * (MOST_SPREAD / spread).clamp(max=1) + middle.clamp(-MOST_LEVEL, MOST_LEVEL)
        return torch.where(members.present(both), moved, h)

    def even_factors(self, factors: Tensor) -> Tensor:
        """Factors [2, *t] of S1 and of S2, both replaced by their geometric mean if the client holds both."""
        if self.level != "even":
            return factors
        mean = (factors[0] * factors[1]).sqrt().expand_as(factors)
        return torch.where(mean > 0, mean, factors)

    def balance_gradient(self, risk: XRisk, d: Tensor, members: Members, both: Tensor) -> Tensor:
        """Gradients by outputs [B, *t], each side shifted by half of their sum, so that together they sum to zero."""
        if self.level != "balanced" or not risk.single_score:
            return d
        return torch.where(both > 0, members.shift(d, d.sum(0)), d)
