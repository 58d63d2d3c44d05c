"""How clients' values become one: the weighted mean, and averages that a minority of hostile clients cannot move far.

Coordinate-wise median and trimmed mean: Yin, Chen, Ramchandran, Bartlett. Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates. ICML 2018. Multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer. Machine Learning
with Adversaries: Byzantine Tolerant Gradient Descent. NeurIPS 2017. With equal shares they are what is published;
with others, a client's values count by its share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedxl import tree

T = TypeVar("T")
# mean: the paper's. median, trimmed: coordinate by coordinate. krum: the mean of those that lie close together.
Aggregation = Literal["mean", "median", "trimmed", "krum"]
ROUNDING = 1e-9  # of a sum of shares, by which two of them are still the same


def average(stacked: T, shares: Tensor, otherwise: T) -> T:
    """The weighted mean over clients, leaf by leaf; `otherwise` where no client counts.

    Integer leaves (BatchNorm's counters) are averaged too, and rounded.
    """
    total = shares.sum()
    some = total > 0
    weights = shares / torch.where(some, total, torch.ones_like(total))

    def mean(leaf: Tensor, fallback: Tensor) -> Tensor:
        averaged = torch.tensordot(weights.to(_exact(leaf).dtype), _exact(leaf), 1)
        return torch.where(some, _as(leaf, averaged), fallback)

    return tree.map(mean, stacked, otherwise)


def average_counted(stacked: T, shares: Tensor, otherwise: T) -> T:
    """The weighted mean over the clients that count. The values of others may be infinite."""
    rows = torch.nonzero(shares > 0)[:, 0]
    return average(tree.map(lambda leaf: leaf[rows], stacked), shares[rows], otherwise)


def median(stacked: T, shares: Tensor, otherwise: T) -> T:
    """The weighted median of every number: half of the shares lie on either side of it.

    Where a value ends exactly at half of the shares, the median is the middle between it and the next.
    """

    def middle(values: Tensor, ends: Tensor) -> Tensor:
        half = 0.5 * ends[-1:]
        low, high = ((ends < half * (1 + side * ROUNDING)).sum(0, keepdim=True) for side in (-1, 1))
        last = len(values) - 1
        return 0.5 * (values.gather(0, low.clamp(max=last)) + values.gather(0, high.clamp(max=last)))[0]

    return _in_order(stacked, shares, otherwise, middle)


def trimmed(stacked: T, shares: Tensor, otherwise: T, cut: float) -> T:
    """The mean of every number without its smallest and its largest values, each of `cut` of the shares."""

    def inner(values: Tensor, ends: Tensor) -> Tensor:
        least, most = cut * ends[-1:], (1 - cut) * ends[-1:]
        begins = torch.cat((torch.zeros_like(ends[:1]), ends[:-1]))
        kept = (ends.minimum(most) - begins.maximum(least)).clamp(min=0)
        # What is cut off may be infinite.
        weighted = torch.where(kept > ROUNDING * ends[-1:], values * kept, 0.0)
        return weighted.sum(0) / (most - least)[0]

    return _in_order(stacked, shares, otherwise, inner)


def central(measured: Any, shares: Tensor, hostile: float) -> Tensor:
    """Multi-Krum: shares, with 0 for the clients whose vectors lie far from the others'.

    Of n clients that count, f = hostile * n (rounded down) may be hostile. A client's score is the sum of the squared
    distances to its n - f - 2 nearest others, and the n - f clients with the lowest scores are chosen. Its authors
    prove that this withstands f of them if n > 2 f + 2.
    """
    rows = torch.nonzero(shares > 0)[:, 0]
    n = len(rows)
    f = int(hostile * n + ROUNDING)
    if f == 0:
        return shares
    squares = sum(_squared_distances(leaf[rows]) for leaf in tree.leaves(measured))
    assert isinstance(squares, Tensor)
    # A client is at distance 0 from itself, so itself is the first. A NaN comes last.
    nearest = squares.sort(dim=1).values[:, 1 : 1 + max(1, n - f - 2)]
    best = rows[nearest.sum(1).argsort(stable=True)[: n - f]]
    return torch.zeros_like(shares).index_copy(0, best, shares[best])


def _squared_distances(leaf: Tensor) -> Tensor:
    """Between the rows of a leaf, [n, n], in double precision and without differences of large squares."""
    flat = leaf.reshape(len(leaf), -1).double()
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square()


def _in_order(stacked: T, shares: Tensor, otherwise: T, pick: Callable[[Tensor, Tensor], Tensor]) -> T:
    """For every number `pick(values, ends)`: clients' values in ascending order, and the sum of shares up to each."""
    rows = torch.nonzero(shares > 0)[:, 0]
    if not len(rows):
        return tree.map(torch.clone, otherwise)
    weights = shares[rows].double()

    def picked(leaf: Tensor) -> Tensor:
        values, order = _exact(leaf[rows]).sort(dim=0)
        return _as(leaf, pick(values, weights[order].cumsum(0)))

    return tree.map(picked, stacked)


def _exact(leaf: Tensor) -> Tensor:
    return leaf if leaf.is_floating_point() else leaf.double()


def _as(leaf: Tensor, found: Tensor) -> Tensor:
    """A result in the type of its leaf."""
    return found.to(leaf.dtype) if leaf.is_floating_point() else found.round().to(leaf.dtype)
