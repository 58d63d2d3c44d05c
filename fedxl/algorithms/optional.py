"""What an algorithm may have beside its contract, and what holds for one that has it not.

An algorithm of one's own need not know of any of this; `Descent` brings most of it. Nobody else asks whether an
algorithm has an attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedxl.algorithms.protocol import AnyAlgorithm, AnyPhase, Health, Reading, ServerState, Share

Shown = Callable[[Tensor, Tensor], Tensor]  # scores and labels -> the scores whose risk is optimised


def is_private(algorithm: AnyAlgorithm) -> bool:
    """Whether it clips and adds noise, so that the run has an epsilon. None has unless it says so."""
    return bool(getattr(algorithm, "private", False))


def noise_like(phase: AnyPhase, server: ServerState, reading: Reading) -> Any:
    """The noise that a step wants, with the right names, types and shapes; nothing, unless it wants some."""
    wanted = getattr(phase, "noise_like", None)
    return () if wanted is None else wanted(server, reading)


def fixed_point(part: AnyAlgorithm | AnyPhase) -> int:
    """Bits of the whole numbers in which changes are summed; 0: they are sums of floats."""
    return int(getattr(part, "fixed_point", 0))


def summed_parts(part: AnyAlgorithm | AnyPhase) -> tuple[str, ...]:
    """The fields of an update that the server needs in sum only; none, unless they are named."""
    return tuple(getattr(part, "summed", ()))


def trained(algorithm: AnyAlgorithm, share: Share) -> Tensor:
    """How much each client counts in the average of the models: by its share, unless some clients do not train."""
    find = getattr(algorithm, "trained", None)
    counts: Tensor = share.model if find is None else find(share)
    return counts


def can_scale(algorithm: AnyAlgorithm) -> bool:
    """Whether it can make a round's step longer or shorter, as unbiased cohorts of unlike weights need it."""
    return hasattr(algorithm, "scaled") and hasattr(algorithm, "trained")


def plain_average(algorithm: AnyAlgorithm) -> bool:
    """Whether the server takes the mean as the new model, without momentum or Adam."""
    return bool(getattr(algorithm, "server_update", "mean") == "mean")


def order_of_scores(algorithm: AnyAlgorithm) -> str:
    """The order in which scores are uploaded. What uploads none shows no order of draws."""
    return str(getattr(algorithm, "order", "sorted"))


def pooled_outputs(algorithm: AnyAlgorithm, server: ServerState) -> Tensor | None:
    """Raw scores that the pool holds; None without a pool."""
    find = getattr(algorithm, "pooled_outputs", None)
    return None if find is None else find(server)


def shown(algorithm: AnyAlgorithm) -> Shown | None:
    """The scores whose risk it optimises, if they are not the network's own."""
    return getattr(algorithm, "shown", None)


def health(algorithm: AnyAlgorithm, server: ServerState, h: Tensor | None, labels: Tensor | None) -> Health:
    """What may have gone wrong in training; nothing that would be known, without a look at it."""
    examine = getattr(algorithm, "health", None)
    return Health() if examine is None else examine(server, h, labels)


def has_free_level(algorithm: AnyAlgorithm) -> bool:
    """Whether nothing keeps the level of scores where it is."""
    return bool(getattr(algorithm, "level", "") == "free")


def regresses_grades(algorithm: AnyAlgorithm) -> bool:
    """Whether it learns grades themselves, so that it needs no queries."""
    return bool(getattr(algorithm, "loss", "") == "squared")
