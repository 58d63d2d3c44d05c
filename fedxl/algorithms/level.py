"""The level of scores: where all of them lie together. A pairwise risk hardly sees it, and skewed sites move it.

Gradients by scores sum to zero over all pairs of a federation, but not at one site: a site that counts more for its
positives than for its negatives moves all of its scores up, step after step, until the link is flat. The average over
sites cannot undo that. docs/maths.md has the algebra.

free: steps may do anything, as in the paper. even: a client that holds both classes pulls as hard on S1 as on S2,
whatever it counts for on either, and a guard keeps its level where the link passes gradient. The guard changes the
outputs of such clients alone, so it is left out where clients with one class train: scores could not be compared.
And G is held: each step of a round adds to the server's G instead of its own (FedCM; Xu et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.options import require_types
from fedxl.risks.xrisk import XRisk

Kind = Literal["even", "free"]
Members = Any  # which outputs [B, *t] are those of S1, and which are those of S2: `pairing.Slices`, or the like

# The limits of the guard. Within them a sigmoid passes most of its gradient.
MOST_SPREAD = 1.0
MOST_LEVEL = 1.0
TINY = 1e-12


@dataclass(frozen=True)
class Level:
    """What a client's steps may do to the level of its scores."""

    level: Kind = "even"  # of all scores: even keeps it, free (the paper) lets steps move it
    guard: bool = True  # whether an even level guards outputs; not if one-class clients train, or scores are normed
    hold: float = 0.3  # weight of a local gradient beside the G that an even level holds; 0: G moves in each step

    def __post_init__(self) -> None:
        require_types(type(self), vars(self))
        require(0 <= self.hold < 1, f"hold must lie in [0, 1), got {self.hold}")

    def kept(self, risk: XRisk) -> bool:
        """Whether there is a level, and it is kept: an unbounded link never saturates, and vectors have no level."""
        return self.level == "even" and risk.score_range.bounded and risk.single_score and risk.pairing.has_level

    def trains_one_class(self, risk: XRisk, one_class: float) -> bool:
        """Whether clients with one class should train, by `DataFacts.one_class`; scores without bounds run away."""
        return one_class >= (2 if self.kept(risk) else 3)

    def guards(self, risk: XRisk) -> bool:
        return self.guard and self.kept(risk)

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
