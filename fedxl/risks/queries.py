"""Risks of queries: items are ranked within their query, and pairs of different queries never meet.

    F(w) = mean_q mean_{i in S1_q} weight_i f(s_i),    s_i = sum_{j in S_q} l(h_i, h_j)

S_q holds the items of query q and S1_q the relevant ones (grade y > 0). s_i is size_q times the inner mean g_i, of
which the running estimate u_i is kept, as for every X-risk (SONG: Qiu et al., Large-scale Stochastic Optimization of
NDCG Surrogates for Deep Learning with Provable Convergence, ICML 2022). Weight and size are constants of an item:

    weight_i = |S1_q| gain_i / ideal_q,   gain_i = 2^y_i - 1,   size_q = |S_q|

so that the inner mean over S1_q is the sum of gain_i / ideal_q f(s_i): every query counts the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.risks.scores import identity
from fedxl.risks.xrisk import Side, XRisk, gap, named

MOST_QUERIES = 2**16  # of a step
HIGHEST_GRADE = 30  # 2^y must stay a number of moderate size


class ItemConstants(NamedTuple):
    """What f needs to know of each item."""

    weight: Tensor  # [n] |S1_q| gain / ideal; 0 for items that are not relevant
    size: Tensor  # [n] items of its query


class QueryTotals(NamedTuple):
    """What the constants of a query's items follow from, besides their own grades; each is one number."""

    relevant: Tensor  # |S1_q|
    size: Tensor  # |S_q|
    ideal: Tensor  # what divides gains; 0 if no item is relevant


@dataclass(frozen=True, eq=False, repr=False)
class QueryRisk(XRisk):
    """An X-risk whose pairs lie within queries. `outer` and `slope` are those of the sum s, not of the mean."""

    estimate_shape: ClassVar[tuple[int, ...]] = ()  # of an inner estimate

    sides: tuple[Side, Side] = ("positive", "all")
    metric: str = "ndcg@10"
    queries: int = 4  # queries that a step reads
    ideal: Callable[[Tensor], Tensor] = (
        torch.sum
    )  # what divides gains: a function of a query's, from the largest down

    def __post_init__(self) -> None:
        right = 0 < self.queries <= MOST_QUERIES
        require(right, f"queries must lie between 1 and {MOST_QUERIES}, got {self.queries}")
        plain = self.inner_shape == self.estimate_shape and not self.score_shape and self.lam_outer is None
        require(plain, "a risk of queries has one score an item, one inner estimate and no lam_outer")

    def summed(self, u: Tensor, size: Tensor) -> Tensor:
        """Sums s of means u; of log-means the log of the sum."""
        return u * size if self.lam is None else u + size.log()

    def estimated(self, l: Tensor, size: Tensor, share: Tensor) -> Tensor:
        """Inner estimates [B1, *m] from pairs l [B1, n, *m] with items of one query, which count by their share [n].

        size: [B1] how many items the query has.
        """
        if self.lam is None:
            return (l * share).sum(-1)
        return torch.logsumexp(l / self.lam + share.log(), -1)

    def follow(self, u: Tensor, l: Tensor, size: Tensor, gamma: float) -> Tensor:
        """What `renew` is for other risks: u [.., Q, B1, *m] after a batch of pairs l [.., Q, B1, B2, *m].

        size: [.., Q, B1] how many items the queries have.
        """
        return self.renew(u, l, gamma)

    def contribution(self, u: Tensor, size: Tensor) -> Tensor:
        """What items add to F, but for their weights: f of their sums."""
        return self.outer(self.summed(u, size))

    def item_weights(self, l: Tensor, u: Tensor, items: ItemConstants) -> Tensor:
        """What `weights` is for other risks: c over the number of pairs [.., Q, B1, B2]; u and items are [.., Q, B1].

        With u = g it is the gradient by l of the mean over queries and rows of weight f(s).
        """
        l, u = l.detach(), u.detach()
        slope = self._slope(self.summed(u, items.size)).unsqueeze(-1)  # [.., Q, B1, 1]
        if self.lam is None:
            c = slope * items.size.unsqueeze(-1)
        else:
            # No pair of a query can hold more than all of its mass. A stale u may say so, and is not believed.
            most = items.size.clamp(min=1).log().unsqueeze(-1)
            c = slope * torch.exp(torch.minimum(l / self.lam - u.unsqueeze(-1), most))
        number = math.prod(l.shape[-3:])
        return (c * (items.weight.unsqueeze(-1) / number)).expand_as(l)

    def constants(self, grades: Tensor, query: Tensor) -> ItemConstants:
        """Of all items of all queries."""
        weight, size = (torch.zeros(len(grades), dtype=torch.float64, device=grades.device) for _ in range(2))
        for members in in_queries(query):
            relevant, size[members], ideal = self.totals(grades[members])
            if bool(relevant):
                weight[members] = relevant * gains(grades[members]) / ideal
        return ItemConstants(weight, size)

    def totals(self, grades: Tensor) -> QueryTotals:
        """Of the items of one query, in any order."""
        gain = gains(grades)
        ideal = self.ideal(gain.sort(descending=True).values)
        return QueryTotals((gain > 0).sum().double(), gain.new_tensor(len(gain)), ideal)

    def value(self, h: Tensor, labels: Tensor, query: Tensor | None = None) -> Tensor:
        """The exact risk: the mean over queries with a relevant item; NaN if there is none. labels are grades."""
        assert query is not None, "a risk of queries needs the query of each item"
        h, items, each = self.link(h), self.constants(labels, query), []
        for members in in_queries(query):
            first = members[labels[members] > 0]
            if len(first):
                nothing = torch.zeros(len(members), dtype=h.dtype, device=h.device)
                u, size = self.inner(h[first], h[members], nothing), items.size[first].to(h.dtype)
                each.append((items.weight[first].to(h.dtype) * self.contribution(u, size)).mean())
        return torch.stack(each).mean() if each else h.new_tensor(float("nan"))


def gains(grades: Tensor) -> Tensor:
    """2^y - 1."""
    return torch.exp2(grades.double()) - 1


def in_queries(query: Tensor) -> tuple[Tensor, ...]:
    """The positions of each query's items."""
    _, counts = torch.unique(query, return_counts=True)
    members: tuple[Tensor, ...] = query.argsort(stable=True).split(counts.tolist())
    return members


def ideal_dcg(top: int = 0) -> Callable[[Tensor], Tensor]:
    """The largest DCG that a ranking can have, of the first `top` places alone if that is not 0."""

    def ideal(gain: Tensor) -> Tensor:
        places = torch.arange(2, len(gain) + 2, dtype=gain.dtype, device=gain.device)
        discounted = gain / places.log2()
        return discounted[:top].sum() if top else discounted.sum()

    return ideal


@named
def listwise(temperature: float = 1.0, queries: int = 4) -> XRisk:
    """Listwise cross entropy: the softmax of a query's scores against its gains (Cao et al., ICML 2007).

    F = - mean_q sum_{i in S1_q} p_i log( exp(h_i / t) / sum_{j in S_q} exp(h_j / t) ),  p_i = gain_i / sum of gains.
    As an X-risk: the inner estimate is log mean_j exp((h_j - h_i) / t), and f adds log |S_q|.
    """
    require(temperature > 0, f"temperature must be positive, got {temperature}")
    return QueryRisk(
        pair=lambda a, b, y: -gap(a, b) / temperature,
        outer=identity,
        slope=1.0,
        lam=1.0,
        queries=queries,
    )
