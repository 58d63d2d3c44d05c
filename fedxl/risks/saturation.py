"""Whether scores have collapsed: they are all alike, or so near the ends of their range that no gradient passes.

The thresholds are from runs on digits, four methods with learning rates from 0.1 to 1,000, evaluated ten times each.
Of 56 runs 19 were found collapsed, all at three times the best rate or more. Four of these rose once more, none to
within 0.05 of the best AUC. No run that learned well was found collapsed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedxl.risks.pairing import Entry, belongs
from fedxl.risks.several import SeveralLabels, one_label
from fedxl.risks.xrisk import XRisk
from fedxl.tree import map as map_tree

ALIKE = 1e-6  # a relative spread of scores that is rounding
UNTRAINED = 1e-3  # so near to the score of an output of 0, scores that are alike may not have moved yet
FLAT = 1e-3  # the slope a (1 - a) below which a sigmoid passes no gradient; at 0.5 it is 0.25
NEARLY_ALL = 0.99
NO_BETTER = 0.8  # of the risk of constant scores: at or above it, little was learned before
SAMPLE = 1024  # examples per side whose pairs are compared: all pairs would take too long


def saturated(risk: XRisk, a: Entry, b: Entry) -> bool:
    """Whether linked scores of S1 and of S2 have collapsed; no if a side is missing.

    Well-trained scores are at the ends of their range, too: those of S1 at one, those of S2 at the other. So scores
    at the ends have collapsed only if their risk is not much below that of constant scores. Untrained ones have not.
    """
    if not len(a.score) or not len(b.score):
        return False
    if risk.pairing.labels:
        return all(saturated(one_label(risk), *each) for each in _by_label(risk, a, b))
    if alike(torch.cat((a.score, b.score)), risk.link(a.score.new_zeros(1, *a.score.shape[1:]))):
        return True
    if risk.score_shape or not risk.score_range.bounded or not (_flat(risk, a.score) and _flat(risk, b.score)):
        return False
    a, b = (map_tree(_some, entry) for entry in (a, b))
    mean = float(torch.cat((a.score, b.score)).mean())
    constant = [entry._replace(score=torch.full_like(entry.score, mean)) for entry in (a, b)]
    value, alternative = (float(risk.outer(risk.inner(*entries)).mean()) for entries in ((a, b), constant))
    return value >= alternative - (1 - NO_BETTER) * abs(alternative)


def saturated_outputs(risk: XRisk, h: Tensor, labels: Tensor) -> bool:
    """The same of a model's outputs."""
    if isinstance(risk.pairing, SeveralLabels):
        each = (risk.pairing.of_label(h, labels, label) for label in range(len(risk.pairing.labels)))
        return all(saturated_outputs(one_label(risk), *one) for one in each)
    linked, (first, second) = risk.link(h), (belongs(labels, side) for side in risk.sides)
    return saturated(risk, Entry(linked[first], ()), Entry(linked[second], labels[second].to(linked.dtype)))


def _by_label(risk: XRisk, a: Entry, b: Entry) -> Iterator[tuple[Entry, Entry]]:
    """Scores of each label."""
    for label in range(len(risk.pairing.labels)):
        member = risk.pairing.of_side(b.target[:, label], risk.sides[1])
        yield Entry(a.score[a.target == label], ()), Entry(b.score[member, label], b.target[member, label])


def alike(scores: Tensor, origin: Tensor | float = 0.0) -> bool:
    """Whether all scores [n, *d] are equal up to rounding, and not at the origin, where training may start."""
    largest = scores.abs().max()
    spread = (scores.amax(0) - scores.amin(0)).max()
    moved = (scores - origin).abs().max()
    return len(scores) > 1 and bool((spread <= ALIKE * largest) & (moved > UNTRAINED * largest))


def _flat(risk: XRisk, scores: Tensor) -> bool:
    low, high = risk.score_range[:2]
    place = (scores.double() - low) / (high - low)
    return float((place * (1 - place) < FLAT).double().mean()) >= NEARLY_ALL


def _some(values: Tensor) -> Tensor:
    """At most SAMPLE of them, evenly spread."""
    count = min(SAMPLE, len(values))
    return values[torch.arange(count, device=values.device) * len(values) // count]
