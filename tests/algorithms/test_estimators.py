"""Inner estimators: MSVR against transcriptions in NumPy, its special cases, and every executor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedxl import UserError, tree
from fedxl.algorithms import SOX, FeDXL2, LocalPair
from fedxl.algorithms.compositional import PairWork
from fedxl.algorithms.estimators import corrected
from fedxl.algorithms.protocol import Batch
from fedxl.data.federation import from_arrays
from fedxl.engine.drawing import PoolDraws
from fedxl.models import weights_of
from fedxl.risks import auroc, average_precision, identity, p_norm_push, partial_auc
from tests.algorithms.test_algorithms import BATCH, batches_of, engine_of
from tests.conftest import RAGGED, make_clients
from tests.engine.test_executors import assert_agree, final_state
from tests.running import play

GAMMA, BETA, LR = 0.3, 0.4, 0.05


def linear_model() -> nn.Module:
    model = nn.Linear(5, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.1)
    return model


def test_msvr_of_sox_against_a_plain_transcription():
    """P-norm push with the logistic loss (a mean inside, p = 3 outside): every derivative by hand."""
    sizes, p = (20, 14), 3.0  # S1 are the negatives
    federation = from_arrays(make_clients([sizes]))
    algorithm = SOX(p_norm_push(p=p), lr=LR, beta=BETA, gamma=GAMMA, estimator="msvr")
    engine = engine_of(algorithm, linear_model(), federation)
    server = algorithm.init(weights_of(linear_model()))
    theta = (14 - BATCH) / (BATCH * (1 - GAMMA)) + 1 - GAMMA
    w, G, u, corrections = np.full(5, 0.1), np.zeros(5), np.full(14, np.nan), 0
    for r in range(1, 7):
        rows = engine.drawing.draw(0, r, engine.store.visits(0), None).rows
        past = w
        for (x, _), at in zip(batches_of(engine, 0, r), rows, strict=True):
            x1, x2 = x.numpy()[:BATCH], x.numpy()[BATCH:]

            def losses(w, x1=x1, x2=x2):
                return np.log1p(np.exp((x1 @ w)[:, None] - (x2 @ w)[None]))

            l, l_past = losses(w), losses(past)
            for i, row in enumerate(at):
                old, g = u[row], l[i].mean()
                if np.isnan(old):
                    u[row] = g
                    continue
                new = (1 - GAMMA) * old + GAMMA * g + theta * (g - l_past[i].mean())
                corrections += abs(g - l_past[i].mean()) > 1e-6
                u[row] = np.clip(new, min(old, l[i].min()), max(old, l[i].max()))
            weights = p * u[at] ** (p - 1) / (BATCH * BATCH)
            slope = weights[:, None] * (1 - np.exp(-l))  # d log(1 + e^t) / dt
            gradient = slope.sum(1) @ x1 - slope.sum(0) @ x2
            G = (1 - BETA) * G + BETA * gradient
            past, w = w, w - LR * G
        server = play(algorithm, engine, server, r, np.array([0]))
        np.testing.assert_allclose(server.weights.params["weight"].numpy()[0], w, rtol=0, atol=1e-12)
        np.testing.assert_allclose(engine.population.states["0"].u.numpy(), u, rtol=0, atol=1e-12)
    assert corrections > 20


def test_msvr_of_fedxl_pairs_two_models_with_the_same_pool():
    """One client, two rounds after the warm-up: u by hand from the scores that the client was sent."""
    federation, lam = from_arrays(make_clients([(9, 12)])), 0.7
    risk = partial_auc(lam=lam, surrogate="logistic", scores="sigmoid")
    algorithm = FeDXL2(risk, lr=0.3, beta=BETA, gamma=GAMMA, estimator="msvr", level="free")
    engine = engine_of(algorithm, linear_model(), federation)
    server = algorithm.init(weights_of(linear_model()))
    u = np.full(9, np.nan)
    theta = (9 - BATCH) / (BATCH * (1 - GAMMA)) + 1 - GAMMA
    for r in range(4):
        if r:
            pool = PoolDraws.of(algorithm.pool_weights(server))
            draws = engine.drawing.draw(0, r, engine.store.visits(0), pool)
            trail = weights_along(algorithm, engine, server, r)
            for k, (x, _) in enumerate(batches_of(engine, 0, r)):
                b = server.pool.second.b.numpy()[draws.lag2[k]]
                at, x1 = draws.rows[k], x.numpy()[:BATCH]

                def exponentials(w, x1=x1, b=b):
                    a = 1 / (1 + np.exp(-(x1 @ w)))
                    return np.exp(np.log1p(np.exp(-(a[:, None] - b[None]))) / lam)

                e, e_past = exponentials(trail[k]), exponentials(trail[max(0, k - 1)])
                for i, row in enumerate(at):
                    old, g = u[row], e[i].mean()
                    new = (1 - GAMMA) * old + GAMMA * g + theta * (g - e_past[i].mean())
                    u[row] = g if np.isnan(old) else np.clip(new, min(old, e[i].min()), max(old, e[i].max()))
        server = play(algorithm, engine, server, r, np.array([0]))
        if r:
            np.testing.assert_allclose(np.exp(engine.population.states["0"].u.numpy()), u, rtol=0, atol=1e-11)


def weights_along(algorithm, engine, server, r) -> list[np.ndarray]:
    """The weights with which each step of a round begins."""
    draws = engine.drawing.draw(0, r, engine.store.visits(0), PoolDraws.of(algorithm.pool_weights(server)))
    client = engine.store.state(0, lambda client: algorithm.init_client(server, 9))
    work = algorithm.start(server, client, tree.map(lambda leaf: leaf[0], engine.shares))
    found = []
    for (x, y), rows, lag1, lag2 in zip(
        batches_of(engine, 0, r), *map(torch.from_numpy, (draws.rows, draws.lag1, draws.lag2)), strict=True
    ):
        found.append(work.weights.params["weight"][0].numpy())
        batch = Batch(x, y.double(), rows, algorithm.passive(server, lag1, lag2), ())
        work, _ = algorithm.step(engine.score, server, work, batch)
    return found


@pytest.mark.parametrize("risk", [partial_auc(lam=0.4), average_precision()], ids=["log domain", "two numbers"])
def test_a_correction_that_goes_too_far_stays_among_the_losses(risk):
    l = torch.rand(3, 5, *risk.inner_shape, dtype=torch.float64)
    now = risk.estimate(l)
    for sign in (-1, 1):
        u = corrected(risk, now, now, now + sign * 0.1, torch.tensor(100.0, dtype=torch.float64))
        unknown = torch.full_like(now, float("nan"))
        scaled = l if risk.lam is None else l / risk.lam
        end = scaled.amax(1) if sign < 0 else scaled.amin(1)
        torch.testing.assert_close(risk.within(u, unknown, l), end)
        outside = scaled.amax(1) + 1 if sign < 0 else scaled.amin(1) - 1
        torch.testing.assert_close(risk.within(u, outside, l), outside)


def test_theta_is_that_of_the_paper():
    algorithm = SOX(partial_auc(), gamma=0.2, estimator="msvr")
    rows = torch.tensor([100.0, 8.0, 3.0], dtype=torch.float64)
    expected = [92 / (8 * 0.8) + 0.8, 0.8, 0.8]  # all of S1 in a batch, or less than one: STORM's 1 - gamma
    torch.testing.assert_close(algorithm.theta(rows, 8), torch.tensor(expected, dtype=torch.float64))
    assert float(SOX(partial_auc(), estimator="msvr", correction=2.5).theta(rows, 8)[0]) == 2.5


def test_with_gamma_1_the_average_is_bsgd():
    """Nothing that was known before is used: gradients are those of the batch's own means."""
    random = torch.Generator().manual_seed(0)
    a, b = (torch.rand(n, generator=random, dtype=torch.float64, requires_grad=True) for n in (4, 6))
    one, risk = torch.ones((), dtype=torch.float64), partial_auc(lam=0.5)
    y, labels = torch.zeros(6, dtype=torch.float64), torch.tensor([1] * 4 + [0] * 6)
    outputs = torch.cat((a, b))
    exact = torch.autograd.grad(replace(risk, link=identity).value(outputs, labels), (a, b))
    work = PairWork(weights_of(linear_model()), {}, a, one, factors=torch.stack((one, one)), both=one, moved=0 * one)
    for before in (0.1, 7.0, float("nan")):
        u = torch.full((4,), before, dtype=torch.float64)
        da, db, _ = SOX(risk, gamma=1.0).pull((), work, a.detach(), b.detach(), y, u)
        torch.testing.assert_close((da, db), exact, rtol=0, atol=1e-12)


OPTIONS = {
    "fedxl2": {},
    "fedxl2 with fresh points and mix": {"fresh": True, "mix": 0.2},
    "local_pair": {},
    "sox": {"correction": 2.0},
}


@pytest.mark.parametrize("case", list(OPTIONS))
def test_executors_agree(case, network):
    """Ragged clients: theta follows from a client's own number of rows, not from the padding."""
    options = {"lr": 0.1, "gamma": 0.3, "estimator": "msvr", **OPTIONS[case]}
    args = (partial_auc(), network(), make_clients(RAGGED))
    executors = ("loop", "vmap", "graph vectorised")
    states = [final_state(case.split()[0], options, *args, executor, cohort=4) for executor in executors]
    assert_agree(*states)
    plain = final_state(
        case.split()[0], {**options, "estimator": "average", "correction": 0.0}, *args, "loop", cohort=4
    )
    assert (states[0]["server.weights.params.0.weight"] - plain["server.weights.params.0.weight"]).abs().max() > 1e-7


@pytest.mark.parametrize(
    ("risk", "options", "message"),
    [
        (partial_auc(), {"estimator": "storm"}, "msvr"),
        (auroc(), {"estimator": "msvr"}, "linear risk"),
        (partial_auc(), {"estimator": "msvr", "gamma": 1.0}, "gamma below 1"),
        (partial_auc(), {"correction": 1.0}, "estimator = 'msvr'"),
        (partial_auc(), {"estimator": "msvr", "correction": -1.0}, "not be negative"),
    ],
)
def test_mistakes_are_one_line(risk, options, message):
    with pytest.raises(UserError, match=message):
        LocalPair(risk, **options)
