"""X-risks: objectives that compare every example of S1 with all of S2.

    F(w) = mean_{i in S1} f(g_i),    g_i = estimate_{j in S2} l(h(w; z_i), h(w; z_j))

`estimate` is the mean, or `log mean exp(l / lam)` for the entropic risks (partial AUC, contrastive), whose inner
estimates live in the log domain so that no score, however large, overflows. Two-way partial AUC has a log-mean-exp
in place of the outer mean, too. Every gradient estimator of the paper is the gradient of one scalar, the *pull*
(docs/maths.md):

    pull = mean_ij < c(l_ij, u_i), l_ij >,   c carries no gradient,   u_i the running estimate of g_i
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedxl.risks.pairing import Entry, OneLabel, Pairing, PairLoss, Sides
from fedxl.tree import map as map_tree

Mask = Tensor | None  # [.., B1, B2] how much pairs count, 0 if they do not meet; None if all meet
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


RAW = ScoreRange(-MOST_RAW, MOST_RAW, bounded=False)


@dataclass(frozen=True, eq=False, repr=False)
class XRisk:
    """One X-risk. `m` numbers make an inner estimate, `d` numbers a score; both may be none (a plain scalar).

    A risk of your own needs `pair` and `outer` (and is faster with a `slope`):

    >>> cubed = XRisk(pair=lambda a, b, y: torch.exp(-gap(a, b)), outer=lambda g: g**3)
    >>> cubed.value(torch.tensor([0.0, 0.0]), torch.tensor([1, 0]))
    tensor(1.)
    """

    mixes_pairs: ClassVar[bool] = False  # whether the coupling of a pair depends on other pairs of its batch

    pair: PairLoss  # a [.., B1, *d], b [.., B2, *d], labels y of b [.., B2] -> [.., B1, B2, *m]
    outer: Callable[[Tensor], Tensor]  # f: inner estimates [.., *m] -> [..]; `identity` makes the risk linear
    slope: Callable[[Tensor], Tensor] | float | None = None  # df/dg, over lam if there is one; None: by autograd
    lam: float | None = None  # None: g is the mean of l; otherwise g = log mean exp(l / lam)
    lam_outer: float | None = None  # None: F is the mean of f; otherwise F = lam_outer log mean exp(f / lam_outer)
    sides: Sides = ("positive", "negative")  # which labels form S1 and S2
    inner_shape: tuple[int, ...] = ()  # m
    score_shape: tuple[int, ...] = ()  # d
    link: Callable[[Tensor], Tensor] = identity  # from the model's output to what is paired and pooled
    score_range: ScoreRange = RAW  # what the link can give
    # With exact u a coupling is at most |S2|. A stale passive u can be exceeded by more, and this cap prevents NaN.
    # Risks of raw scores need a lower one: nothing bounds how far a model moves.
    max_coupling: float = 1e6  # with lam: the most that a pair may count, 1 on average
    double: bool = False  # pairs and inner estimates are float64, whatever the scores are; for losses above 1e4
    metric: str = "auroc"  # by which the best model is chosen
    pairing: Pairing = OneLabel()  # who meets whom
    whole: Callable[[XRisk, Entry, Entry], Tensor] = lambda risk, a, b: risk.inner(a, b)  # `inner` of all data
    name: str = ""  # how it was built, for people to read

    def __repr__(self) -> str:
        return self.name or f"XRisk(pair={self.pair}, outer={self.outer}, lam={self.lam})"

    @property
    def linear(self) -> bool:
        """f is the identity: u plays no part (FeDXL1)."""
        return self.lam is None and self.lam_outer is None and self.outer is identity

    @property
    def labels(self) -> int:
        """How many labels there are, each with a score of its own; 0 if there is one label and one score."""
        return len(self.pairing.labels)

    @property
    def single_score(self) -> bool:
        """Whether an example has one number as its score, or one for each of several labels."""
        return not self.score_shape or self.labels > 0

    def dtype(self, scores: torch.dtype) -> torch.dtype:
        """Of pairs and inner estimates of scores in this type."""
        return torch.float64 if self.double else scores

    def losses(self, a: Entry, b: Entry) -> Tensor:
        """Every pair's l [.., B1, B2, *m]."""
        if self.double:
            a, b = (entry._replace(score=entry.score.double()) for entry in (a, b))
        return self.pairing.losses(self.pair, a, b)

    def pairs(self, a: Entry, b: Entry) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """Every pair's l, and how weights on pairs become gradients by the scores of a and of b."""
        l, back, *_ = torch.func.vjp(
            lambda s, t: self.losses(a._replace(score=s), b._replace(score=t)), a.score, b.score
        )
        return l, back

    def estimate(self, l: Tensor, meets: Mask = None) -> Tensor:
        """Pairs [.., B1, B2, *m] -> inner estimates [.., B1, *m]; NaN for a row that meets nobody."""
        l, meets = l.to(self.dtype(l.dtype)), None if meets is None else self._like_pairs(meets)
        return _mean(l, meets, self._j) if self.lam is None else log_mean_exp(l / self.lam, self._j, meets)

    def update_u(self, u: Tensor, l: Tensor, meets: Mask, gamma: float) -> Tensor:
        """u <- (1 - gamma) u + gamma g for a batch with the pairs l; a row that meets nobody keeps its u."""
        g = self.estimate(l, meets)
        new = self.blend(u, g, gamma)
        return new if meets is None else torch.where(g.isnan(), u, new)

    def blend(self, u: Tensor, g: Tensor, gamma: float) -> Tensor:
        """(1 - gamma) u + gamma g, in the log domain if estimates live there; a first visit (NaN) takes g."""
        if self.lam is None:
            blended = torch.lerp(u, g, gamma)
        elif gamma < 1:
            blended = torch.logaddexp(u + math.log1p(-gamma), g + math.log(gamma))
        else:
            blended = g
        return torch.where(u.isnan(), g, blended)

    def pair_weights(
        self, l: Tensor, u: Tensor, meets: Mask = None, sample: Tensor | None = None, forces: Tensor | None = None
    ) -> Tensor:
        """c_ij / (B1 n_i), n_i the pairs that row i meets: carried back through `pairs`, the gradient of the pull.

        `sample`: as in `emphasis`. `forces`: [.., B1 or 1, B2 or 1] how much pairs count, for example because a
        client holds a part of those that a row meets in the whole risk.
        """
        rows, columns = l.shape[self._j - 1], l.shape[self._j]
        c = torch.ones_like(l) if self.linear else self.coupling(l, u, sample)
        if meets is None:
            each = (c / (rows * columns)).expand_as(l)
        else:
            share = self._like_pairs(meets / (rows * self.pairing.met(meets)))
            # A row that meets nobody may have no u yet.
            each = torch.where((share > 0) & ~c.isnan(), c * share, 0.0).expand_as(l)
        return each if forces is None else each * self._like_pairs(forces)

    def coupling(self, l: Tensor, u: Tensor, sample: Tensor | None = None) -> Tensor:
        """c = |S1| |S2| dF/dl_ij, at the running estimate u instead of g; carries no gradient."""
        c = self._inner_coupling(l.detach(), u.detach().unsqueeze(self._j))
        if self.lam_outer is None:
            return c
        emphasis = self.emphasis(u, sample)
        return c * emphasis.reshape(*emphasis.shape, 1, *[1] * len(self.inner_shape))

    def _inner_coupling(self, l: Tensor, u: Tensor) -> Tensor:
        """|S2| df(g_i)/dl_ij."""
        if self.lam is None:
            return self._slope(u)
        share = torch.exp((l / self.lam - u).clamp(max=math.log(self.max_coupling)))
        return share if self.slope == 1 else self._slope(u) * share

    def emphasis(self, u: Tensor, sample: Tensor | None = None) -> Tensor:
        """|S1| dF/df(g_i) for every row of u [.., B1, *m]: 1, or exp(f / lam_outer) over its mean in S1.

        `sample` [n, *m] holds estimates of examples of S1 of all clients. The mean is taken over the sample with one
        of its entries replaced by the row itself, so that no row has an emphasis above n. Without a sample, it is
        taken over the rows.
        """
        f = self.outer(u.detach())
        if self.lam_outer is None:
            return torch.ones_like(f)
        f = f / self.lam_outer
        if sample is None:
            return torch.exp(f - log_mean_exp(f, -1).unsqueeze(-1))
        among = _with_each(f, self.outer(sample.detach()) / self.lam_outer)
        return torch.exp(f - log_mean_exp(among, -1))

    def _slope(self, u: Tensor) -> Tensor:
        if callable(self.slope):
            return self.slope(u)
        if self.slope is not None:
            return torch.full_like(u, self.slope)
        gradient: Tensor = torch.func.grad(lambda g: self.outer(g).sum())(u)
        return gradient if self.lam is None else gradient / self.lam

    @property
    def _j(self) -> int:
        """The dimension of S2 in a block of pairs."""
        return -1 - len(self.inner_shape)

    def _like_pairs(self, each: Tensor) -> Tensor:
        """[.., B1, B2] in a shape that fits pairs [.., B1, B2, *m]."""
        return each.reshape(*each.shape, *[1] * len(self.inner_shape))

    def inner(self, a: Entry, b: Entry, block: int = 2**19) -> Tensor:
        """Exact inner estimates of every a against every b; memory holds `block` pairs at a time, or one row's."""
        count = a.score.shape[0]
        if count == 1 or count * b.score.shape[0] <= block:
            return self.estimate(self.losses(a, b), self.pairing.meets(a, b, self.sides[1]))
        halves = [map_tree(lambda leaf, at=at: leaf[at], a) for at in (slice(count // 2), slice(count // 2, None))]
        return torch.cat([self.inner(half, b, block) for half in halves])

    def value(self, h: Tensor, labels: Tensor, groups: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        """The exact empirical risk of the model outputs `h`, for monitoring; NaN if S1 or S2 is empty.

        groups: the query of each example; labels are then grades. time: of each event (label 1) or last look (0).
        """
        return self.pairing.value(self, self.link(h), labels, groups, time)

    def over_first(self, f: Tensor) -> Tensor:
        """F from f of all examples of S1."""
        return f.mean() if self.lam_outer is None else self.lam_outer * log_mean_exp(f / self.lam_outer, -1)


def _with_each(rows: Tensor, sample: Tensor) -> Tensor:
    """A sample [n] for each row [.., B1], in which one of its entries is the row itself, [.., B1, n]."""
    row, entry = (torch.arange(x.shape[-1], device=x.device) for x in (rows, sample))
    replaced = row.unsqueeze(-1) % len(entry) == entry  # [B1, n]
    return torch.where(replaced, rows.unsqueeze(-1), sample.unsqueeze(-2))


def _mean(x: Tensor, weight: Tensor | None, dim: int) -> Tensor:
    return x.mean(dim) if weight is None else (x * weight).sum(dim) / weight.sum(dim)


def log_mean_exp(x: Tensor, dim: int, weight: Tensor | None = None) -> Tensor:
    """log mean exp(x) along a dimension, by weight if there is one; NaN where weights sum to 0."""
    if weight is not None:
        x = torch.where(weight > 0, x, torch.finfo(x.dtype).min)
    top = x.detach().amax(dim, keepdim=True)
    return _mean((x - top).exp(), weight, dim).log() + top.squeeze(dim)


def gap(a: Tensor, b: Tensor) -> Tensor:
    """a_i - b_j for every pair: [.., B1], [.., B2] -> [.., B1, B2]."""
    return a.unsqueeze(-1) - b.unsqueeze(-2)
