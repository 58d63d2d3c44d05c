"""Whether scores have collapsed: they are all alike, or so near the ends of their range that no gradient passes.

The thresholds are from runs on digits, four methods with learning rates from 0.1 to 1,000, evaluated ten times each.
Of 56 runs 19 were found collapsed, all at three times the best rate or more. Four of these rose once more, none to
within 0.05 of the best AUC. No run that learned well was found collapsed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedxl.risks.several import Several
from fedxl.risks.xrisk import XRisk, belongs

ALIKE = 1e-6  # a relative spread of scores that is rounding
UNTRAINED = 1e-3  # so near to the score of an output of 0, scores that are alike may not have moved yet
FLAT = 1e-3  # the slope a (1 - a) below which a sigmoid passes no gradient; at 0.5 it is 0.25
NEARLY_ALL = 0.99
NO_BETTER = 0.8  # of the risk of constant scores: at or above it, little was learned before
SAMPLE = 1024  # examples a side whose pairs are compared: all pairs would take too long


def saturated(risk: XRisk, a: Tensor, b: Tensor, y: Tensor) -> bool:
    """Whether the linked scores a of S1 and b of S2, with labels y, have collapsed; no if a side is missing.

    Well-trained scores are at the ends of their range, too: those of S1 at one, those of S2 at the other. So scores
    at the ends have collapsed only if their risk is not much below that of constant scores. Untrained ones have not.
    """
    if not len(a) or not len(b):
        return False
    if isinstance(risk, Several):
        return all(saturated(risk.base, *each) for each in _by_label(risk, a, b, y))
    if alike(torch.cat((a, b)), risk.link(a.new_zeros(1, *a.shape[1:]))):
        return True
    if risk.score_shape or not risk.score_range.bounded or not (_flat(risk, a) and _flat(risk, b)):
        return False
    a, (b, y) = _some(a), map(_some, (b, y))
    value, constant = (float(_value(risk, *scores, y)) for scores in ((a, b), _constant(a, b)))
    return value >= constant - (1 - NO_BETTER) * abs(constant)


def saturated_outputs(risk: XRisk, h: Tensor, labels: Tensor) -> bool:
    """The same of a model's outputs."""
    if isinstance(risk, Several):
        each = (risk.of_label(h, labels, label) for label in range(risk.labels))
        return all(saturated_outputs(risk.base, *one) for one in each)
    linked, (first, second) = risk.link(h), (belongs(labels, side) for side in risk.sides)
    return saturated(risk, linked[first], linked[second], labels[second].to(linked.dtype))


def _by_label(risk: Several, a: Tensor, b: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Scores of each label."""
    for label in range(risk.labels):
        member = belongs(y[:, label], risk.sides[1]) & (y[:, label] >= 0)
        yield risk.bare(a)[risk.label_of(a) == label], b[member, label], y[member, label]


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


def _constant(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    mean = float(torch.cat((a, b)).mean())
    return torch.full_like(a, mean), torch.full_like(b, mean)


def _value(risk: XRisk, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return risk.outer(risk.inner(a, b, y)).mean()
