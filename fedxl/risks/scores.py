"""What risks are built of: names, links from a model's output to scores, and surrogates of a misranked pair."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, ParamSpec

import torch
from torch import Tensor
from torch.nn import functional as nnf

from fedxl.errors import require, unknown
from fedxl.options import require_types
from fedxl.risks.xrisk import RAW, ScoreRange, XRisk, identity

P = ParamSpec("P")


def named(build: Callable[P, XRisk]) -> Callable[P, XRisk]:
    """Let a factory's risks say how they were built.

    >>> @named
    ... def mine(power: float = 3) -> XRisk:
    ...     return XRisk(pair=lambda a, b, y: torch.relu(1 - gap(a, b)), outer=lambda g: g**power)
    >>> mine(power=2)
    mine(power=2)
    """
    parameters = inspect.signature(build).parameters

    @functools.wraps(build)
    def built(*args: P.args, **options: P.kwargs) -> XRisk:
        try:
            given = inspect.signature(build).bind(*args, **options).arguments
        except TypeError as error:
            raise TypeError(f"{build.__name__}() {error}") from None
        require_types(build, given)
        # One name for one risk: options at their defaults are left out.
        call = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != parameters[name].default)
        return replace(build(*args, **options), name=f"{build.__name__}({call})")

    return built


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


# Of the indicator [t <= 0], where t = h(should be high) - h(should be low) and m is a margin.
SURROGATES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "psm": lambda t, m: torch.sigmoid(-t),  # pairwise sigmoid: l(t) + l(-t) = 1, robust to flipped labels
    "square": lambda t, m: (m - t).square(),
    "squared_hinge": lambda t, m: torch.relu(m - t).square(),
    "logistic": lambda t, m: nnf.softplus(-t),
}


def surrogate_named(name: str, margin: float) -> Callable[[Tensor], Tensor]:
    if name not in SURROGATES:
        raise unknown("surrogate", name, SURROGATES)
    require(margin > 0, f"margin must be positive, got {margin}")
    return lambda t: SURROGATES[name](t, margin)


def kink(surrogate: str, margin: float) -> float:
    """The only t at which a surrogate is not smooth; infinite if there is none."""
    return margin if surrogate == "squared_hinge" else math.inf
