"""How far from the maximum of the partial likelihood a linear model ends: by bins of times, and by `max_share`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import root
from torch import Tensor

from fedxl import cox
from fedxl.risks.pairing import Entry
from fedxl.risks.survival import AtEvent, AtRisk
from fedxl.risks.timetable import times_of, timetable

Gradient = Callable[[Tensor], Tensor]  # of coefficients


def patients(
    effect: list[float], count: int = 300, seed: int = 0, skewed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Features of variance 1, events and times of proportional hazards, about a third censored."""
    rng = np.random.default_rng(seed)
    shape = count, len(effect)
    x = rng.exponential(size=shape) - 1 if skewed else rng.normal(size=shape)
    time, last = rng.exponential(np.exp(-x @ effect)), rng.exponential(2, count)
    return torch.from_numpy(x), torch.from_numpy(time <= last), torch.from_numpy(np.minimum(time, last))


def where_zero(gradient: Gradient, size: int) -> np.ndarray:
    found = root(lambda w: gradient(torch.from_numpy(w)).numpy(), np.zeros(size), tol=1e-9)
    assert found.success, found.message
    return found.x


def of_risk(x: Tensor, event: Tensor, time: Tensor, max_share: float, bins: int = 0) -> Gradient:
    """The gradient of FeDXL's step: all pairs, exact u."""
    table = timetable([times_of(time.numpy(), event.numpy())], True, bins)
    risk = cox(max_share=max_share, time_bins=bins)
    pairing = risk.pairing.informed(table)
    everybody = [np.arange(len(x))]
    known = pairing.items(event.long(), None, time, everybody, False, 0)
    chosen = torch.nonzero(event).flatten()
    first = AtEvent(*(leaf[chosen] for leaf in (known.time, known.tie_discount, known.risk_share, known.stratum)))
    second = AtRisk(known.time, known.event, known.stratum)

    def gradient(w: Tensor) -> Tensor:
        h = x @ w
        a, b = Entry(h[chosen], first), Entry(h, second)
        l, back = risk.pairs(a, b)
        meets = pairing.meets(a, b, "all")
        da, db = back(risk.pair_weights(l, risk.estimate(l, meets), meets))
        return da @ x[chosen] + db @ x

    return gradient


def likelihood(x: Tensor, event: Tensor, time: Tensor) -> Gradient:
    def gradient(w: Tensor) -> Tensor:
        w = w.clone().requires_grad_()
        return torch.autograd.grad(cox().value(x @ w, event.long(), time=time), w)[0]

    return gradient


def test_without_a_limit_the_root_is_the_maximum_of_the_partial_likelihood():
    data = patients([1.0, -0.5])
    np.testing.assert_allclose(where_zero(of_risk(*data, 1e6), 2), where_zero(likelihood(*data), 2), atol=1e-6)


@pytest.mark.parametrize(
    ("effect", "skewed", "least", "most"),
    [(0.5, False, -0.001, 0.001), (1.0, False, 0, 0.02), (2.0, False, 0.03, 0.09), (2.0, True, 0.07, 0.15)],
)
def test_the_default_limit_makes_large_coefficients_larger(effect, skewed, least, most):
    """An example at risk whose hazard is more than ten times the mean pushes less than it should."""
    moved = []
    for seed in range(5):
        data = patients([effect], seed=seed, skewed=skewed)
        own, best = (float(where_zero(of_risk(*data, share), 1)[0]) for share in (10.0, 1e6))
        moved.append(own / best - 1)
    assert least <= np.mean(moved) < most


def test_the_mean_weight_of_tied_events_costs_less_than_bins_do():
    apart, by_bins = [], []
    for seed in range(5):
        x, event, time = patients([1.0, -0.5], seed=seed)
        exact = where_zero(likelihood(x, event, time), 2)
        table = timetable([times_of(time.numpy(), event.numpy())], True, 10)
        efron = where_zero(likelihood(x, event, torch.from_numpy(table.at[table.number(time.numpy())])), 2)
        mean = where_zero(of_risk(x, event, time, 1e6, 10), 2)
        apart.append(np.abs(mean - efron).mean())
        by_bins.append(np.abs(efron - exact).mean())
    assert np.mean(apart) < 0.5 * np.mean(by_bins)
    assert np.mean(by_bins) < 0.06
