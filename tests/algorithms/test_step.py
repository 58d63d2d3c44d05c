"""The pulls of one step, of FeDXL and of Local Pair, against autograd of the whole risk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedxl.algorithms.pool import Scores
from fedxl.algorithms.step import own_pull, pull
from fedxl.risks import (
    Entry,
    auroc,
    average_precision,
    cvar_partial_auc,
    identity,
    p_norm_push,
    partial_auc,
    two_way_partial_auc,
)
from fedxl.risks.pairing import belongs

RISKS = {
    "auroc": auroc(),
    "pauc": partial_auc(lam=0.5),
    "ap": average_precision(),
    "push": p_norm_push(),
    "cvar": cvar_partial_auc(fpr=0.6, fpr_from=0.2),
    **{
        f"tpauc, {scores}, {lam_outer}": two_way_partial_auc(lam=0.3, lam_outer=lam_outer, scores=scores)
        for scores in ("sigmoid", "raw")
        for lam_outer in (1.0, 0.1)
    },
}


@pytest.mark.parametrize("risk", RISKS.values(), ids=RISKS)
def test_both_pulls_are_the_exact_gradient(risk):
    """All of S1 and S2 in one batch, the same scores in the pool: G1 is the gradient by a, G2 the one by b."""
    h = torch.rand(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1] * 5 + [0] * 7)
    (exact,) = torch.autograd.grad(replace(risk, link=identity).value(h, labels), h)
    first, second = (torch.nonzero(belongs(labels, side))[:, 0] for side in risk.sides)
    a, b = Entry(h.detach()[first], ()), Entry(h.detach()[second], labels[second].double())
    unknown = torch.full((len(first), *risk.inner_shape), float("nan"), dtype=torch.float64)
    pooled, whole = Scores(a, risk.inner(a, b), b), torch.ones(2, 1, 1, dtype=torch.float64)
    for da, db, u in (
        pull(risk, (a, b), pooled, unknown, 0.1, whole),
        own_pull(risk, (a, b), unknown, 0.1, whole[0]),
    ):
        found = torch.zeros_like(exact).index_add(0, first, da).index_add(0, second, db)
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)
        if not risk.linear:
            torch.testing.assert_close(u, pooled.u, rtol=0, atol=1e-12)


def test_a_row_that_does_not_count_keeps_its_u():
    """It stands in for an example that the client does not hold."""
    risk, u = partial_auc(), torch.tensor([0.3, float("nan")], dtype=torch.float64)
    a, b = Entry(torch.rand(2).double(), ()), Entry(torch.rand(3).double(), torch.zeros(3).double())
    pooled = Scores(a, u.nan_to_num(), b)
    for force in (torch.zeros(2, 1, 1), torch.tensor([0.0, 1.0]).view(2, 1, 1)):
        da, _, kept = pull(risk, (a, b), pooled, u, 0.1, force.double())
        torch.testing.assert_close(kept, u, rtol=0, atol=0, equal_nan=True)
        assert da.tolist() == [0, 0]
    _, _, moved = pull(risk, (a, b), pooled, u, 0.1, torch.ones(2, 1, 1).double())
    assert bool(moved.isfinite().all())
