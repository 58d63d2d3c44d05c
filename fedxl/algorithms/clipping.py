"""Norm clipping: no client's change counts for more than a few usual ones, whatever its size.

Clipping by a norm that adapts to the clients': Andrew, Thakkar, McMahan, Ramaswamy. Differentially Private Learning
with Adaptive Clipping. NeurIPS 2021. Here it is the running median of the clients' norms, which fewer than half of
them cannot raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedxl import tree

ENOUGH = 3  # clients that a round needs for a median of its own
REMEMBERED = 20  # rounds

Parts = Mapping[str, Any]  # by name: trees of tensors. Each has a norm of its own


class Clipped(NamedTuple):
    parts: dict[str, Any]  # of all clients, stacked
    norms: Tensor


def no_norms(parts: int, like: Tensor) -> Tensor:
    """[REMEMBERED, parts] the usual norm of each part in past rounds, oldest first; 0: not known."""
    return torch.zeros(REMEMBERED, parts, dtype=torch.float64, device=like.device)


def clipped(parts: Parts, origin: Parts, counted: Tensor, factors: Tensor, norms: Tensor, limit: float) -> Clipped:
    """Changes from the origin, scaled down to `limit` times the usual norm; and the norms to remember.

    counted: [C] whether a client counts in the average; the others say nothing about what is usual. factors: [C] by
    how much a client's gradient was multiplied; its norm may be larger by as much.
    """
    done, usual_now = {}, []
    for column, (name, part) in enumerate(parts.items()):
        change = tree.map(torch.sub, part, origin[name])
        sizes = _norms(change, len(counted), norms) / factors  # [C]
        usual = usual_size(sizes[counted], norms[:, column])
        scale = torch.where(sizes.isfinite(), (limit * usual / sizes).nan_to_num(1.0).clamp(max=1), 0.0)
        scale = torch.where(usual > 0, scale, torch.ones_like(scale))
        done[name] = tree.map(partial(_scaled, scale), part, change, origin[name])
        usual_now.append(middle((sizes * scale)[counted]))
    latest = torch.stack(usual_now)
    # A part that nobody moved leaves what is known of it.
    latest = torch.where(latest > 0, latest, norms[-1])
    return Clipped(done, torch.cat((norms[1:], latest[None])))


def usual_size(sizes: Tensor, past: Tensor) -> Tensor:
    """The median of a round's sizes above 0, or that of past rounds if it is larger; 0: not known.

    Of two sizes the smaller one counts, and one size says nothing: then past rounds do.
    """
    present = sizes[sizes > 0]
    before = middle(past)
    if len(present) >= ENOUGH:
        return torch.maximum(before, middle(present))
    return torch.maximum(before, present.min()) if len(present) == 2 else before


def middle(sizes: Tensor) -> Tensor:
    """The median of the sizes above 0; 0 if there are none."""
    present = sizes[sizes > 0]
    return present.quantile(0.5) if len(present) else sizes.new_zeros(())


def _norms(change: Any, clients: int, like: Tensor) -> Tensor:
    """The norm of each client's change, over all leaves together, [C]."""
    squares = like.new_zeros(clients)
    for leaf in tree.leaves(change):
        squares = squares + leaf.reshape(clients, -1).double().square().sum(1)
    return squares.sqrt()


def _scaled(scale: Tensor, leaf: Tensor, change: Tensor, origin: Tensor) -> Tensor:
    """origin + scale * change; the same bits where nothing is scaled, and the origin where nothing is left."""
    by = scale.view(-1, *[1] * (leaf.ndim - 1)).to(leaf.dtype)
    shorter = torch.where(by > 0, origin + by * change, origin)
    return torch.where(by < 1, shorter, leaf)
