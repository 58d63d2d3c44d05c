"""Scores that have collapsed, and scores that look similar and have not."""

from __future__ import annotations

import pytest
import torch

from fedxl.risks import Entry, auroc, average_precision, contrastive, partial_auc
from fedxl.risks.saturation import alike, saturated, saturated_outputs

LABELS = (torch.arange(400) % 4 == 0).long()  # 100 positives
NOISE = torch.randn(400, generator=torch.Generator().manual_seed(0))
SIGMOID = [partial_auc(), auroc(scores="sigmoid"), auroc("square", scores="sigmoid"), average_precision()]
COLLAPSED = {
    "all far up": 40 + NOISE,
    "all far up, in no order to be seen": 20 + 3 * NOISE,
    "all far down": -60 + 5 * NOISE,
    "at both ends, whatever the label": 30 * NOISE.sign(),
    "the wrong way round": -50.0 * (2 * LABELS - 1) + NOISE,
    "one number": torch.full((400,), 0.7),
}
HEALTHY = {
    "untrained": 0.1 * NOISE,
    "a head of zeros": torch.zeros(400),
    "a head of zeros, hardly moved": 1e-5 + 1e-8 * NOISE,
    "a perfect model": 50.0 * (2 * LABELS - 1) + NOISE,
    "a good model, most scores at an end": 12.0 * (2 * LABELS - 1) + 6 * NOISE,
    "all on one side, but not at its end": 4 + NOISE,
}


@pytest.mark.parametrize("risk", SIGMOID, ids=str)
@pytest.mark.parametrize("kind", list(COLLAPSED))
def test_collapsed(kind, risk):
    assert saturated_outputs(risk, COLLAPSED[kind], LABELS)


@pytest.mark.parametrize("risk", SIGMOID, ids=str)
@pytest.mark.parametrize("kind", list(HEALTHY))
def test_healthy(kind, risk):
    assert not saturated_outputs(risk, HEALTHY[kind], LABELS)


def test_raw_scores_collapse_only_to_one_number():
    risk = auroc("squared_hinge", scores="raw")
    for h in (*HEALTHY.values(), 40 + NOISE, 1e4 + NOISE):
        assert not saturated_outputs(risk, h, LABELS)
    assert saturated_outputs(risk, COLLAPSED["one number"], LABELS)
    assert saturated_outputs(risk, 1e4 + 1e-4 * NOISE, LABELS), "their differences are rounding"


def test_embeddings_collapse_to_one_vector():
    risk = contrastive(dim=3)
    one = torch.tensor([[1.0, 2.0, 0.5, -1.0, 0.3, 2.0]])
    assert saturated_outputs(risk, one.repeat(400, 1), LABELS)
    assert not saturated_outputs(risk, one + NOISE[:, None] * torch.arange(6), LABELS)


def test_without_a_side_nothing_is_known():
    risk, up, down = partial_auc(), Entry(torch.ones(5), ()), Entry(torch.ones(5), torch.zeros(5))
    nothing = Entry(torch.ones(0), torch.zeros(0))
    assert saturated(risk, up, down)
    assert not saturated(risk, nothing._replace(target=()), down)
    assert not saturated(risk, up, nothing)
    assert not alike(torch.ones(1)), "one score is no evidence"
