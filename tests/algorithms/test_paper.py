"""FeDXL against a plain transcription of the paper's Algorithms 1, 2 and 3: NumPy, explicit loops, a linear model.

The transcription works with u itself, not its logarithm, and writes every derivative by hand. It shares nothing with
the library but the indices that were drawn.
"""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from fedxl import sampling
from fedxl.algorithms import build
from fedxl.data.examples import Examples
from fedxl.data.inputs import from_arrays
from fedxl.engine.drawing import host_weights
from fedxl.models import weights_of
from fedxl.risks import auroc, partial_auc
from tests.conftest import EXECUTORS, make_clients
from tests.running import engine_for, play

K, B1, B2, ROUNDS, LR, LAM = 3, 2, 3, 5, 0.02, 1.5


class PSM:
    """l(a, b) = 1 / (1 + exp(a - b)), f(g) = g."""

    @staticmethod
    def loss(a, b):
        return 1 / (1 + np.exp(a - b))

    @classmethod
    def d1(cls, a, b):
        return -cls.loss(a, b) * (1 - cls.loss(a, b))

    @classmethod
    def d2(cls, a, b):
        return cls.loss(a, b) * (1 - cls.loss(a, b))

    @staticmethod
    def df(u):
        return 1.0


class KLOPAUC:
    """l(a, b) = exp((1 - (a - b))_+^2 / lam), f(g) = lam log g."""

    @staticmethod
    def loss(a, b):
        return np.exp(max(0.0, 1 - (a - b)) ** 2 / LAM)

    @classmethod
    def d1(cls, a, b):
        return cls.loss(a, b) * -2 * max(0.0, 1 - (a - b)) / LAM

    @classmethod
    def d2(cls, a, b):
        return -cls.d1(a, b)

    @staticmethod
    def df(u):
        return LAM / u


def transcription(federation: Examples, draws, cohorts, w, risk, beta, gamma):
    """Algorithm 3 (1 and 2 if all clients take part). Returns the averaged model after each round."""
    x = federation.x.numpy()
    label = federation.y[:, 0].numpy()
    first = [part[label[part] == 1] for part in federation.parts]
    u = [{} for _ in federation.parts]  # row -> u; a first visit sets it
    G = np.zeros_like(w)
    H1, H2, U = [], [], []
    for i in cohorts[0]:  # lines 3 and 4: predictions with the initial model
        d = draws(i, 0, None)
        for k in range(K):
            H1 += [w @ x[z] for z in d.examples[k][:B1]] if len(first[i]) else []
            H2 += [w @ x[z] for z in d.examples[k][B1:]] if len(first[i]) < len(federation.parts[i]) else []
    U = [np.mean([risk.loss(a, b) for b in H2]) for a in H1]  # in place of the paper's u = 0

    models = []
    for r in range(1, len(cohorts)):
        pool1, poolU, pool2 = list(H1), list(U), list(H2)
        H1, H2, U, weights, gradients = [], [], [], [], []
        holders1 = sum(len(rows) > 0 for rows in first)
        holders2 = sum(len(rows) < len(part) for rows, part in zip(first, federation.parts, strict=True))
        n = len(federation.parts)
        for i in cohorts[r]:
            wi, Gi, d = w.copy(), G.copy(), draws(i, r, (len(pool1), len(pool2)))
            has1, has2 = len(first[i]) > 0, len(first[i]) < len(federation.parts[i])
            for k in range(K):
                z1, z2 = d.examples[k][:B1], d.examples[k][B1:]
                h1, h2 = [wi @ x[z] for z in z1], [wi @ x[z] for z in z2]
                passive2 = [pool2[j] for j in d.lag2[k]]
                passive1, passiveU = [pool1[j] for j in d.lag1[k]], [poolU[j] for j in d.lag1[k]]
                G1, G2 = np.zeros_like(w), np.zeros_like(w)
                if has1:
                    before = dict(u[i])
                    for p, row in enumerate(d.rows[k]):
                        g = np.mean([risk.loss(h1[p], b) for b in passive2])
                        u[i][row] = g if row not in before else (1 - gamma) * before[row] + gamma * g
                        for b in passive2:
                            G1 += risk.df(u[i][row]) * risk.d1(h1[p], b) * x[z1[p]] / (B1 * B2)
                    H1 += h1
                    U += [u[i][row] for row in d.rows[k]]
                if has2:
                    for q in range(B2):
                        for a, ua in zip(passive1, passiveU, strict=True):
                            G2 += risk.df(ua) * risk.d2(a, h2[q]) * x[z2[q]] / (B1 * B2)
                    H2 += h2
                Gi = (1 - beta) * Gi + beta * (n / holders1 * G1 + n / holders2 * G2)
                wi = wi - LR * Gi
            weights.append(wi)
            gradients.append(Gi)
        w, G = np.mean(weights, 0), np.mean(gradients, 0)
        models.append(w)
    return models


CASES = {
    "FeDXL1": (auroc(), PSM, "fedxl1", {"level": "free"}, 1.0),
    "FeDXL2": (
        partial_auc(lam=LAM, scores="raw"),
        KLOPAUC,
        "fedxl2",
        {"level": "free", "beta": 0.3, "gamma": 0.4},
        0.3,
    ),
}
SIZES = {
    "both classes everywhere": [(4, 9), (5, 5), (2, 7), (6, 6), (3, 8)],
    "one-class clients": [(4, 9), (5, 0), (0, 7), (6, 6), (3, 8)],
}


@pytest.mark.parametrize("executor", list(EXECUTORS))
@pytest.mark.parametrize("cohort", [0, 4], ids=["all clients", "4 of 5 (Algorithm 3)"])
@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize("case", list(CASES))
def test_against_the_transcription(case, sizes, cohort, executor):
    risk, plain, name, options, beta = CASES[case]
    federation = from_arrays(make_clients(SIZES[sizes], dim=4))
    model = nn.Linear(4, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.1)
    algorithm = build(name, risk, lr=LR, **options)
    engine = engine_for(algorithm, model, federation, EXECUTORS[executor](), K, B1, B2, seed=3)
    server = algorithm.init(weights_of(model))
    cohorts = [sampling.cohort(3, r, 5, cohort) for r in range(ROUNDS + 1)]

    drawn, actual = {}, []
    for r, members in enumerate(cohorts):
        for client in members:
            pool = host_weights(algorithm.pool_weights(server)) if r else None
            drawn[client, r] = engine.drawing.draw(client, r, engine.store.visits(client), pool)
        server = play(algorithm, engine, server, r, members)
        actual.append(server.weights.params["weight"].numpy()[0])

    def draws(client, r, pool_sizes):
        if pool_sizes is not None:  # the pool that the transcription built is the one the indices were drawn for
            assert drawn[client, r].lag1.max() < pool_sizes[0]
            assert drawn[client, r].lag2.max() < pool_sizes[1]
        return drawn[client, r]

    w = weights_of(model).params["weight"].numpy()[0].copy()
    expected = transcription(federation, draws, cohorts, w, plain, beta, options.get("gamma", 1.0))
    np.testing.assert_allclose(actual[0], w, rtol=0, atol=0, err_msg="round 0 must not move the model")
    for a, e in zip(actual[1:], expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=1e-12)
    assert np.abs(actual[-1] - w).max() > 1e-3, "the test must see the model move"
