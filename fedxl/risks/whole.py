"""Inner estimates of a whole data set: `XRisk.inner` of n1 rows and n2 columns, faster than pair by pair.

If l depends on the gap of two scores alone, the inner estimate of a row is one function g of its score. Where l is
smooth, so is g: on a short piece of rows it is the polynomial through `NODES` of its values, up to rounding, and only
the nodes meet all columns. A piece is halved until the last coefficients of its polynomial are rounding.

The second derivative of a squared hinge jumps at a - b = margin. Columns for which that happens within a piece are
left to its halves. Most columns are far from most pieces, so that the cost is about (n1 + n2) log n1, not n1 n2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedxl.risks.pairing import Entry
from fedxl.risks.xrisk import XRisk, gap, identity
from fedxl.tree import map as map_tree

Whole = Callable[[XRisk, Entry, Entry], Tensor]
FEW = 2**24  # pairs, which are estimated directly
ROWS = 64  # of a piece that is not halved
NODES = 17
ROUNDING = 2e-14  # of a coefficient, relative to the largest
RANGE = 0.01  # the least mean of a piece, relative to its largest: errors are relative to that
TILE = 2**12  # columns


def by_gaps(kink: float = math.inf) -> Whole:
    """Of a loss of the gap a - b that is smooth everywhere else; NaN if a score is not finite."""

    def whole(risk: XRisk, a: Entry, b: Entry) -> Tensor:
        if len(a.score) * len(b.score) <= FEW or a.score.requires_grad:
            return risk.inner(a, b)
        first, second = (map_tree(lambda leaf: leaf.double().cpu(), entry) for entry in (a, b))
        scores, place = first.score.unique(return_inverse=True)
        u = torch.full((len(scores), *risk.inner_shape), math.nan, dtype=torch.float64)
        if bool(scores.isfinite().all() & second.score.isfinite().all()):
            order = second.score.argsort()
            second = map_tree(lambda leaf: leaf[order], second)
            _fill(risk, u, first._replace(score=scores), second, kink)
        return u[place].to(a.score.device, risk.dtype(a.score.dtype))

    return whole


def _fill(risk: XRisk, u: Tensor, a: Entry, b: Entry, kink: float, known: int = 0) -> None:
    """Estimate rows by columns, both ascending, into u, which holds `known` columns already.

    Rows have the same target: none, or the size of their query.
    """
    x = a.score

    def inner(score: Tensor, columns: Entry) -> Tensor:
        return risk.inner(Entry(score, map_tree(lambda leaf: leaf[:1].expand(len(score)), a.target)), columns)

    def add(found: Tensor, columns: Entry) -> int:
        total = known + len(columns.score)
        u.copy_(risk.blend(u, found, len(columns.score) / total))
        return total

    if len(x) <= ROWS:
        add(inner(x, b), b)
        return
    begin = int(torch.searchsorted(b.score, x[:1] - kink, right=True))
    end = max(begin, int(torch.searchsorted(b.score, x[-1:] - kink)))
    far = map_tree(lambda leaf: torch.cat((leaf[:begin], leaf[end:])), b)
    least = RANGE if risk.lam is None else 0.0
    found = _interpolate(lambda nodes: inner(nodes, far), x, least) if len(far.score) else None
    if found is not None:
        known, b = add(found, far), map_tree(lambda leaf: leaf[begin:end], b)
    for half in (slice(len(x) // 2), slice(len(x) // 2, None)) if len(b.score) else ():
        _fill(risk, u[half], a._replace(score=x[half]), b, kink, known)


def _interpolate(g: Callable[[Tensor], Tensor], x: Tensor, least: float) -> Tensor | None:
    """g at ascending points by a polynomial in Chebyshev's form; None if g is no such polynomial up to rounding.

    least: also None if the smallest value is less than this part of the largest.
    """
    middle, reach = (x[0] + x[-1]) / 2, (x[-1] - x[0]) / 2
    degrees = torch.arange(NODES, dtype=x.dtype)
    angles = degrees * math.pi / (NODES - 1)
    halved = torch.ones_like(degrees).index_fill(0, torch.tensor([0, NODES - 1]), 0.5)
    values = g(middle + reach * angles.cos())  # [NODES], or [NODES, m]
    transform = 2 / (NODES - 1) * halved * (degrees[:, None] * angles).cos() * halved[:, None]
    coefficients = transform @ values  # [NODES, *m]
    converged = coefficients[-3:].abs().max() <= ROUNDING * coefficients.abs().max()
    if not bool(converged & (values.abs().amin(0) >= least * values.abs().amax(0)).all()):
        return None
    turned = ((x - middle) / reach).clamp(-1, 1).acos()
    return (turned[:, None] * degrees).cos() @ coefficients


def by_ranks(levels: tuple[float, ...], loss: Callable[[Tensor], Tensor], kink: float) -> Whole:
    """Of a CVaR risk whose loss falls with the gap: columns that count have the same ranks in every row.

    Only f, the last number of an estimate, is computed.
    """
    mean = XRisk(pair=lambda a, b, y: loss(gap(a, b)), outer=identity, whole=by_gaps(kink))

    def whole(risk: XRisk, a: Entry, b: Entry) -> Tensor:
        if len(a.score) * len(b.score) <= FEW or a.score.requires_grad:
            return risk.inner(a, b)
        scores, columns = a.score.double(), b.score.double().sort(descending=True).values
        rank = torch.arange(len(columns), dtype=scores.dtype, device=scores.device)
        least, most = sum(levels[1:]) * len(columns), levels[0] * len(columns)
        weight = ((rank + 1).clamp(max=most) - rank.clamp(min=least)).clamp(0, 1)
        total = sum(weight[i] * loss(scores - columns[i]) for i in ((weight > 0) & (weight < 1)).nonzero())
        inside = columns[weight == 1]
        if len(inside):
            total = total + len(inside) * mean.whole(mean, Entry(scores, ()), Entry(inside, inside))
        return torch.as_tensor(total / (most - least)).unsqueeze(-1).to(risk.dtype(a.score.dtype))

    return whole


def by_tiles(risk: XRisk, a: Entry, b: Entry) -> Tensor:
    """Of scores that are vectors: some columns at a time, which caches hold while all rows meet them."""
    u, known = None, 0
    for start in range(0, len(b.score), TILE):
        part = map_tree(lambda leaf, at=start: leaf[at : at + TILE], b)
        found, known = risk.inner(a, part), known + len(part.score)
        u = found if u is None else risk.blend(u, found, len(part.score) / known)
    assert u is not None, "S2 has an example"
    return u
