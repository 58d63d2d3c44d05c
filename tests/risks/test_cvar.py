"""What is peculiar to the CVaR forms: thresholds that batches move, ties, and the share of S1 that counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedxl import UserError
from fedxl.algorithms import FeDXL2, LocalPair
from fedxl.algorithms.compositional import PairWork
from fedxl.algorithms.pool import Passive
from fedxl.data.federation import from_arrays
from fedxl.engine.executors import loop
from fedxl.metrics import resolve
from fedxl.models import weights_of
from fedxl.risks import cvar_partial_auc, cvar_two_way_partial_auc, identity
from fedxl.risks.cvar import counted, tail, top
from tests.conftest import RAGGED, make_clients
from tests.engine.test_executors import assert_agree, final_state
from tests.running import engine_for, fit_named, play


@pytest.mark.parametrize(("fpr", "fpr_from"), [(0.1, 0.0), (0.5, 0.2)])
def test_thresholds_go_to_the_quantiles_of_all_of_s2_however_small_a_batch(fpr, fpr_from):
    """Batches of 4, by far too few for these quantiles; 200 runs at once."""
    random = torch.Generator().manual_seed(0)
    risk = cvar_partial_auc(fpr=fpr, fpr_from=fpr_from, surrogate="logistic", scores="raw")
    a, b = (torch.randn(n, generator=random, dtype=torch.float64) for n in (3, 400))
    all_pairs = risk.losses(a, b, torch.zeros(400, dtype=torch.float64))
    u, seen = risk.estimate(all_pairs[:, :4]).expand(200, 3, len(risk.levels) + 1), []
    for step in range(300):
        some = torch.randint(400, (200, 4), generator=random)
        u = risk.renew(u, all_pairs[:, some].transpose(0, 1), 0.3 if step < 100 else 0.03)
        seen.append(u)
    settled = torch.stack(seen[200:]).flatten(0, 1)  # [runs, 3, m]
    above = (all_pairs[:, :, None, 0] > settled[:, :, :-1].transpose(0, 1)[:, None, :, 0]).double().mean((1, 2))
    torch.testing.assert_close(above, torch.full_like(above, fpr), rtol=0, atol=0.01)
    exact = risk.estimate(all_pairs)
    torch.testing.assert_close(settled.mean(0), exact, rtol=0.05, atol=0)


def test_a_first_visit_takes_the_quantiles_of_its_batch():
    risk = cvar_partial_auc(fpr=0.5, surrogate="psm")
    l = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64).unsqueeze(-1).expand(1, 4, 2)
    u = risk.renew(torch.full((1, 2), float("nan"), dtype=torch.float64), l, 0.1)
    assert u.tolist() == [[0.3, pytest.approx(0.35)]]
    after = risk.renew(u, l, 0.1)  # one of four lies above 0.3, half of them should
    assert after[0, 0] == pytest.approx(0.3 + 0.1 * (0.25 - 0.5))


def test_equal_values_divide_what_is_left_of_the_share():
    values = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    threshold = top(values, 0.5)
    assert float(threshold) == 1
    assert counted(values, threshold, 0.5).tolist() == pytest.approx([1, 0.5, 0.5, 0.5, 0])
    assert float(tail(values, threshold, 0.5)) == pytest.approx((3 + 1.5) / 2.5)
    assert counted(values, torch.tensor(2.0), 0.5).tolist() == [1, 0, 0, 0, 0], "nothing equal: nothing divided"
    assert counted(values, torch.tensor(-1.0), 0.5).tolist() == [1] * 5


def test_emphasis_of_a_sample_is_that_of_all_where_the_sample_is_all():
    risk = cvar_two_way_partial_auc(tpr=0.7, fpr=0.4)
    u = torch.rand(11, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = risk.emphasis(u)
    assert float(exact.mean()) == pytest.approx(1)
    assert sorted(exact.tolist())[-3:] == pytest.approx([1 / 0.3] * 3)
    torch.testing.assert_close(risk.emphasis(u, sample=u), exact)
    extreme = torch.full((3, 2), 1e6, dtype=torch.float64)
    assert float(risk.emphasis(extreme, sample=u).max()) <= 1 / 0.3 + 1e-12
    both = risk.emphasis(torch.stack((u, extreme[:1].expand(11, 2))), sample=u)
    torch.testing.assert_close(both[0], exact)


@pytest.mark.parametrize("name", ["fedxl", "local_pair"])
def test_small_batches_have_the_gradient_of_the_exact_share_on_average(name):
    """Four of 60 positives a step. By the quantile of four f the gradient is another, and far beyond the noise."""
    risk, count, random = cvar_two_way_partial_auc(tpr=0.7, fpr=0.4), 4, torch.Generator().manual_seed(4)
    h = torch.rand(90, generator=random, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1] * 60 + [0] * 30)
    (exact,) = torch.autograd.grad(replace(risk, link=identity).value(h, labels), h)
    a, b, y = h.detach()[:60], h.detach()[60:], torch.zeros(30, dtype=torch.float64)
    u, one = risk.inner(a, b, y), torch.ones((), dtype=torch.float64)
    batches = torch.stack([torch.randperm(60, generator=random)[:count] for _ in range(2000)])

    def mean_error(known: torch.Tensor, threshold: torch.Tensor) -> float:
        """The error of the mean gradient along itself, in standard errors."""
        work = PairWork(weights_of(nn.Linear(1, 1)), {}, known, one, torch.stack((one, one)), one, 0 * one)
        if name == "fedxl":
            work = work._replace(threshold=threshold)
        algorithm = FeDXL2(risk) if name == "fedxl" else LocalPair(risk)

        def gradient(rows: torch.Tensor) -> torch.Tensor:
            passive = Passive(a[rows], u[rows], b, y)
            da, db, _ = algorithm.pull(passive, work, a[rows], b, y, u[rows])
            return torch.cat((torch.zeros_like(a).index_put((rows,), da), db))

        each = torch.vmap(gradient)(batches)
        along = (each - exact) @ exact
        return float(along.mean().abs() / (along.std() / len(along) ** 0.5))

    none = torch.full_like(u, float("nan"))
    assert mean_error(none, none[0, 0]) > 10, "the threshold of the batch alone"
    assert mean_error(u, risk.share_threshold(u)) < 3, "the threshold of all of S1"


def test_the_threshold_of_a_share_is_that_of_what_is_known_by_its_weight():
    risk = cvar_two_way_partial_auc(tpr=0.5, fpr=0.4)
    f = torch.tensor([0.4, float("nan"), 0.1, 0.3, 0.2], dtype=torch.float64)
    u = torch.stack((0 * f, f), -1)
    assert float(risk.share_threshold(u)) == 0.3
    assert float(risk.share_threshold(u, torch.tensor([1.0, 9.0, 1.0, 0.0, 2.0]))) == 0.2
    assert float(risk.share_threshold(u, torch.tensor([2.0, 0.0, 0.5, 0.5, 0.5]))) == 0.4
    assert risk.share_threshold(u[1:2]).isnan()
    assert risk.share_threshold(u, torch.zeros(5)).isnan()


def test_the_server_tells_the_threshold_of_its_pool_and_clients_use_it():
    model, algorithm = nn.Linear(5, 1).double(), FeDXL2(cvar_two_way_partial_auc(tpr=0.5, fpr=0.5), lr=0.1)
    engine = engine_for(algorithm, model, from_arrays(make_clients([(9, 12), (7, 9)])), loop, 2, 3, 4)
    server = algorithm.init(weights_of(model))
    assert server.threshold.isnan(), "there is no pool yet"
    for round in range(3):
        server = play(algorithm, engine, server, round, np.arange(2))
        f = server.pool.first.u[:, -1]
        assert float((f >= server.threshold).double().mean()) >= 0.5 > float((f > server.threshold).double().mean())
    moved = play(algorithm, engine, server, 3, np.arange(2))
    other = play(algorithm, engine, server._replace(threshold=server.threshold + 9), 3, np.arange(2))
    assert not torch.equal(moved.weights.params["weight"], other.weights.params["weight"])


@pytest.mark.parametrize("name", ["fedxl2", "local_pair"])
def test_executors_agree_on_thresholds(name, network):
    """Ragged clients, some with one class: what u is padded with is no example of anybody."""
    args = (cvar_two_way_partial_auc(tpr=0.4, fpr=0.6), network(), make_clients(RAGGED))
    assert_agree(*(final_state(name, {"lr": 0.1}, *args, executor, cohort=4) for executor in ("loop", "vmap")))


@pytest.mark.parametrize("tpr", [0.0, 0.6])
def test_both_pulls_are_the_exact_gradient(tpr):
    """All of S1 and S2 in one batch, the same scores in the pool: G1 is the gradient by a, G2 the one by b."""
    risk = cvar_two_way_partial_auc(tpr=tpr, fpr=0.6, fpr_from=0.2)
    h = torch.rand(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1] * 5 + [0] * 7)
    (exact,) = torch.autograd.grad(replace(risk, link=identity).value(h, labels), h)
    a, b, y = h.detach()[:5], h.detach()[5:], torch.zeros(7, dtype=torch.float64)
    passive = Passive(a, risk.inner(a, b, y), b, y)
    unknown, one = torch.full((5, 3), float("nan"), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    work = PairWork(weights_of(nn.Linear(1, 1)), {}, unknown, one, torch.stack((one, one)), one, 0 * one)
    for algorithm in (FeDXL2(risk), FeDXL2(risk, mix=0.3), LocalPair(risk)):
        da, db, _ = algorithm.pull(passive, work, a, b, y, unknown)
        torch.testing.assert_close(torch.cat((da, db)), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("risk", [cvar_partial_auc(fpr=0.2), cvar_two_way_partial_auc(tpr=0.3, fpr=0.3)], ids=str)
def test_it_trains_to_what_these_classes_allow(risk):
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
        ({"tpr": 1.0}, "tpr must lie"),
    ],
)
def test_mistakes_are_one_line(options, message):
    with pytest.raises(UserError, match=message):
        cvar_two_way_partial_auc(**options)


def test_msvr_is_for_means():
    with pytest.raises(UserError, match="thresholds"):
        FeDXL2(cvar_partial_auc(), estimator="msvr")
