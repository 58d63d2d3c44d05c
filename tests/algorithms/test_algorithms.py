"""What is peculiar to each algorithm, against references of its own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from fedxl import FeDXL2, UserError, tree
from fedxl.algorithms import build
from fedxl.data.examples import Examples, facts_about
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import vectorised
from fedxl.engine.simulator import Simulator
from fedxl.models import weights_of
from fedxl.risks import auroc, partial_auc, two_way_partial_auc
from tests.conftest import RAGGED, make_clients
from tests.running import engine_for, fit_named, play

K, BATCH = 3, 4


def engine_of(algorithm, model, federation, **options) -> Simulator:
    return engine_for(algorithm, model, federation, vectorised, K, BATCH, BATCH, **options)


def batches_of(engine: Simulator, client: int, r: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    indices = torch.from_numpy(engine.drawing.draw(client, r, engine.store.visits(client), None).examples)
    return [(engine.placed.fetch(row), engine.placed.y[row, 0]) for row in indices]


@pytest.mark.parametrize("weighting", ["clients", "samples"])
def test_local_sgd_is_torch_sgd_and_an_average(network, weighting):
    """Against torch.optim.SGD run by hand on the same batches, with weight decay and a milestone inside a round."""
    federation = from_arrays(make_clients(RAGGED))
    algorithm = build("local_sgd", auroc(), lr=0.3, weight_decay=0.01, milestones=[4], decay=0.1)
    engine = engine_of(algorithm, network(), federation, weighting=weighting)
    server = algorithm.init(weights_of(network()))
    reference = network()
    sizes = [len(part) for part in federation.parts]
    shares = [1 / len(sizes)] * len(sizes) if weighting == "clients" else [n / sum(sizes) for n in sizes]
    for r in (1, 2):
        locals_ = []
        for client in range(len(sizes)):
            local = copy.deepcopy(reference)
            optimiser = torch.optim.SGD(local.parameters(), lr=0.3, weight_decay=0.01)
            for k, (x, y) in enumerate(batches_of(engine, client, r)):
                optimiser.param_groups[0]["lr"] = 0.3 if (r - 1) * K + k < 4 else 0.03
                optimiser.zero_grad()
                nnf.binary_cross_entropy_with_logits(local(x).squeeze(-1), y.double()).backward()
                optimiser.step()
            locals_.append(local)
        server = play(algorithm, engine, server, r, np.arange(len(sizes)))
        with torch.no_grad():
            for name, p in reference.named_parameters():
                p.copy_(sum(s * dict(m.named_parameters())[name] for s, m in zip(shares, locals_, strict=True)))
        for name, p in reference.named_parameters():
            torch.testing.assert_close(server.weights.params[name], p.data, rtol=0, atol=1e-12)


@pytest.mark.parametrize("control", [True, False], ids=["CODASCA", "CODA+"])
def test_codasca_against_a_plain_transcription(control):
    """A linear model, every derivative by hand, two of three clients per round, a stage that ends on the way."""
    sizes = [(4, 9), (5, 5), (0, 7)]
    federation = from_arrays(make_clients(sizes))
    model = nn.Linear(5, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.2)
    p = facts_about(federation.holdings(), "clients").positive_share
    eta, gamma, wd, clip, T0 = 0.4, 20.0, 1e-2, 0.05, 6
    algorithm = build(
        "codasca", auroc(), lr=eta, positive_share=p, proximal=gamma, weight_decay=wd, clip=clip,
        stage_steps=T0, control=control,
    )  # fmt: skip
    engine = engine_of(algorithm, model, federation)
    server = algorithm.init(weights_of(model))

    v = {"w": np.full(5, 0.2), "a": 0.0, "b": 0.0, "alpha": 0.0}
    ref = dict(v)
    c = [{name: 0.0 * np.asarray(value) for name, value in v.items()} for _ in sizes]
    done = 0
    for r, cohort in enumerate([(0, 1), (1, 2), (0, 2), (0, 1)], start=1):
        mean_c = {name: sum(ci[name] for ci in c) / len(c) for name in v}
        ends, new_c = [], {}
        for i in cohort:
            local, total = dict(v), dict.fromkeys(v, 0.0)
            for k, (x, y) in enumerate(batches_of(engine, i, r)):
                x, y = x.numpy(), y.numpy()
                h = 1 / (1 + np.exp(-x @ local["w"]))
                d_h = (1 - p) * y * 2 * (h - local["a"]) + p * (1 - y) * 2 * (h - local["b"])
                d_h = d_h + 2 * local["alpha"] * (p * (1 - y) - (1 - p) * y)
                grad = {
                    "w": (d_h * h * (1 - h)) @ x / len(y),
                    "a": np.mean((1 - p) * y * -2 * (h - local["a"])),
                    "b": np.mean(p * (1 - y) * -2 * (h - local["b"])),
                    "alpha": 2 * (p * (1 - p) + np.mean(p * (1 - y) * h - (1 - p) * y * h))
                    - 2 * p * (1 - p) * local["alpha"],
                }
                grad = {name: np.clip(g, -clip, clip) for name, g in grad.items()}
                grad["alpha"] = -grad["alpha"]
                rate = eta / 3 ** ((done + k) // T0)
                step = {n: g + (mean_c[n] - c[i][n] if control else 0.0) for n, g in grad.items()}
                total = {n: total[n] + grad[n] for n in grad}
                local = {
                    "w": local["w"] - rate * (step["w"] + (local["w"] - ref["w"]) / gamma + wd * local["w"]),
                    "a": local["a"] - rate * (step["a"] + (local["a"] - ref["a"]) / gamma),
                    "b": local["b"] - rate * (step["b"] + (local["b"] - ref["b"]) / gamma),
                    "alpha": max(0.0, local["alpha"] - rate * step["alpha"]),
                }
            ends.append(local)
            new_c[i] = {n: t / K for n, t in total.items()}
        for i, value in new_c.items():
            c[i] = value
        v = {name: sum(end[name] for end in ends) / len(ends) for name in v}
        if (done + K) // T0 > done // T0:
            ref = dict(v)
        done += K

        server = play(algorithm, engine, server, r, np.array(cohort))
        np.testing.assert_allclose(server.point.params["weight"].numpy()[0], v["w"], rtol=0, atol=1e-12)
        for name in ("a", "b", "alpha"):
            assert float(getattr(server.point, name)) == pytest.approx(v[name], abs=1e-12)
    assert v["alpha"] > 0


def test_sox_is_local_pair_alone_and_follows_its_paper(network):
    """u from the batch itself, gradient with both sides active, moving average: against autograd by hand."""
    federation = from_arrays(make_clients([(12, 20)]))
    risk = partial_auc(lam=1.5, scores="raw")
    algorithm = build("sox", risk, lr=0.05, beta=0.3, gamma=0.4)
    engine = engine_of(algorithm, network(), federation)
    server = algorithm.init(weights_of(network()))
    model, u, G = network(), {}, None
    for r in (1, 2):
        draws = engine.drawing.draw(0, r, engine.store.visits(0), None)
        for (x, _), rows in zip(batches_of(engine, 0, r), draws.rows, strict=True):
            h = model(x).squeeze(-1)
            l = torch.exp(torch.relu(1 - (h[:BATCH, None] - h[None, BATCH:])) ** 2 / 1.5)
            g = l.mean(1)
            new = [gi if row not in u else 0.6 * u[row] + 0.4 * gi for row, gi in zip(rows, g.detach(), strict=True)]
            u |= dict(zip(rows, new, strict=True))
            loss = (1.5 / torch.stack(new) * g).mean()  # f'(u) g, f' without gradient
            gradient = torch.autograd.grad(loss, list(model.parameters()))
            G = (
                [0.3 * d for d in gradient]
                if G is None
                else [0.7 * m + 0.3 * d for m, d in zip(G, gradient, strict=True)]
            )
            with torch.no_grad():
                for p, m in zip(model.parameters(), G, strict=True):
                    p -= 0.05 * m
        server = play(algorithm, engine, server, r, np.array([0]))
        for name, p in model.named_parameters():
            torch.testing.assert_close(server.weights.params[name], p.data, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["fedxl2", "local_pair", "sox"])
def test_a_normalised_risk_trains(name):
    """Where the plain form begins with a gradient of 2e10, at a common rate, to what these classes allow."""
    risk = two_way_partial_auc(lam=0.05, lam_outer=0.05)
    clients, held = make_clients([(30, 60)] * 4, seed=1), make_clients([(500, 1000)], seed=2)[0]
    model = nn.Linear(5, 1, bias=False)
    nn.init.zeros_(model.weight)
    options = {"rounds": 10, "local_steps": 8, "batch1": 8, "batch2": 8, "lr": 0.01, "executor": "vmap", "seed": 0}
    result = fit_named(model, clients, risk, name, test=held, **options)
    assert result.metrics["test"]["pauc@0.3"] > 0.9


@pytest.mark.parametrize("scores", ["sigmoid", "raw"])
def test_estimates_of_raw_scores_are_kept_in_double_precision(scores):
    algorithm = build("fedxl2", partial_auc(scores=scores))
    server = algorithm.init(weights_of(nn.Linear(5, 1)))
    wanted = torch.float64 if scores == "raw" else torch.float32
    assert server.pool.first.u.dtype == algorithm.init_client(server, 3).u.dtype == wanted
    assert server.pool.first.entry.score.dtype == torch.float32


def test_local_pair_leaves_out_clients_without_pairs(network):
    """A one-class client has nothing to say: with it or without it, the others' average is the same."""
    results = []
    for sizes in ([(5, 8), (4, 6)], [(5, 8), (4, 6), (7, 0), (0, 9)]):
        federation = from_arrays(make_clients(sizes))
        algorithm = build("local_pair", partial_auc(), lr=0.1)
        engine = engine_of(algorithm, network(), federation)
        server = algorithm.init(weights_of(network()))
        results.append(play(algorithm, engine, server, 1, np.arange(len(sizes))))
    for name, value in results[0].weights.params.items():
        torch.testing.assert_close(value, results[1].weights.params[name], rtol=0, atol=1e-12)
    only = engine_of(algorithm, network(), from_arrays(make_clients([(7, 0), (0, 9)])))
    alone = play(algorithm, only, server, 1, np.arange(2))
    assert torch.equal(alone.weights.params["0.weight"], server.weights.params["0.weight"]), "nobody moved the model"


def test_a_cohort_without_negatives_waits_for_them(network):
    """Round 0 finds no S2 at all: nothing moves, no u is invented, and training starts once negatives come."""
    federation = from_arrays(make_clients([(5, 0), (6, 0), (4, 7)]))
    algorithm = build("fedxl2", partial_auc(), lr=0.1)
    engine = engine_of(algorithm, network(), federation)
    server = start = algorithm.init(weights_of(network()))
    one_class, all_clients = np.array([0, 1]), np.arange(3)
    server = play(algorithm, engine, server, 0, one_class)
    server = play(algorithm, engine, server, 1, one_class)
    assert torch.equal(server.weights.params["0.weight"], start.weights.params["0.weight"])
    assert engine.population.states["0"].u.isnan().all()
    server = play(algorithm, engine, server, 2, all_clients)
    assert server.pool.second.weight.sum() > 0, "client 2 has brought its negatives"
    server = play(algorithm, engine, server, 3, all_clients)
    assert not torch.equal(server.weights.params["0.weight"], start.weights.params["0.weight"])
    assert not engine.population.states["0"].u.isnan().all()
    assert tree.finite(server.weights)


def test_the_absent_keep_their_u(network):
    federation = from_arrays(make_clients(RAGGED))
    algorithm = build("fedxl2", partial_auc(), lr=0.1)
    engine = engine_of(algorithm, network(), federation)
    server = algorithm.init(weights_of(network()))
    server = play(algorithm, engine, server, 0, np.arange(6))
    server = play(algorithm, engine, server, 1, np.arange(6))
    before = engine.population.states["3"].u.clone()
    server = play(algorithm, engine, server, 2, np.array([0, 1, 2]))
    torch.testing.assert_close(engine.population.states["3"].u, before, rtol=0, atol=0, equal_nan=True)


def test_fresh_points_are_scored_by_the_model_and_not_trained_on(network):
    """With fresh points the pool differs, and round 0 and 1 train on the very same batches."""
    federation = from_arrays(make_clients([(9, 9), (8, 7)]))
    pools, params = [], []
    for fresh in (False, True):
        algorithm = build("fedxl2", auroc(), lr=0.1, fresh=fresh)
        engine = engine_of(algorithm, network(), federation)
        server = algorithm.init(weights_of(network()))
        server = play(algorithm, engine, server, 0, np.arange(2))
        server = play(algorithm, engine, server, 1, np.arange(2))
        pools.append(server.pool.first.entry.score)
        params.append(server.weights.params["0.weight"])
    assert pools[0].shape == pools[1].shape
    assert not torch.equal(*pools)
    assert torch.equal(*params), "which scores are uploaded matters only from the next round on"


def test_stand_ins_leave_batch_statistics_alone():
    """A client without positives fills that side with its own examples: BatchNorm sees nothing but its data."""
    x, y = make_clients([(0, 64)])[0]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
    federation = from_arrays([(3 * x + 2, y), *make_clients([(8, 8)])])
    algorithm = build("fedxl2", auroc(), lr=0.1, buffers="local")
    engine = engine_for(algorithm, model, federation, vectorised, 60, 32, 8)
    server = algorithm.init(weights_of(model))
    server = play(algorithm, engine, server, 0, np.arange(2))
    engine.run_round(server, 1, np.arange(2))
    found = engine.population.states["0"].buffers
    torch.testing.assert_close(found["0.running_mean"], (3 * x + 2).mean(0), rtol=0.2, atol=0.3)
    torch.testing.assert_close(found["0.running_var"], (3 * x + 2).var(0), rtol=0.3, atol=0.5)


def test_local_sgd_with_several_classes_is_multinomial_cross_entropy():
    """One client, one step, plain autograd beside it."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x, y = torch.randn(8, 5).double(), torch.tensor([0, 1, 2, 2, 1, 0, 1, 2])
    federation = Examples(x, y[:, None])
    algorithm = build("local_sgd", auroc(), lr=0.5)
    engine = engine_for(algorithm, model, federation, vectorised, 1, 4, 4)
    server = algorithm.init(weights_of(model))
    after = play(algorithm, engine, server, 1, np.arange(1))
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    for (name, before), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(after.weights.params[name], before - 0.5 * gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [3, ["fedxl2"], None, FeDXL2])
def test_what_is_no_name_of_an_algorithm_is_told(name):
    with pytest.raises(UserError, match="name must be an algorithm's, such as 'fedxl2', not"):
        build(name, auroc())
