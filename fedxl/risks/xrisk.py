"""X-risks: objectives that compare every example of S1 with all of S2.

    F(w) = mean_{i in S1} f(g_i),    g_i = estimate_{j in S2} l(h(w; z_i), h(w; z_j), y_j)

`estimate` is the mean, or `log mean exp(l / lam)` for the entropic risks (partial AUC, contrastive), whose inner
estimates live in the log domain so that no score, however large, overflows. Two-way partial AUC has a log-mean-exp
in place of the outer mean, too. Every gradient estimator of the paper is the gradient of one scalar, the *pull*
(docs/maths.md):

    pull = mean_ij < c(l_ij, u_i), l_ij >,   c carries no gradient,   u_i the running estimate of g_i
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, ParamSpec

import torch
from torch import Tensor

from fedxl.errors import UserError, first_line, require
from fedxl.options import require_types
from fedxl.risks.scores import RAW, ScoreRange, identity

P = ParamSpec("P")
Side = Literal["positive", "negative", "all", "none"]

# With exact u a coupling is at most |S2| (one pair holds all of the mass). A stale passive u can be exceeded by more;
# this cap keeps such a pair from turning the model into NaN and is out of reach for |S2| up to a million.
MAX_COUPLING = 1e6
# The limit of u where the range of scores says nothing of losses: vectors of any length, or losses that overflow.
MOST_ESTIMATE = 1e9


def named(build: Callable[P, XRisk]) -> Callable[P, XRisk]:
    """Let a factory's risks say how they were built.

    >>> @named
    ... def mine(power: float = 3) -> XRisk:
    ...     return XRisk(pair=lambda a, b, y: torch.exp(-gap(a, b)), outer=lambda g: g**power)
    >>> mine(power=2)
    mine(power=2)
    """

    parameters = inspect.signature(build).parameters

    @functools.wraps(build)
    def built(*args: P.args, **options: P.kwargs) -> XRisk:
        given = inspect.signature(build).bind(*args, **options).arguments
        require_types(build, given)
        # One name for one risk: what is at its default is left out.
        call = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != parameters[name].default)
        return replace(build(*args, **options), name=f"{build.__name__}({call})")

    return built


@dataclass(frozen=True, eq=False, repr=False)
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
    lam_outer: float | None = None  # None: F is the mean of f; otherwise F = lam_outer log mean exp(f / lam_outer)
    sides: tuple[Side, Side] = ("positive", "negative")  # which labels form S1 and S2
    inner_shape: tuple[int, ...] = ()  # m
    score_shape: tuple[int, ...] = ()  # d
    link: Callable[[Tensor], Tensor] = identity  # from the model's output to what is paired and pooled
    score_range: ScoreRange = RAW  # what the link can give
    double: bool = False  # pairs and inner estimates are float64, whatever the scores are; for losses above 1e4
    metric: str = "auroc"  # by which the best model is chosen
    labels: int = 0  # how many there are, each with a score of its own (`several`); 0: one label and one score
    name: str = ""  # how it was built, for people to read
    queries: int = 0  # queries that a step reads, if pairs lie within queries (`QueryRisk`); 0: there are none

    def __repr__(self) -> str:
        return self.name or f"XRisk(pair={self.pair}, outer={self.outer}, lam={self.lam})"

    @property
    def linear(self) -> bool:
        """f is the identity: u plays no part (FeDXL1)."""
        return self.lam is None and self.lam_outer is None and self.outer is identity

    @property
    def emphasises(self) -> bool:
        """Whether examples of S1 count differently: F is not the mean of f."""
        return self.lam_outer is not None

    @property
    def first_shape(self) -> tuple[int, ...]:
        """Of an example of S1 as it is paired and pooled."""
        return self.score_shape

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Of an example's labels."""
        return (self.labels,) if self.labels else ()

    def bare(self, a: Tensor) -> Tensor:
        """Scores of S1 as they are paired and pooled, without what says what they are scores of."""
        return a

    @property
    def _j(self) -> int:
        """The dimension of S2 in a block of pairs."""
        return -1 - len(self.inner_shape)

    def dtype(self, scores: torch.dtype) -> torch.dtype:
        """Of pairs and inner estimates, where scores have this one."""
        return torch.float64 if self.double else scores

    def estimate(self, l: Tensor) -> Tensor:
        """Pairs [.., B1, B2, *m] -> inner estimates [.., B1, *m]."""
        l = l.to(self.dtype(l.dtype))
        return l.mean(self._j) if self.lam is None else log_mean_exp(l / self.lam, self._j)

    def blend(self, u: Tensor, g: Tensor, gamma: float) -> Tensor:
        """(1 - gamma) u + gamma g, in the log domain where estimates live there; a first visit (NaN) takes g."""
        if self.lam is None:
            blended = torch.lerp(u, g, gamma)
        elif gamma < 1:
            blended = torch.logaddexp(u + math.log1p(-gamma), g + math.log(gamma))
        else:
            blended = g
        return torch.where(u.isnan(), g, blended)

    @property
    def thresholds(self) -> bool:
        """Whether u are thresholds among the pair losses, which `renew` moves step by step, and no means."""
        return False

    def renew(self, u: Tensor, l: Tensor, gamma: float) -> Tensor:
        """The inner estimates [.., B1, *m] after a batch with the pairs l [.., B1, B2, *m]."""
        return self.blend(u, self.estimate(l), gamma)

    def within(self, u: Tensor, before: Tensor, l: Tensor) -> Tensor:
        """u, no farther than the losses l [.., B1, B2, *m] of a batch reach, or the estimates before (NaN: none)."""
        low, high = l.amin(self._j), l.amax(self._j)
        if self.lam is not None:
            low, high = low / self.lam, high / self.lam
        return torch.maximum(torch.minimum(u, torch.fmax(high, before)), torch.fmin(low, before))

    @property
    def counts_share(self) -> bool:
        """Whether F is a mean over a share of S1 alone: the examples with f above a threshold (`CVaRRisk`)."""
        return False

    def share_threshold(self, u: Tensor, weight: Tensor | None = None) -> Tensor:
        """The threshold [] of f among examples of S1 with the estimates u [n, *m], for risks that count a share."""
        raise NotImplementedError

    def coupling(self, l: Tensor, u: Tensor, sample: Tensor | None = None, threshold: Tensor | None = None) -> Tensor:
        """c = |S1| |S2| dF/dl_ij, at the running estimate u instead of g; carries no gradient.

        `sample` and `threshold`: as in `emphasis`.
        """
        c = self._inner_coupling(l.detach(), u.detach().unsqueeze(self._j))
        if not self.emphasises:
            return c
        emphasis = self.emphasis(u, sample, threshold)
        return c * emphasis.reshape(*emphasis.shape, 1, *[1] * len(self.inner_shape))

    def _inner_coupling(self, l: Tensor, u: Tensor) -> Tensor:
        """|S2| df(g_i)/dl_ij."""
        if self.lam is None:
            return self._slope(u)
        share = torch.exp((l / self.lam - u).clamp(max=math.log(MAX_COUPLING)))
        return share if self.slope == 1 else self._slope(u) * share

    def emphasis(self, u: Tensor, sample: Tensor | None = None, threshold: Tensor | None = None) -> Tensor:
        """|S1| dF/df(g_i) for every row of u [.., B1, *m]: 1, or exp(f / lam_outer) over its mean in S1.

        `sample` [n, *m] holds estimates of examples of S1 of all clients. The mean is taken over the sample with one
        of its entries replaced by the row itself, so that no row has an emphasis above n. Without a sample, it is
        taken over the rows. `threshold`: for risks that count a share, `share_threshold` of what is known of S1.
        """
        f = self.outer(u.detach())
        if self.lam_outer is None:
            return torch.ones_like(f)
        f = f / self.lam_outer
        if sample is None:
            return torch.exp(f - log_mean_exp(f, -1).unsqueeze(-1))
        among = with_each(f, self.outer(sample.detach()) / self.lam_outer)
        return torch.exp(f - log_mean_exp(among, -1))

    def _slope(self, u: Tensor) -> Tensor:
        if callable(self.slope):
            return self.slope(u)
        if self.slope is not None:
            return torch.full_like(u, self.slope)
        gradient: Tensor = torch.func.grad(lambda g: self.outer(g).sum())(u)
        return gradient if self.lam is None else gradient / self.lam

    def pairs(self, a: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """Every pair's l [.., B1, B2, *m], and how weights on the pairs become gradients by a and by b."""
        l, back, *_ = torch.func.vjp(lambda a, b: self.losses(a, b, y), a, b)
        return l, back

    def losses(self, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        """Every pair's l [.., B1, B2, *m]."""
        return self.pair(a.double(), b.double(), y.double()) if self.double else self.pair(a, b, y)

    def weights(self, l: Tensor, u: Tensor, sample: Tensor | None = None, threshold: Tensor | None = None) -> Tensor:
        """c over the number of pairs: carried back through `pairs` it gives the gradient of the pull, a mean.

        `sample` and `threshold`: as in `emphasis`.
        """
        number = l.shape[self._j - 1] * l.shape[self._j]
        if self.linear:
            return torch.full_like(l, 1 / number)
        return (self.coupling(l, u, sample, threshold) / number).expand_as(l)

    def inner(self, a: Tensor, b: Tensor, y: Tensor, chunk: int = 2**22) -> Tensor:
        """Exact inner estimates of every a against every b, a block of about `chunk` pairs at a time."""
        rows = max(1, chunk // max(1, b.shape[0]))
        return torch.cat([self.estimate(self.losses(part, b, y)) for part in a.split(rows)])

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
        return self.over_first(self.outer(self.inner(a, b, y)))

    def over_first(self, f: Tensor) -> Tensor:
        """F from f of all examples of S1."""
        return f.mean() if self.lam_outer is None else self.lam_outer * log_mean_exp(f / self.lam_outer, -1)


def with_each(rows: Tensor, sample: Tensor) -> Tensor:
    """A sample [n] for each row [.., B1], in which one of its entries is the row itself, [.., B1, n]."""
    row, entry = (torch.arange(x.shape[-1], device=x.device) for x in (rows, sample))
    replaced = row.unsqueeze(-1) % len(entry) == entry  # [B1, n]
    return torch.where(replaced, rows.unsqueeze(-1), sample.unsqueeze(-2))


def log_mean_exp(x: Tensor, dim: int) -> Tensor:
    """log mean exp(x), with the largest term taken out."""
    top = x.detach().amax(dim, keepdim=True)
    return (x - top).exp().mean(dim).log() + top.squeeze(dim)


def check_risk(risk: XRisk) -> None:
    """One line if a risk of the user's own does not give one number (or `m`) a pair, whatever dimensions lead."""
    a, b = torch.zeros(2, 3, *risk.first_shape), torch.zeros(2, 4, *risk.score_shape)
    try:
        l = risk.losses(a, b, torch.zeros(2, 4, *risk.label_shape))
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
