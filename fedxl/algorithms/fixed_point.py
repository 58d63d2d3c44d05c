"""Sums of clients' changes in whole numbers: exact, in any order, and so the same under masks as without them.

A client's value x counts by its weight w (its share of the model, at most 1 over all clients together). Against the
server's value x0 it becomes the code

    q = round(w (x - x0) 2^fraction),        and the mean is        x0 + sum q / (2^fraction sum w).

Codes are integers, so their sum has no rounding and no order. Secure aggregation (deploy/secure/) adds masks to them
that cancel modulo 2^bits. A simulation with the same setting, `fixed_point`, comes to the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedxl import tree
from fedxl.algorithms.protocol import Phase
from fedxl.errors import DivergedError, RefusedError


class FixedPoint(NamedTuple):
    """Which numbers codes stand for."""

    bits: int  # codes are added modulo 2^bits
    fraction: int  # a code of 1 stands for 2^-fraction

    @property
    def range(self) -> float:
        """The largest change that a client may send. Sums use half of the ring, so that a forged one shows."""
        return 2.0 ** (self.bits - 2 - self.fraction)

    def encode(self, change: Tensor, weight: Tensor) -> Tensor:
        """Codes of changes [n, ...] that count by weights [n]."""
        return torch.round(change * _column(weight, change) * 2.0**self.fraction).to(torch.int64)

    def check_sum(self, total: Tensor, clients: int) -> None:
        """Refuse a sum of codes that honest clients cannot have come to; each has rounded by at most one half."""
        most = 2 ** (self.bits - 2) + clients
        if bool((total > most).any()) or bool((total < -most).any()):
            raise RefusedError(f"the sum of the changes is out of the range of fixed_point = {self.bits}")


FORMS = {32: FixedPoint(32, 24), 64: FixedPoint(64, 40)}  # by the setting `fixed_point`


def codes(bits: int, phase: Phase, server: Any, updates: Any) -> dict[str, Any]:
    """The codes of stacked updates, one row per client. Raises DivergedError for a change beyond the range."""
    form, weights = FORMS[bits], phase.counts(updates.share).double()
    found = tree.map(lambda new, old: new.double() - old.double(), phase.parts(updates), phase.parts(server))
    # Who does not count may have come to anything.
    found = tree.map(lambda change: torch.where(_column(weights > 0, change), change, 0.0), found)
    largest = torch.stack([leaf.abs().amax() for leaf in tree.leaves(found) if leaf.numel()]).amax()
    if not bool(largest <= form.range):  # NaN is not, either
        wider = "; fixed_point = 64 has a wider range" if form.bits < 64 else ""
        raise DivergedError(
            f"a client's change of weights or G is {float(largest):.3g}, beyond {form.range:g}, the range of "
            f"fixed_point = {form.bits}; a lower learning rate would help{wider}"
        )
    return tree.map(lambda change: form.encode(change, weights), found)


def with_mean(bits: int, phase: Phase, server: Any, updates: Any, total: dict[str, Any]) -> Any:
    """Updates in which each row holds the mean that these sums of codes stand for.

    Any weighted mean of these rows is that mean, so an algorithm's `aggregate` stays the only one.
    """
    form, weight = FORMS[bits], phase.counts(updates.share).double().sum()
    each = 2.0**-form.fraction / torch.where(weight > 0, weight, torch.ones_like(weight))
    rows = len(updates.share.model)

    def mean(codes: Tensor, old: Tensor) -> Tensor:
        moved = old.double() + codes.double() * each
        found = moved if old.is_floating_point() else moved.round()
        return found.to(old.dtype).expand(rows, *old.shape)

    return updates._replace(**tree.map(mean, total, phase.parts(server)))


def flat(found: Any) -> Tensor:
    """All leaves as one vector."""
    return torch.cat([leaf.flatten() for leaf in tree.leaves(found)])


def unflat(like: Any, vector: Tensor) -> Any:
    """The inverse of `flat`, for a tree with the shapes of `like`."""
    pieces = vector.split([leaf.numel() for leaf in tree.leaves(like)])
    return tree.rebuild(like, (piece.view(leaf.shape) for piece, leaf in zip(pieces, tree.leaves(like), strict=True)))


def _column(each: Tensor, like: Tensor) -> Tensor:
    """A number for each row, in a shape that fits the rows."""
    return each.view(-1, *[1] * (like.ndim - 1))
