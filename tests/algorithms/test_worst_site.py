"""The worst-site objective: steps against autograd of the whole objective, and what sites may report."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from fedxl import UserError, tree
from fedxl.algorithms import SOX, FeDXL1, FeDXL2, LocalPair
from fedxl.algorithms.compositional import ClientEstimates
from fedxl.algorithms.fedxl_state import FeDXLServer
from fedxl.algorithms.pool import Passive, empty
from fedxl.algorithms.protocol import Batch, Share
from fedxl.algorithms.worst_site import RiskLevel, check_reported, emphasis, level_after, tilted
from fedxl.data.federation import from_arrays
from fedxl.engine.executors import loop, vectorised
from fedxl.errors import RefusedError
from fedxl.models import scorer, weights_of
from fedxl.risks import RISKS, auroc, average_precision, partial_auc, two_way_partial_auc
from fedxl.training.hooks import Hooks
from tests.conftest import EXECUTORS, RAGGED, make_clients
from tests.engine.test_executors import assert_agree, final_state
from tests.running import engine_for, fit_named, play

LAM = 0.3
PARTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
CLIENTS = make_clients([(4, 6)] * 3)
LABELS = [y for _, y in CLIENTS]
LINKED = {"auroc": auroc(), "pauc": partial_auc(), "ap": average_precision()}


def gradient_of(model, objective) -> dict[str, Tensor]:
    """By autograd, of an objective of all clients' outputs."""
    params = {name: leaf.detach().requires_grad_() for name, leaf in model.named_parameters()}
    outputs = [torch.func.functional_call(model, params, (x,)).squeeze(-1) for x, _ in CLIENTS]
    found = torch.autograd.grad(objective(outputs), list(params.values()))
    return dict(zip(params, found, strict=True))


def worst(losses: list[Tensor]) -> Tensor:
    return LAM * torch.logsumexp(torch.stack(losses) / LAM + PARTS.log(), 0)


@pytest.mark.parametrize("risk", [*LINKED.values(), two_way_partial_auc()], ids=[*LINKED, "tpauc"])
def test_local_pair_descends_the_whole_objective(risk, network):
    """Full batches, one step: the gradient of lam log sum_i p_i exp(L_i / lam), L_i over the client's own pairs."""
    model = network()
    algorithm = LocalPair(risk, lr=0.5, beta=1.0, gamma=1.0, worst_site=LAM)
    engine = engine_for(algorithm, model, from_arrays(CLIENTS), vectorised, 1, 4, 10 if "all" in risk.sides else 6)
    engine.shares = engine.shares._replace(model=PARTS)
    start = algorithm.init(weights_of(model))
    after = play(algorithm, engine, start, 1, np.arange(3))

    expected = gradient_of(model, lambda h: worst([risk.value(*each) for each in zip(h, LABELS, strict=True)]))
    plain = gradient_of(
        model, lambda h: sum(p * risk.value(*each) for p, *each in zip(PARTS, h, LABELS, strict=True))
    )
    for name, gradient in expected.items():
        moved = (start.weights.params[name] - after.weights.params[name]) / 0.5
        torch.testing.assert_close(moved, gradient, rtol=0, atol=1e-12)
    apart = max(float((expected[name] - plain[name]).abs().max()) for name in plain)
    assert apart > 1e-4, "another step than that of the plain average"


@pytest.mark.parametrize("risk", list(LINKED.values()), ids=list(LINKED))
def test_fedxl_descends_the_whole_objective(risk, network):
    """With exact u, risks and pool, all draws of the pool enumerated: L_i is a site's S1 against everybody's S2."""
    model = network()
    algorithm = FeDXL2(risk, lr=0.5, beta=1.0, gamma=1e-14, level="free", worst_site=LAM)
    score, weights = scorer(model, True, "fp32"), weights_of(model)
    with torch.no_grad():
        h = [risk.link(score(weights, x)[0]) for x, _ in CLIENTS]
    second = risk.sides[1]
    a = [each[y > 0] for each, y in zip(h, LABELS, strict=True)]
    b = [each if second == "all" else each[y <= 0] for each, y in zip(h, LABELS, strict=True)]
    y = [(label if second == "all" else label[label <= 0]).double() for label in LABELS]
    u = [risk.inner(each, torch.cat(b), torch.cat(y)) for each in a]
    own = torch.stack([risk.outer(each).mean() for each in u])
    level = RiskLevel(torch.ones(()).double(), torch.logsumexp(own / LAM + PARTS.log(), 0))
    drawn = PARTS * torch.exp(own / LAM - level.log_mean)  # how often a site's scores of S1 are drawn
    assert float(drawn.sum()) == pytest.approx(1, abs=1e-12)

    one = torch.ones(()).double()
    pool = empty(risk, one.new_zeros(1), owned=False)
    pool = pool._replace(first=pool.first._replace(weight=one[None]), second=pool.second._replace(weight=one[None]))
    server = FeDXLServer(weights, {}, pool, torch.zeros((), dtype=torch.int64), worst=level)
    # Every site counts the same on S2, and its part on S1.
    moved = tree.map(torch.zeros_like, weights.params)
    for site, (x, labels) in enumerate(CLIENTS):
        share = Share(PARTS[site], one, (1 / 3) / PARTS[site], PARTS[site], one * site)
        client = ClientEstimates(u[site], {}, own[site])
        work = algorithm.start(server, client, share)
        keep = labels <= 0 if second == "negative" else labels >= 0
        batch_x, batch_y = torch.cat((x[labels > 0], x[keep])), torch.cat((labels[labels > 0], labels[keep])).double()
        for k, m in itertools.product(range(3), repeat=2):
            batch = Batch(batch_x, batch_y, torch.arange(4), Passive(a[k], u[k], b[m], y[m]), ())
            after, _ = algorithm.step(score, server, work, batch)
            by = PARTS[site] * drawn[k] / 3
            moved = tree.map(
                lambda total, old, new, by=by: total + by * (old - new) / 0.5, moved, weights.params,
                after.weights.params,
            )  # fmt: skip

    def objective(outputs: list[Tensor]) -> Tensor:
        linked = [risk.link(each) for each in outputs]
        keep = [torch.ones_like(y, dtype=torch.bool) if second == "all" else y <= 0 for y in LABELS]
        all_b = torch.cat([each[kept] for each, kept in zip(linked, keep, strict=True)])
        losses = [
            risk.outer(risk.inner(each[label > 0], all_b, torch.cat(y))).mean()
            for each, label in zip(linked, LABELS, strict=True)
        ]
        return worst(losses)

    for name, gradient in gradient_of(model, objective).items():
        torch.testing.assert_close(moved[name], gradient, rtol=0, atol=1e-10)


def test_tilted_shares_are_a_softmax():
    risks, shares = torch.tensor([0.5, 2.0, 9.0]).double(), torch.tensor([0.5, 0.3, 0.0]).double()
    found = tilted(shares, risks, 0.4)
    expected = torch.softmax(torch.tensor([0.5, 2.0]).double() / 0.4 + shares[:2].log(), 0)
    torch.testing.assert_close(found[:2] / found.sum(), expected)
    assert found[2] == 0
    assert tilted(torch.zeros(3), risks.float(), 0.4).tolist() == [0, 0, 0]
    assert tilted(shares, 1e6 * risks, 0.4).isfinite().all()


def test_the_level_is_set_by_all_and_moved_by_a_cohort_as_much_as_it_is_of_them():
    every = torch.ones(4).double()
    share = Share(every / 4, every, every, every / 4, torch.arange(4).double())
    risks = torch.tensor([0.1, 0.9, 0.4, 0.2], dtype=torch.float64)
    some = RiskLevel(torch.ones(()).double(), torch.tensor(0.7, dtype=torch.float64))
    whole = level_after(some, share, risks, 0.5)
    assert float(whole.log_mean) == pytest.approx(np.log(np.mean(np.exp(risks.numpy() / 0.5))), abs=1e-12)
    e = emphasis(whole, risks, share, 0.5)
    assert float((share.part * e).sum()) == pytest.approx(1, abs=1e-12)
    half = tree.map(lambda leaf: leaf[:2], share)
    mixed = level_after(some, half, risks[:2], 0.5)
    expected = np.log(0.5 * np.exp(0.7) + 0.5 * np.mean(np.exp(risks[:2].numpy() / 0.5)))
    assert float(mixed.log_mean) == pytest.approx(expected, abs=1e-12)
    unknown = RiskLevel(torch.zeros(()).double(), torch.zeros(()).double())
    assert emphasis(unknown, risks, share, 0.5).tolist() == [1] * 4
    assert emphasis(whole, risks * torch.nan, share, 0.5).tolist() == [1] * 4
    assert emphasis(whole, 1e9 * risks, share, 0.5).tolist() == pytest.approx([4] * 4), "all of S1, and no more"


@pytest.mark.parametrize("name", ["fedxl2", "local_pair"])
def test_executors_agree(name, network):
    """The running risk is a part of a client's state like any other."""
    options, risk = {"lr": 0.1, "worst_site": 0.2}, partial_auc()
    clients = make_clients(RAGGED)
    executors = EXECUTORS if name == "fedxl2" else ("loop", "vmap")
    states = [final_state(name, options, risk, network(), clients, executor, cohort=4) for executor in executors]
    assert_agree(*states)
    plain = final_state(name, {"lr": 0.1}, risk, network(), clients, "loop", cohort=4)
    apart = [float((states[0][key] - leaf).abs().max()) for key, leaf in plain.items() if "weights.params" in key]
    assert max(apart) > 1e-4


@pytest.mark.parametrize("algorithm", [FeDXL1, FeDXL2, LocalPair])
def test_a_large_lambda_is_the_plain_average(algorithm, network):
    found = []
    for options in ({}, {"worst_site": 1e14}):
        method = algorithm(auroc(), lr=0.3, **options)
        engine = engine_for(method, network(), from_arrays(make_clients(RAGGED)), loop, 2, 3, 4)
        method, server = engine.algorithm, method.init(weights_of(network()))
        for r in range(method.first_round, 4):
            server = play(method, engine, server, r, np.arange(6))
        found.append(server.weights.params)
    for name, plain in found[0].items():
        torch.testing.assert_close(found[1][name], plain, rtol=0, atol=1e-8)


def test_pooled_scores_of_s1_are_drawn_by_the_risks_of_their_sites(network):
    method = FeDXL2(partial_auc(), lr=0.3, worst_site=0.2)
    engine = engine_for(method, network(), from_arrays(make_clients(RAGGED)), vectorised, 2, 3, 4)
    server = method.init(weights_of(network()))
    for r in range(3):
        server = play(method, engine, server, r, np.arange(6))
    risks = torch.stack([engine.population.states[str(client)].risk for client in range(6)])
    part = engine.shares.part * engine.shares.first
    held = part > 0
    mass = server.pool.first.weight.view(int(held.sum()), -1).sum(1)
    expected = torch.softmax(risks[held] / 0.2 + part[held].log(), 0)
    torch.testing.assert_close(mass / mass.sum(), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(mass.sum(), part.sum(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in RISKS if name != "contrastive"])
def test_a_risk_that_scores_cannot_give_is_refused(name):
    risk = RISKS[name]()
    torch.manual_seed(0)
    for spread in (0.1, 3.0):
        h, labels = spread * torch.randn(40).double(), (torch.arange(40) % 3 == 0).long()
        check_reported(risk, risk.value(h, labels))
    for lie in (float("nan"), -1e13) if not risk.score_range.bounded else (float("nan"), -1e13, 1e13):
        with pytest.raises(RefusedError, match="which pairs of scores in range cannot give"):
            check_reported(risk, torch.tensor(lie))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LocalPair(auroc(), worst_site=-1.0), "worst_site must not be negative"),
        (lambda: SOX(partial_auc(), worst_site=1.0), "worst_site needs sites"),
        (lambda: FeDXL2(auroc(), worst_site=1.0, mix=0.1), "worst_site and mix cannot be combined"),
        (lambda: FeDXL2(two_way_partial_auc(), worst_site=1.0), "a mean over S1; for tpauc set normalised = false"),
    ],
)
def test_combinations_that_cannot_work_are_one_line(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_a_run_goes_on_from_its_risks(network, tmp_path):
    options = {
        "worst_site": 0.2, "clip_change": 2.0, "cohort": 4, "local_steps": 2, "batch1": 3, "batch2": 4,
        "executor": "loop", "dtype": "float64", "device": "cpu", "checkpoint_every": 1,
        "hooks": Hooks(say=lambda line: None),
    }  # fmt: skip
    whole = fit_named(network(), make_clients(RAGGED), partial_auc(), rounds=4, **options)
    fit_named(network(), make_clients(RAGGED), partial_auc(), rounds=2, out=tmp_path / "run", **options)
    rest = fit_named(
        network(), make_clients(RAGGED), partial_auc(), rounds=4, out=tmp_path / "run", resume=True, **options
    )
    for name, leaf in tree.pack(whole.server).items():
        assert torch.equal(tree.pack(rest.server)[name], leaf), name
