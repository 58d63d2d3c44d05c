"""Several labels against plain loops over examples and labels, and against autograd of the whole objective."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedxl.errors import UserError
from fedxl.risks import (
    Entry,
    XRisk,
    auroc,
    average_precision,
    contrastive,
    cvar_partial_auc,
    ndcg,
    p_norm_push,
    partial_auc,
    several,
)
from fedxl.risks import two_way_partial_auc as tpauc
from fedxl.risks.pairing import Minibatch
from fedxl.risks.saturation import saturated_outputs

N, L = 24, 3
RISKS = {
    "auroc": auroc(),
    "pauc": partial_auc(lam=0.5),
    "pauc raw": partial_auc(scores="raw"),
    "tpauc": tpauc(0.5, 2.0, normalised=False),
    "ap": average_precision(),
    "push": p_norm_push(),
}
every_risk = pytest.mark.parametrize("base", RISKS.values(), ids=RISKS)


def population() -> tuple[Tensor, Tensor]:
    """Outputs and labels, some of which are not known; label 2 is rare."""
    rng = torch.Generator().manual_seed(3)
    h = torch.randn(N, L, generator=rng, dtype=torch.float64)
    y = (torch.rand(N, L, generator=rng) < torch.tensor([0.5, 0.3, 0.1])).long()
    y[0] = 1
    y[torch.rand(N, L, generator=rng) < 0.2] = -1
    y[1], y[2] = torch.tensor([1, -1, 1]), torch.tensor([0, 1, -1])
    return h, y


def all_couples(risk: XRisk, y: Tensor) -> Tensor:
    """Every couple of an example and a label of S1, as its number."""
    positive = y == (1 if risk.sides[0] == "positive" else 0)
    return torch.tensor([i * L + l for i in range(N) for l in range(L) if positive[i, l]])


def entries(risk: XRisk, h: Tensor, y: Tensor, rows: Tensor) -> tuple[Entry, Entry]:
    """These couples, and all examples."""
    of = Minibatch(h, torch.cat((y[rows // L], y)).double(), rows, ())
    return risk.pairing.entries(risk.link(torch.cat((h[rows // L], h))), of)


@every_risk
def test_value_is_the_mean_of_the_labels_own_risks(monkeypatch, base):
    h, y = population()
    risk = several(base, L, weights=[1, 2, 5])
    own = [float(base.value(h[y[:, l] >= 0, l], y[y[:, l] >= 0, l])) for l in range(L)]
    monkeypatch.setattr(XRisk.inner, "__defaults__", (20,))  # a few rows at a time
    assert float(risk.value(h, y)) == pytest.approx((own[0] + 2 * own[1] + 5 * own[2]) / 8, abs=1e-12)


def test_the_value_in_plain_loops():
    h, y = population()
    total = 0.0
    for l in range(L):
        positives = [float(h[i, l]) for i in range(N) if y[i, l] == 1]
        negatives = [float(h[j, l]) for j in range(N) if y[j, l] == 0]
        losses = [1 / (1 + math.exp(a - b)) for a in positives for b in negatives]
        total += sum(losses) / len(losses) / L
    assert float(several(auroc(), L).value(h, y)) == pytest.approx(total, abs=1e-12)


@every_risk
def test_gradient_of_the_pull_is_the_gradient_of_the_risk(base):
    """All couples against all examples with exact u, each couple by its label's weight over the label's number."""
    h, y = population()
    risk = several(base, L, weights=[1, 2, 5])
    leaf = h.clone().requires_grad_()
    (expected,) = torch.autograd.grad(risk.value(leaf, y), leaf)

    rows = all_couples(risk, y)
    a, b = entries(risk, leaf, y, rows)
    l, back = risk.pairs(a._replace(score=a.score.detach()), b._replace(score=b.score.detach()))
    meets = risk.pairing.meets(a, b, risk.sides[1])
    numbers = torch.bincount(rows % L, minlength=L)
    factor = len(rows) * torch.tensor(risk.pairing.weights, dtype=torch.float64) / numbers
    weights = risk.pair_weights(l, risk.estimate(l, meets), meets)
    pulls = back(weights * factor[rows % L].reshape(-1, *[1] * (l.ndim - 1)))
    (found,) = torch.autograd.grad((a.score, b.score), leaf, pulls)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@every_risk
def test_estimates_leave_out_what_does_not_count(base):
    """A couple's estimate is that of its label's own examples alone; NaN if there are none."""
    h, y = population()
    risk = several(base, L)
    linked, rows = risk.link(h), all_couples(risk, y)
    a, b = entries(risk, h, y, rows)
    found = risk.inner(a, b)
    side = {"negative": [0], "positive": [1], "all": [0, 1]}[risk.sides[1]]
    for row, u in zip(rows.tolist(), found, strict=True):
        i, l = divmod(row, L)
        mine = torch.isin(y[:, l], torch.tensor(side))
        alone = base.inner(Entry(linked[i : i + 1, l], ()), Entry(linked[mine, l], y[mine, l].double()))[0]
        torch.testing.assert_close(u, alone, rtol=0, atol=1e-12)
    unknown = b._replace(target=torch.full_like(b.target, -1))
    assert risk.inner(a, unknown).isnan().all()
    nobody = risk.pairing.meets(a, unknown, risk.sides[1])
    kept = risk.update_u(found, risk.losses(a, unknown), nobody, 0.1)
    torch.testing.assert_close(kept, found, rtol=0, atol=0)


def test_labels_without_a_side_are_left_out_of_the_value():
    h, y = population()
    y[:, 2] = -1
    first_two = several(auroc(), 2, weights=[1, 3]).value(h[:, :2], y[:, :2])
    torch.testing.assert_close(several(auroc(), L, weights=[1, 3, 7]).value(h, y), first_two)
    assert several(auroc(), L).value(h, torch.zeros_like(y)).isnan()


def test_scores_have_collapsed_only_if_those_of_all_labels_have():
    h, y = population()
    risk = several(partial_auc(), L)
    assert saturated_outputs(risk, torch.full_like(h, 3.0), y)
    one = torch.full_like(h, 3.0)
    one[:, 1] = h[:, 1]
    assert not saturated_outputs(risk, one, y)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: several(auroc(), 0), "between 1 and"),
        (lambda: several(auroc(), ["a", "a"]), "same name"),
        (lambda: several(auroc(), ["a", " "]), "printable"),
        (lambda: several(auroc(), "ab"), "list of their names"),
        (lambda: several(auroc(), 2, [1]), "2 positive numbers"),
        (lambda: several(auroc(), 2, [1, -1]), "2 positive numbers"),
        (lambda: several(contrastive(), 2), "one score per example"),
        (lambda: several(several(auroc(), 2), 2), "a risk of one label"),
        (lambda: several(ndcg(), 2), "a risk of one label"),
        (lambda: several(cvar_partial_auc(), 2), "not for CVaR"),
        (lambda: several(tpauc(), 2), "normalised = false"),
        (lambda: several("auroc", 2), "needs a risk"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_one_line(build, told):
    with pytest.raises(UserError, match=told):
        build()
