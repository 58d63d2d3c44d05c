"""The risk of a whole data set: what is computed at a small cost is what all pairs give, in memory linear in rows."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedxl.risks import KNOWN_RISKS, SURROGATES, XRisk, gap, several, survival, whole

OF_GAPS = ("auroc", "pauc", "tpauc", "cvar_pauc", "ap", "p_norm_push")
OPTIONS = [
    *((name, {"surrogate": surrogate, "scores": scores})
      for name in OF_GAPS for surrogate in SURROGATES for scores in ("raw", "sigmoid")),
    ("pauc", {"lam": 0.05, "margin": 0.3}),
    ("pauc", {"lam": 0.05, "margin": 0.3, "scores": "raw"}),
    ("cvar_pauc", {"fpr": 0.313, "fpr_from": 0.101}),
    ("cvar_pauc", {"fpr": 0.0004}),
    ("ndcg", {"temperature": 0.2}),
    ("ndcg", {"surrogate": "squared_hinge", "temperature": 0.5, "top": 20}),
    ("listwise", {"temperature": 0.5}),
    ("contrastive", {"dim": 2}),
    ("concordance", {}),
]  # fmt: skip


def rows(count: int, width: float = 1.0, decimals: int = 10) -> tuple[Tensor, Tensor]:
    """Scores, in double precision, and labels: every fifth is positive."""
    generator, y = torch.Generator().manual_seed(0), torch.arange(count) % 5 == 0
    h = width * (torch.randn(count, generator=generator, dtype=torch.float64) + 1.5 * y)
    return h.round(decimals=decimals), y.long()


def value(risk: XRisk, h: Tensor, y: Tensor) -> float:
    """Of one score or of several numbers; queries are of two sizes."""
    h = h[:, None] ** torch.arange(1, 1 + risk.score_shape[0]) if risk.score_shape else h
    number = torch.arange(len(h))
    groups, time = (
        ((number % 7 > 1).long() if risk.pairing.ranked else None),
        number % 101 if risk.pairing.timed else None,
    )
    return float(risk.value(h, y, groups, time))


@pytest.mark.parametrize(("width", "decimals"), [(1.0, 10), (30.0, 10), (1.0, 1)], ids=["plain", "wide", "tied"])
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_it_is_what_all_pairs_give(monkeypatch, name, options, width, decimals):
    risk, (h, y) = KNOWN_RISKS[name](**options), rows(1200, width, decimals)
    direct = value(risk, h, y)
    monkeypatch.setattr(whole, "FEW", 0)
    monkeypatch.setattr(whole, "ROWS", 20)
    monkeypatch.setattr(whole, "TILE", 500)
    monkeypatch.setattr(survival, "PAIRS", 5000)
    assert value(risk, h, y) == pytest.approx(direct, rel=1e-12)


class Largest(TorchDispatchMode):
    """Finds the largest tensor that is made, and counts those made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else [made]:
            self.numbers = max(self.numbers, each.numel() if isinstance(each, Tensor) else 0)
        return made


RISKS = {name: build() for name, build in KNOWN_RISKS.items()} | {
    "several": several(KNOWN_RISKS["pauc"](), 3),
    "cvar_pauc, square": KNOWN_RISKS["cvar_pauc"](surrogate="square"),
    "one's own": XRisk(pair=lambda a, b, y: torch.exp(-gap(a, b)), outer=lambda g: g**2),
}


@pytest.mark.parametrize("name", RISKS)
def test_no_tensor_is_as_large_as_the_pairs(monkeypatch, name):
    """With blocks of 2,000 pairs, of 160,000 and more."""
    monkeypatch.setattr(whole, "FEW", 0)
    monkeypatch.setattr(whole, "ROWS", 4)
    monkeypatch.setattr(whole, "TILE", 100)
    monkeypatch.setattr(XRisk.inner, "__defaults__", (2000,))
    monkeypatch.setattr(survival, "PAIRS", 2000)
    h, y = rows(1000)
    y = torch.stack([y] * 3, 1) if name == "several" else y
    with Largest() as largest:
        value(RISKS[name], h.float(), y)
    per_row = 2 * whole.NODES + (RISKS[name].score_shape or (0,))[0]
    assert 1000 <= largest.numbers <= 1000 * per_row


GROWTH = """
import resource, torch
from dataclasses import replace
from fedxl.risks import XRisk, partial_auc

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

risk, y = replace(partial_auc(), whole=XRisk.inner), torch.arange(30_000) % 5 == 0
h = torch.randn(30_000, generator=torch.Generator().manual_seed(0))
risk.value(h[:2000], y[:2000])
before = peak()
risk.value(h, y)
print(peak() - before)
"""


def test_blocks_give_their_memory_back():
    """144 million pairs; in a process of its own, for a process never tells how much it has given back."""
    told = subprocess.run([sys.executable, "-c", GROWTH], check=True, capture_output=True, text=True)
    assert float(told.stdout) < 40, "MB"


@pytest.mark.parametrize("name", ["auroc", "pauc", "cvar_pauc", "ap", "ndcg"])
def test_scores_that_are_not_finite_have_no_risk(monkeypatch, name):
    monkeypatch.setattr(whole, "FEW", 0)
    for bad in (float("nan"), float("inf")):
        for row in (0, 1):  # a positive, and a negative
            h, y = rows(100)
            h[row] = bad
            raw = {} if name == "ndcg" else {"scores": "raw"}
            assert value(KNOWN_RISKS[name](**raw), h, y) != value(KNOWN_RISKS[name](**raw), h, y)
