"""Several labels in a step: which score of an example of S1 counts, and how much each couple does.

Row r of S1 is couple r of the client: the example r // L for the label r % L. docs/maths.md has the algebra.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedxl.algorithms.level import MOST_LEVEL, MOST_SPREAD, TINY, even
from fedxl.algorithms.pool import Pool
from fedxl.algorithms.protocol import Share
from fedxl.errors import RefusedError
from fedxl.risks import Several, XRisk, belongs


def chosen(h: Tensor, rows: Tensor) -> Tensor:
    """Scores of S1 [B1, L] as couples [B1, 2]: the score of the row's label, and the label."""
    label = (rows % h.shape[-1]).unsqueeze(-1)
    return torch.cat((torch.take_along_dim(h, label, -1), label.to(h.dtype)), -1)


def unchosen(da: Tensor, rows: Tensor, labels: int) -> Tensor:
    """Gradients by couples [B1, 2] as gradients by all scores of the rows, [B1, L]."""
    mine = (rows % labels).unsqueeze(-1) == torch.arange(labels, device=rows.device)
    return torch.where(mine, da[..., :1], 0.0)


def members(risk: XRisk, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Which scores of a batch [B1 + B2, L] are those of S1 and of S2: only a row's own label counts in S1."""
    own = (rows % risk.labels).unsqueeze(-1) == torch.arange(risk.labels, device=rows.device)
    second = of_side(risk, y[rows.shape[0] :], 1)
    return torch.cat((own, torch.zeros_like(second))), torch.cat((torch.zeros_like(own), second))


def of_side(risk: XRisk, y: Tensor, side: int) -> Tensor:
    """Which labels [n, L] put their example into S1 (side 0) or S2 (side 1); one that is not known does neither."""
    return belongs(y, risk.sides[side]) & (y >= 0)


def guarded(h: Tensor, first: Tensor, second: Tensor, both: Tensor) -> Tensor:
    """`level.guarded`, label by label [n, L], with the scores of S1 and of S2 given as masks.

    both: [L] which labels are guarded. A label without a score of S1 in the batch is judged by those of S2, and one
    without any of S2 is left as it is.
    """
    count1, count2 = (mask.sum(0).clamp(min=1).to(h.dtype) for mask in (first, second))
    some1, some2 = first.any(0), second.any(0)

    def mean(values: Tensor) -> Tensor:
        mean2 = torch.where(second, values, 0.0).sum(0) / count2
        return 0.5 * (torch.where(some1, torch.where(first, values, 0.0).sum(0) / count1, mean2) + mean2)

    middle = mean(h)
    spread = torch.sqrt(mean((h - middle).square()) + TINY)
    moved = (h - middle) * (MOST_SPREAD / spread).clamp(max=1) + middle.clamp(-MOST_LEVEL, MOST_LEVEL)
    return torch.where(both & some2, moved, h)


def held_both(factors: Tensor) -> Tensor:
    """Of which labels [L] a client with these factors [2, L] holds both sides."""
    return (factors > 0).all(0)


def turns(risk: XRisk, factors: Tensor) -> Tensor:
    """What a row of S1 counts for each label [L], with the client's factor left out.

    A client reads the labels that it holds in turn, so that a row stands for as many of them.
    """
    assert isinstance(risk, Several)
    weights = torch.tensor(risk.label_weights, dtype=factors.dtype, device=factors.device)
    return weights * (factors[0] > 0).sum()


def forces(risk: XRisk, factors: Tensor, level: str, lend: bool, a: Tensor, passive: Tensor) -> Tensor:
    """What the pulls on the couples a [B1, 2], and on S2 by the passive couples, are multiplied by: [2, B1].

    Pooled couples are drawn by the labels' weights, so these are in the draws. lend: for a label of which a client
    holds one side it only lends its scores.
    """
    assert isinstance(risk, Several)
    turn, both, mean = turns(risk, factors), held_both(factors), even(factors)
    factors = torch.where(both, mean, factors) if level == "even" else factors
    factors = torch.where(both, factors, 0.0) if lend else factors
    return torch.stack(((turn * factors[0])[risk.label_of(a)], factors[1][risk.label_of(passive)]))


def largest_factor(risk: XRisk, factors: Tensor, level: str) -> Tensor:
    """By how much a client's gradient is multiplied at most, its labels together; at least 1.

    factors: [2, L], or of several clients [C, 2, L].
    """
    assert isinstance(risk, Several)
    factors = factors.movedim(-2, 0)
    factors = torch.where(held_both(factors), even(factors), factors) if level == "even" else factors
    weights = torch.tensor(risk.label_weights, dtype=factors.dtype, device=factors.device)
    return (weights * factors.amax(0)).sum(-1).clamp(min=1).double()


def own_pairs(risk: XRisk, factors: Tensor, a: Tensor) -> Tensor:
    """What couples a [B1, 2] count where a client pairs its own examples alone: [B1]."""
    assert isinstance(risk, Several)
    return turns(risk, factors)[risk.label_of(a)]


def couple_weights(risk: XRisk, factors: Tensor, a: Tensor, model: Tensor) -> Tensor:
    """How likely uploaded couples [n, 2] are to be drawn, by their label; model: the client's share of the models."""
    assert isinstance(risk, Several)
    return model * (turns(risk, factors) * factors[0])[risk.label_of(a)] / len(a)


def usable(risk: XRisk, pool: Pool) -> Pool:
    """The pool, in which couples of several labels that met no pair yet, so that they have no u, are never drawn."""
    first = pool.first
    if not risk.labels or risk.linear:
        return pool
    known = ~first.u.isnan().flatten(1).any(1) if first.u.ndim > 1 else ~first.u.isnan()
    u = torch.where(first.u.isnan(), 0.0, first.u)
    return pool._replace(first=first._replace(u=u, weight=torch.where(known, first.weight, 0.0)))


def check_couples(risk: XRisk, share: Share, uploads: Pool) -> None:
    """RefusedError unless the labels of couples are labels, and their weights are those of their labels."""
    first, second = uploads
    label = first.a[..., 1]
    if not bool(((label >= 0) & (label < risk.labels) & (label == label.round())).all()):
        raise RefusedError("its scores (first) are not scores of labels that there are")
    if not bool(torch.isin(second.y, second.y.new_tensor([-1.0, 0.0, 1.0])).all()):
        raise RefusedError("its labels (second) are not all 0, 1, or -1 for unknown")
    assert isinstance(share.labels, Tensor)
    wanted = couple_weights(risk, share.labels, first.a, share.model)
    if not torch.allclose(first.weight, wanted, rtol=1e-5, atol=0):
        raise RefusedError("the weights of its scores (first) are none that it was given")
