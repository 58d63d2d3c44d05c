"""Several labels at once: one X-risk for each label, over the outputs of one network.

    F(w) = sum_l w_l F_l(w),    F_l compares the examples of S1 of label l with those of S2 of label l

An entry of S1 is a *couple*: an example and one of the labels for which it belongs to S1. Row r of a client's u is
couple r: example r // L for label r % L. An entry of S2 has a score for every label, and counts for those for which
it belongs to S2. docs/maths.md has the algebra.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.risks.pairing import (
    Column,
    Entry,
    Held,
    Holder,
    Masks,
    Minibatch,
    OneLabel,
    Pairing,
    PairLoss,
    Share,
    Side,
    Sides,
    belongs,
)
from fedxl.risks.xrisk import XRisk
from fedxl.sampling import Indices, Purpose, Stream

MOST_LABELS = 4096
LONGEST = 100  # characters of a label's name


@dataclass(frozen=True)
class SeveralLabels(Pairing):
    """A couple meets the examples that belong to S2 for its label."""

    names: tuple[str, ...]  # of the labels
    weights: tuple[float, ...]  # they sum to 1

    @property
    def labels(self) -> tuple[str, ...]:
        return self.names

    def targets(self, y: Tensor) -> Tensor:
        return y

    def entries(self, h: Tensor, of: Minibatch) -> tuple[Entry, Entry]:
        size1 = of.rows.shape[0]
        label = of.rows % len(self.labels)
        score = torch.take_along_dim(h[:size1], label.unsqueeze(-1), -1).squeeze(-1)
        return Entry(score, label), Entry(h[size1:], of.y[size1:])

    def members(self, of: Minibatch, sides: Sides) -> Any:
        count, label = len(self.labels), of.rows % len(self.labels)
        own = label.unsqueeze(-1) == torch.arange(count, device=label.device)
        second = self.of_side(of.y[of.rows.shape[0] :], sides[1])
        return Masks(torch.cat((own, torch.zeros_like(second))), torch.cat((torch.zeros_like(own), second)))

    def of_side(self, y: Tensor, side: Side) -> Tensor:
        return belongs(y, side) & (y >= 0)

    def losses(self, pair: PairLoss, a: Entry, b: Entry) -> Tensor:
        score, y = (_of_label(each, a.target) for each in (b.score, b.target))  # [.., B1, B2]
        l = pair(a.score.unsqueeze(-1), score, y)  # [.., B1, 1, B2, *m]
        return l.squeeze(a.score.ndim)

    def meets(self, a: Entry, b: Entry, side: Side) -> Tensor | None:
        return self.of_side(_of_label(b.target, a.target), side).to(b.score.dtype)

    def forces(self, factors: Tensor, mine: tuple[Entry, Entry], pooled_a: Entry) -> Tensor:
        """By the labels of couples. Pooled couples are drawn by the labels' weights, so these are in the draws."""
        first = (self._turns(factors) * factors[0])[mine[0].target]
        return torch.stack((first, factors[1][pooled_a.target])).unsqueeze(-1)

    def over_labels(self, factors: Tensor) -> Tensor:
        return (torch.tensor(self.weights, dtype=factors.dtype, device=factors.device) * factors).sum(-1)

    def _turns(self, factors: Tensor) -> Tensor:
        """What a couple counts by its label [.., L]. Labels take turns, so a couple stands for as many as are held.

        factors: [.., 2, L].
        """
        weights = torch.tensor(self.weights, dtype=factors.dtype, device=factors.device)
        return weights * (factors[..., 0, :] > 0).sum(-1, keepdim=True)

    def entry_weights(self, entry: Entry, side: int, share: Share) -> Tensor:
        if side == 1:
            return super().entry_weights(entry, side, share)
        each = share.model[:, None] * self._turns(share.factors) * share.factors[:, 0]  # [C, L]
        return each.gather(1, entry.target) / entry.score.shape[1]

    def pool_target(self, first: bool, like: Tensor) -> Any:
        zero = torch.zeros(1, dtype=torch.int64, device=like.device)
        return zero if first else like.new_zeros(1, len(self.labels))

    def check_entries(self, first: Entry, second: Entry) -> str:
        label = first.target
        if not bool(((label >= 0) & (label < len(self.labels))).all()):
            return "its scores (first) are not scores of labels that there are"
        known = torch.isin(second.target, second.target.new_tensor([-1.0, 0.0, 1.0])).all()
        return "" if bool(known) else "its labels (second) are not all 0, 1, or -1 for unknown"

    def hold(self, part: Indices, first: Indices, second: Indices, labels: Tensor, items: Any, side: Side) -> Any:
        """The client's examples of S1 by label, as positions in `first`; labels that it lacks are left out."""
        member = self.of_side(labels[torch.from_numpy(first)], side).numpy()
        each = {label: np.flatnonzero(member[:, label]) for label in range(len(self.labels))}
        return {label: found for label, found in each.items() if len(found)}

    def num_rows(self, held: Held) -> int:
        return len(held.first) * len(self.labels)

    def _read_first(self, stream: Stream, held: Held, visits: int, shape: tuple[int, int], fresh: bool) -> Indices:
        if not len(held.first):
            return np.zeros(shape, np.int64)
        purposes = (Purpose.FRESH_LABELS, Purpose.FRESH_FIRST) if fresh else (Purpose.LABELS, Purpose.FIRST)
        count = shape[0] * shape[1]
        return self.couples(stream, purposes, visits * count, count, held.more).reshape(shape)

    def couples(
        self, stream: Stream, purposes: tuple[Purpose, Purpose], position: int, count: int,
        members: Mapping[int, Indices],
    ) -> Indices:  # fmt: skip
        """`count` couples, example * L + label, from `position` of a client's stream.

        members: the examples of each label that the client has any of. Every label has its turn once in each epoch
        of labels, in a random order, and reads its own examples in epochs. purposes: of the labels, of the examples.
        """
        held = list(members)
        turns = stream.epochs(purposes[0], position, count, len(held))
        drawn = np.empty(count, np.int64)
        for turn, label in enumerate(held):
            places = np.flatnonzero(turns == turn)
            if len(places):
                begin = (position + int(places[0])) // len(held)
                mine = stream.epochs(purposes[1], begin, len(places), len(members[label]), label=label)
                drawn[places] = members[label][mine] * len(self.labels) + label
        return drawn

    def _locate(self, held: Held, rows: Indices) -> Indices:
        return super()._locate(held, rows // len(self.labels))

    def spread(self, share: Share, holders: Sequence[Holder], sides: Sides, by_samples: bool, local: bool) -> Share:
        """With factors for each label.

        For S1 the rule is that of one label. An example of S2 is drawn whatever its labels are, so a client's part
        of a label's S2 is its part of S2, times the fraction that counts for the label, over the sum of these.
        """
        first, second = (np.stack([holder.by_label(side) for holder in holders]) for side in sides)
        seconds = np.maximum(1, np.array([holder.count(sides[1]) for holder in holders]))[:, None]
        part = share.part.numpy()[:, None]
        mass = first.astype(np.float64) if by_samples else (first > 0).astype(np.float64)
        mass = mass * (part > 0)  # who is never there counts for nothing
        drawn = part * share.factors.numpy()[:, 1:] * second / seconds
        of = np.where(part > 0, part, 1.0)
        factors = [each / np.maximum(each.sum(0), 1e-300) / of for each in (mass, drawn)]
        return share._replace(factors=torch.from_numpy(np.stack(factors, 1)))  # [N, 2, L]

    def value(self, risk: XRisk, h: Tensor, labels: Tensor, groups: Column = None, time: Column = None) -> Tensor:
        """The mean of the labels' risks by their weights; labels without S1 or S2 here are left out."""
        one, count = one_label(risk), range(len(self.labels))
        each = torch.stack([one.pairing.value(one, *self.of_label(h, labels, label)) for label in count])
        weights, known = each.new_tensor(self.weights), ~each.isnan()
        return (weights * each)[known].sum() / weights[known].sum()

    def of_label(self, h: Tensor, labels: Tensor, label: int) -> tuple[Tensor, Tensor]:
        """Scores [n, L] and labels [n, L] of the examples whose label of this number is known: [m] and [m]."""
        known = labels[:, label] >= 0
        return h[known, label], labels[known, label]


def _of_label(each: Tensor, label: Tensor) -> Tensor:
    """Values of S2 [.., B2, L] at the labels [.., B1] of couples: [.., B1, B2]."""
    return torch.take_along_dim(each.mT, label.unsqueeze(-1), -2)


def one_label(risk: XRisk) -> XRisk:
    """The risk of one of several labels."""
    return replace(risk, pairing=OneLabel(), score_shape=())


def several(risk: XRisk, labels: int | Sequence[str], weights: Sequence[float] = ()) -> XRisk:
    """One risk for each of several labels, and their mean, over a network with as many outputs.

    Labels are [n, L], with NaN or -1 where one is not known; or numbers [n] of classes, each of which is then
    compared with the rest.

    Args:
        risk: Of one label, for example `partial_auc()`.
        labels: How many there are, or their names.
        weights: How much each counts, all positive; empty: the same.

    >>> from fedxl import auroc
    >>> risk = several(auroc(), ["mass", "nodule"], weights=[3, 1])
    >>> risk, risk.pairing.weights
    (several(auroc(), labels=['mass', 'nodule'], weights=[3, 1]), (0.75, 0.25))
    """
    require(isinstance(risk, XRisk), f"several needs a risk first, such as several(auroc(), 14), not {risk!r:.60}")
    names = label_names(labels)
    plain = type(risk.pairing) is OneLabel
    require(plain, "several labels need a risk of one label; risks of queries have grades instead")
    require(not risk.mixes_pairs, "several labels are not for CVaR risks; use partial_auc, for example")
    require(not risk.score_shape, "several labels need a risk of one score per example")
    require(
        risk.lam_outer is None,
        "several labels have too few positives per step for the emphasis of tpauc; set normalised = false",
    )
    right = len(weights) in (0, len(names)) and all(math.isfinite(w) and w > 0 for w in weights)
    require(right, f"weights must be {len(names)} positive numbers, one for each label, not {list(weights)!r:.100}")
    given = [float(w) for w in weights] or [1.0] * len(names)
    said = list(labels) if not isinstance(labels, int) else labels
    name = f"several({risk!r}, labels={said!r}" + (f", weights={list(weights)!r})" if weights else ")")
    pairing = SeveralLabels(names, tuple(w / sum(given) for w in given))
    return replace(risk, score_shape=(len(names),), pairing=pairing, name=name)


def label_names(labels: int | Sequence[str]) -> tuple[str, ...]:
    """The names of labels, or numbers as names. Raises UserError if they are neither."""
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
