"""What is peculiar to the CVaR form: thresholds that batches move, and ties."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedxl import UserError
from fedxl.metrics import resolve
from fedxl.risks import Entry, cvar_partial_auc
from fedxl.risks.cvar import counted, tail, top
from tests.conftest import make_clients
from tests.running import fit_named


@pytest.mark.parametrize(("fpr", "fpr_from"), [(0.1, 0.0), (0.5, 0.2)])
def test_thresholds_go_to_the_quantiles_of_all_of_s2_however_small_a_batch(fpr, fpr_from):
    """Batches of 4, by far too few for these quantiles; 200 runs at once."""
    random = torch.Generator().manual_seed(0)
    risk = cvar_partial_auc(fpr=fpr, fpr_from=fpr_from, surrogate="logistic", scores="raw")
    a, b = (torch.randn(n, generator=random, dtype=torch.float64) for n in (3, 400))
    all_pairs = risk.losses(Entry(a, ()), Entry(b, torch.zeros_like(b)))
    u, seen = risk.estimate(all_pairs[:, :4]).expand(200, 3, len(risk.levels) + 1), []
    for step in range(300):
        some = torch.randint(400, (200, 4), generator=random)
        u = risk.update_u(u, all_pairs[:, some].transpose(0, 1), None, 0.3 if step < 100 else 0.03)
        seen.append(u)
    settled = torch.stack(seen[200:]).flatten(0, 1)  # [runs, 3, m]
    above = (all_pairs[:, :, None, 0] > settled[:, :, :-1].transpose(0, 1)[:, None, :, 0]).double().mean((1, 2))
    torch.testing.assert_close(above, torch.full_like(above, fpr), rtol=0, atol=0.01)
    exact = risk.estimate(all_pairs)
    torch.testing.assert_close(settled.mean(0), exact, rtol=0.05, atol=0)


def test_a_first_visit_takes_the_quantiles_of_its_batch():
    risk = cvar_partial_auc(fpr=0.5, surrogate="psm")
    l = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64).unsqueeze(-1).expand(1, 4, 2)
    u = risk.update_u(torch.full((1, 2), float("nan"), dtype=torch.float64), l, None, 0.1)
    assert u.tolist() == [[0.3, pytest.approx(0.35)]]
    after = risk.update_u(u, l, None, 0.1)  # one of four lies above 0.3, half of them should
    assert after[0, 0] == pytest.approx(0.3 + 0.1 * (0.25 - 0.5))


def test_equal_values_divide_what_is_left_of_the_share():
    values = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    threshold = top(values, 0.5)
    assert float(threshold) == 1
    assert counted(values, threshold, 0.5).tolist() == pytest.approx([1, 0.5, 0.5, 0.5, 0])
    assert float(tail(values, threshold, 0.5)) == pytest.approx((3 + 1.5) / 2.5)
    assert counted(values, torch.tensor(2.0), 0.5).tolist() == [1, 0, 0, 0, 0], "nothing equal: nothing divided"
    assert counted(values, torch.tensor(-1.0), 0.5).tolist() == [1] * 5


def test_it_trains_to_what_these_classes_allow():
    risk = cvar_partial_auc(fpr=0.2)
    clients, held = make_clients([(30, 60)] * 4, seed=1), make_clients([(500, 1000)], seed=2)[0]
    model = nn.Linear(5, 1, bias=False)
    nn.init.zeros_(model.weight)
    options = {"rounds": 10, "local_steps": 8, "batch1": 8, "batch2": 8, "lr": 0.3, "executor": "vmap", "seed": 0}
    result = fit_named(model, clients, risk, test=held, **options)
    metric = resolve([risk.metric])[0]
    best = metric.value(held[0].sum(1).numpy(), held[1].numpy())  # two Gaussian clouds, apart along the diagonal
    assert result.metrics["test"][risk.metric] > best - 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fpr": 0.0}, "fpr must lie"),
        ({"fpr": 0.2, "fpr_from": 0.2}, "fpr_from must lie"),
        ({"width": 0.0}, "width must be positive"),
    ],
)
def test_mistakes_are_one_line(options, message):
    with pytest.raises(UserError, match=message):
        cvar_partial_auc(**options)
