"""FeDXL against a NumPy transcription of the paper's Algorithms 1 to 3: a linear model, every derivative by hand.

Two things are ours, not the paper's: an example's first u is its first estimate instead of 0, and the first pooled u
are those of the pooled scores (both are in docs/maths.md).
"""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from fedxl.algorithms import build
from fedxl.data.federation import from_arrays
from fedxl.engine.drawing import host_weights
from fedxl.engine.executors import loop
from fedxl.models import weights_of
from fedxl.risks import auroc, partial_auc
from tests.conftest import make_clients
from tests.running import engine_for, play

K, BATCH, LR, BETA, GAMMA, LAM = 3, 4, 0.05, 0.3, 0.4, 1.5
SIZES = [(6, 14), (5, 9), (8, 6)]


def hinge(t):
    """The squared hinge and its derivative."""
    gap = np.maximum(0.0, 1.0 - t)
    return gap**2, -2.0 * gap


def sigmoid_loss(t):
    """The pairwise sigmoid 1 / (1 + exp(t)) and its derivative."""
    l = 1.0 / (1.0 + np.exp(t))
    return l, -l * (1.0 - l)


class Reference:
    """The server and the clients of Algorithm 2 (and 1: f is the identity, beta is 1), for h(w; z) = w x."""

    def __init__(self, linear: bool, weights: np.ndarray) -> None:
        self.linear, self.w, self.G = linear, weights, np.zeros_like(weights)
        self.beta = 1.0 if linear else BETA
        self.u: dict[tuple[int, int], float] = {}  # by client and row
        self.H1 = self.U = self.H2 = np.zeros(0)

    def pair(self, t):
        """g's summand, and its derivative by t."""
        if self.linear:
            return sigmoid_loss(t)
        l, slope = hinge(t)
        return np.exp(l / LAM), np.exp(l / LAM) / LAM * slope

    def f_slope(self, u):
        return np.ones_like(u) if self.linear else LAM / u

    def warm_up(self, batches) -> None:
        """Lines 3 and 4: predictions by the initial model."""
        self.H1 = np.concatenate([x1.reshape(-1, x1.shape[-1]) @ self.w for x1, _ in batches])
        self.H2 = np.concatenate([x2.reshape(-1, x2.shape[-1]) @ self.w for _, x2 in batches])
        self.U = self.pair(self.H1[:, None] - self.H2[None])[0].mean(1)

    def round(self, clients) -> None:
        """clients: for each of the cohort its number, rows, batches of S1 and S2, and what it takes from the pool."""
        ends, H1, U, H2 = [], [], [], []
        for number, rows, x1, x2, lag1, lag2 in clients:
            w, G = self.w.copy(), self.G.copy()  # line 7
            for k in range(K):
                a, b = x1[k] @ w, x2[k] @ w  # line 14
                h_zeta, u_zeta, h_xi = self.H1[lag1[k]], self.U[lag1[k]], self.H2[lag2[k]]  # line 13
                g, slope = self.pair(a[:, None] - h_xi[None])
                keys = [(number, int(row)) for row in rows[k]]
                old = [self.u.get(key, mean) for key, mean in zip(keys, g.mean(1), strict=True)]
                u = (1 - GAMMA) * np.array(old) + GAMMA * g.mean(1)  # line 16
                self.u |= zip(keys, u, strict=True)
                G1 = ((self.f_slope(u)[:, None] * slope).mean(1)[:, None] * x1[k]).mean(0)  # line 17
                _, slope = self.pair(h_zeta[:, None] - b[None])
                G2 = -((self.f_slope(u_zeta)[:, None] * slope).mean(0)[:, None] * x2[k]).mean(0)
                G = (1 - self.beta) * G + self.beta * (G1 + G2)  # line 18
                w = w - LR * G  # line 19
                H1.append(a), U.append(u), H2.append(b)
            ends.append((w, G))
        self.w, self.G = (np.mean(each, axis=0) for each in zip(*ends, strict=True))
        self.H1, self.U, self.H2 = (np.concatenate(each) for each in (H1, U, H2))


@pytest.mark.parametrize("linear", [True, False], ids=["Algorithm 1", "Algorithm 2"])
@pytest.mark.parametrize(
    "cohorts", [[(0, 1, 2)] * 4, [(0, 1, 2), (0, 2), (1, 2), (0, 1)]], ids=["all", "Algorithm 3"]
)
def test_fedxl_is_the_papers_pseudocode(linear, cohorts):
    federation = from_arrays(make_clients(SIZES))
    model = nn.Linear(5, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.2)
    risk = auroc() if linear else partial_auc(lam=LAM, scores="raw")
    options = {"lr": LR, "gamma": GAMMA, "level": "free", "one_class": "train"}
    name = "fedxl1" if linear else "fedxl2"
    algorithm = build(name, risk, **options, **({} if linear else {"beta": BETA}))
    engine = engine_for(algorithm, model, federation, loop, K, BATCH, BATCH)
    server, x = algorithm.init(weights_of(model)), engine.source.x.numpy()
    reference = Reference(linear, np.full(5, 0.2))
    for r, cohort in enumerate(cohorts):
        weights = algorithm.phase(r).pool_weights(server)
        pool = None if weights is None else host_weights(weights)
        drawn = [engine.drawing.draw(c, r, engine.store.visits(c), pool) for c in cohort]
        batches = [(x[d.examples[:, :BATCH]], x[d.examples[:, BATCH:]]) for d in drawn]
        if r == 0:
            reference.warm_up(batches)
        else:
            both = zip(cohort, drawn, batches, strict=True)
            reference.round([(c, d.rows, *z, d.lag1, d.lag2) for c, d, z in both])
        server = play(algorithm, engine, server, r, np.array(cohort))
        np.testing.assert_allclose(server.weights.params["weight"].numpy()[0], reference.w, rtol=0, atol=1e-12)
        np.testing.assert_allclose(server.pool.first.entry.score.numpy(), reference.H1, rtol=0, atol=1e-12)
        np.testing.assert_allclose(server.pool.second.entry.score.numpy(), reference.H2, rtol=0, atol=1e-12)
        if not linear:
            np.testing.assert_allclose(server.pool.first.u.exp().numpy(), reference.U, rtol=1e-12, atol=0)
            if r:
                np.testing.assert_allclose(server.G["weight"].numpy()[0], reference.G, rtol=0, atol=1e-12)
