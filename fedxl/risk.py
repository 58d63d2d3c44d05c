"""X-risks: objectives that compare every example of S1 with all of S2.

    F(w) = mean_{i in S1} f(g_i),    g_i = estimate_{j in S2} l(h(w; z_i), h(w; z_j), y_j)

`estimate` is the mean, or `log mean exp(l / lam)` for the entropic risks (partial AUC, contrastive), whose inner
estimates live in the log domain so that no score, however large, overflows. Every gradient estimator of the paper
is the gradient of one scalar, the *pull* (docs/maths.md):

    pull = mean_ij < c(l_ij, u_i), l_ij >,   c carries no gradient,   u_i the running estimate of g_i
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from fedxl.errors import UserError, first_line, require, unknown

Side = Literal["positive", "negative", "all", "none"]

# With exact u a coupling is at most |S2| (one pair holds all of the mass). A stale passive u can be exceeded by more;
# this cap keeps such a pair from turning the model into NaN and is out of reach for |S2| up to a million.
MAX_COUPLING = 1e6
# No network in single precision gives a score beyond this and still learns: of two neighbouring numbers there one is
# 0.001 larger. Every named surrogate and its derivative is finite there; the largest is square's, 4e8 for a pair.
MOST_RAW = 1e4
# The limit of u where the range of scores says nothing of losses: vectors of any length, or losses that overflow.
MOST_ESTIMATE = 1e9


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


@dataclass(frozen=True, eq=False)
class XRisk:
    """One X-risk. `m` numbers make an inner estimate, `d` numbers a score; both may be none (a plain scalar).

    A risk of your own needs `pair` and `outer` (and is faster with a `slope`); the exponential loss, cubed:

    >>> mine = XRisk(
    ...     pair=lambda a, b, y: torch.exp(-gap(a, b)),
    ...     outer=lambda g: g**3,
    ... )
    >>> mine.value(torch.tensor([0.0, 0.0]), torch.tensor([1, 0]))
    tensor(1.)
    """

    pair: Callable[[Tensor, Tensor, Tensor], Tensor]  # a [.., B1, *d], b [.., B2, *d], y [.., B2] -> [.., B1, B2, *m]
    outer: Callable[[Tensor], Tensor]  # f: inner estimates [.., *m] -> [..]; `identity` makes the risk linear
    slope: Callable[[Tensor], Tensor] | float | None = None  # df/dg, over lam where there is one; None: by autograd
    lam: float | None = None  # None: g is the mean of l; otherwise g = log mean exp(l / lam)
    sides: tuple[Side, Side] = ("positive", "negative")  # which labels form S1 and S2
    inner_shape: tuple[int, ...] = ()  # m
    score_shape: tuple[int, ...] = ()  # d
    link: Callable[[Tensor], Tensor] = identity  # from the model's output to what is paired and pooled
    score_range: ScoreRange = RAW  # what the link can give
    metric: str = "auroc"  # the figure by which the best model is chosen

    @property
    def linear(self) -> bool:
        """f is the identity: u plays no part (FeDXL1)."""
        return self.lam is None and self.outer is identity

    @property
    def _j(self) -> int:
        """The dimension of S2 in a block of pairs."""
        return -1 - len(self.inner_shape)

    def estimate(self, l: Tensor) -> Tensor:
        """Pairs [.., B1, B2, *m] -> inner estimates [.., B1, *m]."""
        if self.lam is None:
            return l.mean(self._j)
        scaled = l / self.lam
        top = scaled.detach().amax(self._j, keepdim=True)  # log mean exp, with the largest term taken out
        return (scaled - top).exp().mean(self._j).log() + top.squeeze(self._j)

    def blend(self, u: Tensor, g: Tensor, gamma: float) -> Tensor:
        """(1 - gamma) u + gamma g, in the log domain where estimates live there; a first visit (NaN) takes g."""
        if self.lam is None:
            blended = torch.lerp(u, g, gamma)
        elif gamma < 1:
            blended = torch.logaddexp(u + math.log1p(-gamma), g + math.log(gamma))
        else:
            blended = g
        return torch.where(u.isnan(), g, blended)

    def coupling(self, l: Tensor, u: Tensor) -> Tensor:
        """c = |S2| df(g_i)/dl_ij, at the running estimate u instead of g; carries no gradient."""
        u = u.detach().unsqueeze(self._j)
        if self.lam is None:
            return self._slope(u)
        share = torch.exp((l.detach() / self.lam - u).clamp(max=math.log(MAX_COUPLING)))
        return share if self.slope == 1 else self._slope(u) * share

    def _slope(self, u: Tensor) -> Tensor:
        if callable(self.slope):
            return self.slope(u)
        if self.slope is not None:
            return torch.full_like(u, self.slope)
        gradient: Tensor = torch.func.grad(lambda g: self.outer(g).sum())(u)
        return gradient if self.lam is None else gradient / self.lam

    def pairs(self, a: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """Every pair's l [.., B1, B2, *m], and how weights on the pairs become gradients by a and by b."""
        l, back, *_ = torch.func.vjp(lambda a, b: self.pair(a, b, y), a, b)
        return l, back

    def weights(self, l: Tensor, u: Tensor) -> Tensor:
        """c over the number of pairs: carried back through `pairs` it gives the gradient of the pull, a mean."""
        number = l.shape[self._j - 1] * l.shape[self._j]
        return torch.full_like(l, 1 / number) if self.linear else (self.coupling(l, u) / number).expand_as(l)

    def inner(self, a: Tensor, b: Tensor, y: Tensor, chunk: int = 2**22) -> Tensor:
        """Exact inner estimates of every a against every b, a block of about `chunk` pairs at a time."""
        rows = max(1, chunk // max(1, b.shape[0]))
        return torch.cat([self.estimate(self.pair(part, b, y)) for part in a.split(rows)])

    def inner_range(self) -> tuple[Tensor, Tensor]:
        """Between which numbers [*m] inner estimates of scores in range lie.

        A mean, of whatever pairs and however blended, lies between the smallest and the largest pair loss; so does a
        log-mean-exp, over lam. Both losses are looked for among pairs of probing scores, with a margin for pairs
        that have their extreme between two probes.
        """
        l = self._probed()
        if l is None or not bool(l.isfinite().all()):
            limit = torch.full(self.inner_shape, MOST_ESTIMATE, dtype=torch.float64)
            return -limit, limit
        l = l if self.lam is None else l / self.lam
        least, most = l.amin(0), l.amax(0)
        margin = 0.05 * (most - least) + 1e-3
        low = least - margin
        if self.lam is None:
            # The mean of losses that are never negative is not either, and f may have its pole just below 0.
            low = torch.where(least >= 0, low.clamp(min=0), low)
        return low, most + margin

    def _probed(self) -> Tensor | None:
        """The losses [pairs, *m] of probing scores, with either label."""
        probes = self.score_range.probes(self.score_shape)
        if probes is None:
            return None
        labels = torch.tensor([0.0, 1.0], dtype=torch.float64).repeat_interleave(len(probes))
        return self.pair(probes, torch.cat((probes, probes)), labels).flatten(0, 1)

    def value(self, h: Tensor, labels: Tensor) -> Tensor:
        """The exact empirical risk of the model outputs `h`, for monitoring; NaN where S1 or S2 is empty."""
        h, (first, second) = self.link(h), self.sides
        a, b = h[belongs(labels, first)], h[belongs(labels, second)]
        if not len(a) or not len(b):
            return h.new_tensor(float("nan"))
        y = labels[belongs(labels, second)].to(h.dtype)
        return self.outer(self.inner(a, b, y)).mean()


def check_risk(risk: XRisk) -> None:
    """One line if a risk of the user's own does not give one number (or `m`) a pair, whatever dimensions lead."""
    a, b = (torch.zeros(2, size, *risk.score_shape) for size in (3, 4))
    try:
        l = risk.pair(a, b, torch.zeros(2, 4))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"the risk's pair cannot take a [2, 3], b [2, 4], y [2, 4]: {first_line(error)}") from None
    wanted = (2, 3, 4, *risk.inner_shape)
    right = tuple(l.shape) == wanted
    require(right, f"the risk's pair must return {list(wanted)} for a [2, 3], b [2, 4], not {list(l.shape)}")
    f = risk.outer(torch.ones(2, 3, *risk.inner_shape))
    require(tuple(f.shape) == (2, 3), f"the risk's outer must work entry by entry: [2, 3] became {list(f.shape)}")


def belongs(labels: Tensor, side: Side) -> Tensor:
    """Which examples form a side: a mask over labels of 0 and 1."""
    masks = {
        "positive": labels > 0,
        "negative": labels <= 0,
        "all": torch.ones_like(labels, dtype=torch.bool),
    }
    return masks.get(side, torch.zeros_like(labels, dtype=torch.bool))


def gap(a: Tensor, b: Tensor) -> Tensor:
    """a_i - b_j for every pair: [.., B1], [.., B2] -> [.., B1, B2]."""
    return a.unsqueeze(-1) - b.unsqueeze(-2)


# Surrogates of the indicator [t <= 0] of a misranked pair, t = h(should be high) - h(should be low), m the margin.
SURROGATES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "psm": lambda t, m: torch.sigmoid(-t),  # pairwise sigmoid: l(t) + l(-t) = 1, robust to flipped labels
    "square": lambda t, m: (m - t).square(),
    "squared_hinge": lambda t, m: torch.relu(m - t).square(),
    "logistic": lambda t, m: nnf.softplus(-t),
}
LINKS: Mapping[str, Link] = {
    "raw": Link(identity, RAW),
    "sigmoid": Link(torch.sigmoid, ScoreRange(0.0, 1.0)),
}


def _surrogate(name: str, margin: float) -> Callable[[Tensor], Tensor]:
    if name not in SURROGATES:
        raise unknown("surrogate", name, SURROGATES)
    require(margin > 0, f"margin must be positive, got {margin}")
    return lambda t: SURROGATES[name](t, margin)


def _link(scores: str) -> Link:
    if scores not in LINKS:
        raise unknown("kind of scores", scores, LINKS)
    return LINKS[scores]


def auroc(surrogate: str = "psm", margin: float = 1.0, scores: str = "raw") -> XRisk:
    """Area under the ROC curve: every positive against every negative, linear f.

    F = mean_{i in +} mean_{j in -} l(h_i - h_j). The default surrogate, psm, is the paper's section 4.
    """
    loss, link = _surrogate(surrogate, margin), _link(scores)
    return XRisk(
        pair=lambda a, b, y: loss(gap(a, b)),
        outer=identity,
        slope=1.0,
        link=link.apply,
        score_range=link.range,
    )


def partial_auc(
    lam: float = 1.0, surrogate: str = "squared_hinge", margin: float = 1.0, scores: str = "sigmoid"
) -> XRisk:
    """One-way partial AUC (low false positive rates), KL form: the smaller lam, the harder the negatives that count.

    F = mean_{i in +} lam log mean_{j in -} exp(l(h_i - h_j) / lam)   (the paper's KL-OPAUC, section 4).
    Raw scores never overflow, but the weights of pairs then differ by orders of magnitude and want small rates;
    sigmoid scores, the default, bound them.
    """
    require(lam > 0, f"lam must be positive, got {lam}")
    loss, link = _surrogate(surrogate, margin), _link(scores)
    return XRisk(
        pair=lambda a, b, y: loss(gap(a, b)),
        outer=lambda v: lam * v,
        slope=1.0,
        lam=lam,
        link=link.apply,
        score_range=link.range,
        metric="pauc@0.3",
    )


def two_way_partial_auc(
    lam: float = 1.0,
    lam_outer: float = 1.0,
    surrogate: str = "squared_hinge",
    margin: float = 1.0,
    scores: str = "sigmoid",
) -> XRisk:
    """Two-way partial AUC (low FPR and high TPR): hard positives count more, too.

    F = mean_{i in +} u_i^(lam / lam_outer),  u_i = mean_{j in -} exp(l(h_i - h_j) / lam), kept as v = log u.
    F itself grows like exp(l / lam_outer); the default sigmoid scores bound it. With raw scores a gap of 8.4 the
    wrong way round overflows single precision, and no limit on single scores prevents that.
    """
    require(lam > 0 and lam_outer > 0, f"lam and lam_outer must be positive, got {lam} and {lam_outer}")
    loss, link = _surrogate(surrogate, margin), _link(scores)
    power = lam / lam_outer
    return XRisk(
        pair=lambda a, b, y: loss(gap(a, b)),
        outer=lambda v: torch.exp(power * v),
        slope=lambda v: torch.exp(power * v) / lam_outer,
        lam=lam,
        link=link.apply,
        score_range=link.range,
        metric="pauc@0.3",
    )


def average_precision(
    surrogate: str = "squared_hinge", margin: float = 1.0, damping: float = 1e-3, scores: str = "sigmoid"
) -> XRisk:
    """Average precision (AUPRC): each positive against everything, a ratio of two inner estimates.

    F = mean_{i in +} 1 - u_i1 / (u_i2 + damping),  u_i = mean_{j in all} [y_j l(h_i - h_j), l(h_i - h_j)].
    The damping bounds f' where a sampled u_2 is zero (a positive that outranks its whole batch by the margin).
    """
    require(damping > 0, f"damping must be positive, got {damping}")
    loss, link = _surrogate(surrogate, margin), _link(scores)

    def pair(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        l = loss(gap(a, b))
        return torch.stack((y.unsqueeze(-2) * l, l), -1)

    def slope(u: Tensor) -> Tensor:
        low = 1 / (u[..., 1] + damping)
        return torch.stack((-low, u[..., 0] * low.square()), -1)

    return XRisk(
        pair=pair,
        outer=lambda u: 1 - u[..., 0] / (u[..., 1] + damping),
        slope=slope,
        sides=("positive", "all"),
        inner_shape=(2,),
        link=link.apply,
        score_range=link.range,
        metric="ap",
    )


def p_norm_push(p: float = 3.0, surrogate: str = "logistic", margin: float = 1.0, scores: str = "raw") -> XRisk:
    """P-norm push (Rudin 2009): pushes down the negatives that outrank many positives, p >= 1.

    F = mean_{i in -} ( mean_{j in +} l(h_j - h_i) )^p.
    """
    require(p >= 1, f"p must be at least 1, got {p}")
    loss, link = _surrogate(surrogate, margin), _link(scores)
    return XRisk(
        pair=lambda a, b, y: loss(-gap(a, b)),
        outer=lambda u: u.pow(p),
        slope=lambda u: p * u.pow(p - 1),
        sides=("negative", "positive"),
        link=link.apply,
        score_range=link.range,
        metric="pauc@0.3",
    )


MOST_OUTPUTS = 2**16  # numbers that an example is embedded in


def contrastive(dim: int = 128, temperature: float = 0.1) -> XRisk:
    """Global contrastive loss of two views (Yuan et al. 2022): each example against all others, not its batch alone.

    The model maps an example, which holds both views, to their embeddings side by side: h = (p, q) in R^(2 dim).
    With <.,.> the cosine and t the temperature, summed over both directions:

    F = mean_i t log mean_j exp((<p_i, q_j> - <p_i, q_i>) / t) + t log mean_j exp((<q_i, p_j> - <q_i, p_i>) / t).
    """
    require(0 < dim <= MOST_OUTPUTS, f"dim must lie between 1 and {MOST_OUTPUTS}, got {dim}")
    require(temperature > 0, f"temperature must be positive, got {temperature}")

    def link(h: Tensor) -> Tensor:
        return nnf.normalize(h.unflatten(-1, (2, dim)), dim=-1).flatten(-2)

    def pair(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        p, q = a.split(dim, -1)
        own: Tensor = (p * q).sum(-1, keepdim=True)  # [.., B1, 1]
        across = torch.stack((p @ b[..., dim:].mT, q @ b[..., :dim].mT), -1)  # [.., B1, B2, 2]
        return across - own.unsqueeze(-1)

    return XRisk(
        pair=pair,
        outer=lambda v: temperature * v.sum(-1),
        slope=1.0,
        lam=temperature,
        sides=("all", "all"),
        inner_shape=(2,),
        score_shape=(2 * dim,),
        link=link,
        score_range=ScoreRange(-1.0, 1.0, unit=dim),
        metric="-risk",
    )


RISKS: Mapping[str, Callable[..., XRisk]] = {
    "auroc": auroc,
    "pauc": partial_auc,
    "tpauc": two_way_partial_auc,
    "ap": average_precision,
    "p_norm_push": p_norm_push,
    "contrastive": contrastive,
}
