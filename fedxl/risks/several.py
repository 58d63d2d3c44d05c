"""Several labels at once: one X-risk for each label, over the outputs of one network.

    F(w) = sum_l w_l F_l(w),    F_l compares the examples of S1 of label l with those of S2 of label l

An entry of S1 is a *couple*: an example and one of the labels for which it belongs to S1. Its score is two numbers:
the score of that label, and the label. An example of S2 has a score for every label and counts for those for which it
belongs to S2. A pair that does not count has the loss NaN (docs/maths.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.risks.xrisk import XRisk, belongs, log_mean_exp

MOST_LABELS = 4096
LONGEST = 100  # characters of a label's name


@dataclass(frozen=True, eq=False, repr=False)
class Several(XRisk):
    """One risk for each of several labels; build it with `several`."""

    base: XRisk = field(kw_only=True)  # of one label
    label_names: tuple[str, ...] = field(kw_only=True)
    label_weights: tuple[float, ...] = field(kw_only=True)  # they sum to 1

    @property
    def first_shape(self) -> tuple[int, ...]:
        return (2,)

    def bare(self, a: Tensor) -> Tensor:
        return a[..., 0]

    def label_of(self, a: Tensor) -> Tensor:
        """The labels [..] of scores of S1 [.., 2]."""
        return a[..., 1].long()

    def losses(self, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        """Every couple's losses [.., B1, B2, *m] with S2, NaN where an example does not count for its label."""
        index = self.label_of(a).unsqueeze(-1)  # [.., B1, 1]
        b, y = (torch.take_along_dim(each.mT, index, -2) for each in (b, y))  # [.., B1, B2]
        l = self.base.losses(self.bare(a).unsqueeze(-1), b, y).squeeze(self._j - 1)
        counts = belongs(y, self.sides[1]) & (y >= 0)
        return torch.where(counts.reshape(*counts.shape, *[1] * len(self.inner_shape)), l, torch.nan)

    def estimate(self, l: Tensor) -> Tensor:
        """NaN for a couple without any pair that counts."""
        l = l.to(self.dtype(l.dtype))
        if self.lam is None:
            return l.nanmean(self._j)
        some, number = ~l.isnan(), l.shape[self._j]
        log_share = (some.sum(self._j).to(l.dtype) / number).log()
        scaled = torch.where(some, l / self.lam, torch.finfo(l.dtype).min)
        return torch.where(some.any(self._j), log_mean_exp(scaled, self._j) - log_share, torch.nan)

    def blend(self, u: Tensor, g: Tensor, gamma: float) -> Tensor:
        """A couple that met no pair keeps its u."""
        return torch.where(g.isnan(), u, super().blend(u, g, gamma))

    def weights(self, l: Tensor, u: Tensor, sample: Tensor | None = None, threshold: Tensor | None = None) -> Tensor:
        """c over the number of couples and the number of pairs that count for the couple; 0 for the others."""
        some = ~l.isnan()
        number = l.shape[self._j - 1] * some.sum(self._j, keepdim=True).clamp(min=1).to(l.dtype)
        c = torch.ones_like(l) if self.linear else self.coupling(l, u, sample, threshold).expand_as(l)
        return torch.where(some & ~c.isnan(), c / number, 0.0)

    def inner_range(self) -> tuple[Tensor, Tensor]:
        return self.base.inner_range()

    def value(self, h: Tensor, labels: Tensor) -> Tensor:
        """The mean of the labels' risks by their weights; labels without S1 or S2 here are left out."""
        each = torch.stack([self.base.value(*self.of_label(h, labels, l)) for l in range(self.labels)])
        weights, known = each.new_tensor(self.label_weights), ~each.isnan()
        return (weights * each)[known].sum() / weights[known].sum()

    def of_label(self, h: Tensor, labels: Tensor, label: int) -> tuple[Tensor, Tensor]:
        """Outputs [n, L] and labels [n, L] of the examples whose label of this number is known: [m] and [m]."""
        known = labels[:, label] >= 0
        return h[known, label], labels[known, label]


def several(risk: XRisk, labels: int | Sequence[str], weights: Sequence[float] = ()) -> Several:
    """One risk for each of several labels, and their mean, over a network with as many outputs.

    Labels are [n, L], with NaN or -1 where one is not known; or numbers [n] of classes, each of which is then
    compared with the rest.

    Args:
        risk: Of one label, for example `partial_auc()`.
        labels: How many there are, or their names.
        weights: How much each counts, all positive; empty: the same.

    >>> from fedxl import auroc
    >>> risk = several(auroc(), ["mass", "nodule"], weights=[3, 1])
    >>> risk, risk.label_weights
    (several(auroc(), labels=['mass', 'nodule'], weights=[3, 1]), (0.75, 0.25))
    """
    require(isinstance(risk, XRisk), f"several needs a risk first, such as several(auroc(), 14), not {risk!r:.60}")
    names = checked_names(labels)
    require(not risk.queries, "several labels are not for risks of queries, whose labels are grades")
    require(not risk.thresholds, "several labels are not for CVaR risks; use partial_auc, for example")
    require(not risk.score_shape, "several labels need a risk of one score an example")
    require(
        risk.lam_outer is None,
        "several labels have too few positives a step for the emphasis of tpauc; set normalised = false",
    )
    right = len(weights) in (0, len(names)) and all(math.isfinite(w) and w > 0 for w in weights)
    require(right, f"weights must be {len(names)} positive numbers, one for each label, not {list(weights)!r:.100}")
    given = [float(w) for w in weights] or [1.0] * len(names)
    parts = {item.name: getattr(risk, item.name) for item in fields(XRisk)}
    said = list(labels) if not isinstance(labels, int) else labels
    name = f"several({risk!r}, labels={said!r}" + (f", weights={list(weights)!r})" if weights else ")")
    parts |= {"score_shape": (len(names),), "labels": len(names), "name": name}
    each = tuple(w / sum(given) for w in given)
    return Several(**parts, base=risk, label_names=names, label_weights=each)


def checked_names(labels: int | Sequence[str]) -> tuple[str, ...]:
    """The names of labels, or numbers as names; one line if that is none."""
    if isinstance(labels, int) and not isinstance(labels, bool):
        require(1 <= labels <= MOST_LABELS, f"labels must lie between 1 and {MOST_LABELS}, got {labels}")
        return tuple(map(str, range(labels)))
    texts = isinstance(labels, (list, tuple)) and all(isinstance(name, str) for name in labels)
    require(texts, f"labels must be how many there are, or a list of their names, not {labels!r:.60}")
    assert not isinstance(labels, int)
    require(1 <= len(labels) <= MOST_LABELS, f"labels must be 1 to {MOST_LABELS} names, got {len(labels)}")
    fine = all(name.strip() and len(name) <= LONGEST and name.isprintable() for name in labels)
    require(fine, f"a label's name must be a printable text of at most {LONGEST} characters")
    require(len(set(labels)) == len(labels), f"two labels have the same name among {list(labels)!r:.100}")
    return tuple(labels)
