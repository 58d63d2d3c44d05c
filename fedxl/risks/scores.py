"""Which scores a model's output becomes, and in which range they lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedxl.errors import unknown

# No network in single precision gives a score beyond this and still learns: of two neighbouring numbers there one is
# 0.001 larger. Every named surrogate and its derivative is finite there; the largest is square's, 4e8 for a pair.
MOST_RAW = 1e4


def identity(h: Tensor) -> Tensor:
    return h


class ScoreRange(NamedTuple):
    """Which scores a link can give, entry by entry. A score outside of it is a mistake or an attack."""

    low: float
    high: float
    unit: int = 0  # a score is vectors of so many numbers side by side, none longer than 1; 0: it is not
    bounded: bool = True  # False: the link has no bound of its own, and low and high are far beyond honest scores

    def holds(self, scores: Tensor) -> bool:
        """Whether all of these scores [n, *d] are in range; NaN is not."""
        if self.unit:
            lengths = scores.unflatten(-1, (-1, self.unit)).norm(dim=-1)
            return bool((lengths <= 1 + 1e-3).all())  # which the entries' own range follows from
        return bool(((scores >= self.low) & (scores <= self.high)).all())

    def probes(self, shape: tuple[int, ...]) -> Tensor | None:
        """Scores [n, *d] between which pair losses reach their extremes; None: not to be found by a few of them."""
        if not shape:
            return torch.linspace(self.low, self.high, 65, dtype=torch.float64)
        if not self.unit:
            return None
        vectors = math.prod(shape) // self.unit
        signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * vectors)  # [2^v, v]
        along = torch.zeros(self.unit, dtype=torch.float64)
        along[0] = 1
        return (signs.reshape(-1, vectors, 1) * along).reshape(-1, *shape)


RAW = ScoreRange(-MOST_RAW, MOST_RAW, bounded=False)


class Link(NamedTuple):
    """From a model's output to what is paired and pooled."""

    apply: Callable[[Tensor], Tensor]
    range: ScoreRange
    inverse: Callable[[Tensor], Tensor]


LINKS: Mapping[str, Link] = {
    "raw": Link(identity, RAW, identity),
    "sigmoid": Link(torch.sigmoid, ScoreRange(0.0, 1.0), torch.logit),
}


def outputs_behind(link: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor | None:
    """The finite outputs that a link made these scores of; None if it is no link of the table."""
    inverse = next((known.inverse for known in LINKS.values() if known.apply is link), None)
    if inverse is None:
        return None
    outputs = inverse(scores)
    return outputs[torch.isfinite(outputs)]


def link_named(scores: str) -> Link:
    if scores not in LINKS:
        raise unknown("kind of scores", scores, LINKS)
    return LINKS[scores]
