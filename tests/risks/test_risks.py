"""Risks against two independent references: the textbook formula in plain loops, and autograd of the whole F."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedxl.algorithms.checks import MOST_ESTIMATE, inner_range
from fedxl.risks import LINKS, RISKS, SURROGATES, Entry, XRisk, belongs, gap

N_POSITIVE, N = 7, 19

# Every risk with its options, and F by the book: h [n] or [n, 2 d] and labels, as plain numbers.
Reference = Callable[[list, list], float]


def hinge(t: float) -> float:
    return max(0.0, 1 - t) ** 2


PLAIN = {
    "psm": lambda t: 1 / (1 + math.exp(t)),
    "square": lambda t: (1 - t) ** 2,
    "squared_hinge": hinge,
    "logistic": lambda t: math.log(1 + math.exp(-t)),
}


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def sides(h, y):
    return [s for s, label in zip(h, y, strict=True) if label == 1], [
        s for s, label in zip(h, y, strict=True) if label == 0
    ]


def plain_auroc(loss):
    def value(h, y):
        pos, neg = sides(h, y)
        return mean(mean(loss(a - b) for b in neg) for a in pos)

    return value


def plain_pauc(lam, loss=hinge, squash=lambda s: s):
    def value(h, y):
        pos, neg = sides([squash(s) for s in h], y)
        return mean(lam * math.log(mean(math.exp(loss(a - b) / lam) for b in neg)) for a in pos)

    return value


def plain_tpauc(lam, outer, squash=None):
    def value(h, y):
        pos, neg = sides([(squash or sigmoid)(s) for s in h], y)
        return mean(mean(math.exp(hinge(a - b) / lam) for b in neg) ** (lam / outer) for a in pos)

    return value


def plain_log_tpauc(lam, outer, squash=None):
    return lambda h, y: outer * math.log(plain_tpauc(lam, outer, squash)(h, y))


def plain_cvar(fpr, start=0.0, loss=hinge, squash=None):
    """By sorting: the mean loss of the negatives between two ranks, a fraction of the last one included."""

    def total_of_largest(values, share):
        ordered, left, total = sorted(values, reverse=True), share * len(values), 0.0
        for value in ordered:
            total, left = total + min(1.0, left) * value, max(0.0, left - 1)
        return total

    def value(h, y):
        pos, neg = sides([(squash or sigmoid)(s) for s in h], y)
        f = []
        for a in pos:
            losses = [loss(a - b) for b in neg]
            inside = total_of_largest(losses, fpr) - total_of_largest(losses, start)
            f.append(inside / ((fpr - start) * len(neg)))
        return mean(f)

    return value


def plain_ap(h, y):
    scores = [sigmoid(s) for s in h]
    pos, _ = sides(scores, y)
    return mean(
        1
        - mean(label * hinge(a - s) for s, label in zip(scores, y, strict=True))
        / (mean(hinge(a - s) for s in scores) + 1e-3)
        for a in pos
    )


def plain_push(p):
    def value(h, y):
        pos, neg = sides(h, y)
        return mean(mean(PLAIN["logistic"](b - a) for b in pos) ** p for a in neg)

    return value


def plain_contrastive(dim, t):
    def cosine(p, q):
        return sum(a * b for a, b in zip(p, q, strict=True)) / math.sqrt(
            sum(a * a for a in p) * sum(b * b for b in q)
        )

    def value(h, y):
        total = 0.0
        for left, right in ((slice(dim), slice(dim, None)), (slice(dim, None), slice(dim))):
            total += mean(
                t * math.log(mean(math.exp((cosine(i[left], j[right]) - cosine(i[left], i[right])) / t) for j in h))
                for i in h
            )
        return total

    return value


def sigmoid(s: float) -> float:
    return 1 / (1 + math.exp(-s))


CASES: list[tuple[str, dict, Reference]] = [
    *(("auroc", {"surrogate": name}, plain_auroc(PLAIN[name])) for name in SURROGATES),
    ("auroc", {"scores": "sigmoid"}, lambda h, y: plain_auroc(PLAIN["psm"])([sigmoid(s) for s in h], y)),
    ("pauc", {"lam": 1.0, "scores": "raw"}, plain_pauc(1.0)),
    ("pauc", {"lam": 0.1, "scores": "sigmoid"}, plain_pauc(0.1, squash=sigmoid)),
    ("pauc", {"lam": 2.0, "surrogate": "logistic", "scores": "raw"}, plain_pauc(2.0, PLAIN["logistic"])),
    ("tpauc", {"lam": 0.5, "lam_outer": 2.0}, plain_log_tpauc(0.5, 2.0)),
    ("tpauc", {"lam": 1.0, "lam_outer": 0.2, "scores": "raw"}, plain_log_tpauc(1.0, 0.2, lambda s: s)),
    ("tpauc", {"lam": 0.5, "lam_outer": 2.0, "normalised": False}, plain_tpauc(0.5, 2.0)),
    ("cvar_pauc", {}, plain_cvar(0.3)),
    ("cvar_pauc", {"fpr": 0.5, "scores": "raw"}, plain_cvar(0.5, squash=lambda s: s)),
    ("cvar_pauc", {"fpr": 0.6, "fpr_from": 0.2, "surrogate": "psm"}, plain_cvar(0.6, 0.2, loss=PLAIN["psm"])),
    ("cvar_pauc", {"fpr": 1.0, "surrogate": "logistic"}, plain_cvar(1.0, loss=PLAIN["logistic"])),
    ("ap", {}, plain_ap),
    ("p_norm_push", {"p": 3.0}, plain_push(3.0)),
    ("contrastive", {"dim": 3, "temperature": 0.2}, plain_contrastive(3, 0.2)),
]
every_risk = pytest.mark.parametrize(("name", "options", "reference"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])


def population(outputs: int) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
        x = torch.randn(N, 4, dtype=torch.float64)
    y = torch.tensor([1] * N_POSITIVE + [0] * (N - N_POSITIVE))
    return model, x, y


def outputs(model: nn.Module, x: Tensor, risk: XRisk) -> Tensor:
    h = model(x)
    return h if risk.score_shape else h.squeeze(-1)


def test_every_risk_is_tested():
    assert {case[0] for case in CASES} == set(RISKS)


@pytest.mark.parametrize("block", [2**19, 25, 1], ids="block={}".format)
@every_risk
def test_value_is_the_textbook_formula(monkeypatch, block, name, options, reference):
    """Also if pairs are evaluated a few rows, or one, at a time."""
    monkeypatch.setattr(XRisk.inner, "__defaults__", (block,))
    risk = RISKS[name](**options)
    model, x, y = population(math.prod(risk.score_shape))
    h = outputs(model, x, risk)
    h = h.detach()
    assert float(risk.value(h, y)) == pytest.approx(reference(h.tolist(), y.tolist()), abs=1e-12)


@every_risk
def test_gradient_of_the_pull_is_the_gradient_of_the_risk(name, options, reference):
    """Whole population, exact u, both sides active: the identity everything stands on."""
    risk = RISKS[name](**options)
    model, x, y = population(math.prod(risk.score_shape))
    params = list(model.parameters())
    expected = torch.autograd.grad(risk.value(outputs(model, x, risk), y), params)

    h = risk.link(outputs(model, x, risk))
    first, second = (belongs(y, side) for side in risk.sides)
    l, back = risk.pairs(Entry(h[first].detach(), ()), Entry(h[second].detach(), y[second].double()))
    da, db = back(risk.pair_weights(l, risk.estimate(l)))
    actual = torch.autograd.grad((h[first], h[second]), params, (da, db))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-10)


@every_risk
def test_active_and_passive_halves_add_up(name, options, reference):
    """G1 (first side active) + G2 (second side active) = the whole gradient."""
    risk = RISKS[name](**options)
    model, x, y = population(math.prod(risk.score_shape))
    params = list(model.parameters())
    expected = torch.autograd.grad(risk.value(outputs(model, x, risk), y), params)
    h = risk.link(outputs(model, x, risk))
    first, second = (belongs(y, side) for side in risk.sides)
    a, b, y2 = h[first], h[second], y[second].double()
    u = risk.inner(Entry(a.detach(), ()), Entry(b.detach(), y2))
    halves = []
    for active, passive in ((a, b.detach()), (a.detach(), b)):
        l = risk.pair(active, passive, y2)
        pull = (risk.coupling(l, u) * l).sum() / (len(a) * len(b))  # mean over pairs of <c, l>, c without gradient
        halves.append(torch.autograd.grad(pull, params, retain_graph=True))
    for one, other, e in zip(*halves, expected, strict=True):
        torch.testing.assert_close(one + other, e, rtol=0, atol=1e-10)


@every_risk
def test_finite_differences_of_the_value(name, options, reference):
    risk = RISKS[name](**options)
    generator = torch.Generator().manual_seed(2)
    h = torch.randn(N, *risk.score_shape, generator=generator, dtype=torch.float64)
    y = torch.tensor([1] * N_POSITIVE + [0] * (N - N_POSITIVE))
    direction = torch.randn(h.shape, generator=generator, dtype=torch.float64)
    leaf = h.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(risk.value(leaf, y), leaf)
    step = 1e-6
    numeric = (risk.value(h + step * direction, y) - risk.value(h - step * direction, y)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(numeric), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("lam", [0.1, 1.0])
def test_partial_auc_survives_any_scores(lam):
    """Single precision, gaps of 1000 either way: value, blend and gradient stay finite."""
    risk = RISKS["pauc"](lam=lam, scores="raw")
    a = torch.tensor([1000.0, -1000.0, 0.0])
    b = torch.tensor([900.0, -900.0, 3.0, 0.0])
    l, back = risk.pairs(Entry(a, ()), Entry(b, torch.zeros(4)))
    g = risk.estimate(l)
    u = risk.blend(torch.tensor([0.0, float("nan"), 1e7]), g, 0.1)
    assert torch.isfinite(u).all()
    for estimate in (u, torch.zeros(3)):  # ... even of a u far too small, as after a great leap of the scores
        assert all(torch.isfinite(gradient).all() for gradient in back(risk.pair_weights(l, estimate)))
    assert math.isfinite(risk.value(torch.cat([a, b]), torch.tensor([1] * 3 + [0] * 4)))


def test_log_domain_blend_is_the_plain_blend():
    risk = RISKS["pauc"](lam=1.0)
    u, g = torch.tensor([0.3, 2.0, float("nan")]), torch.tensor([1.0, -1.0, 0.7])
    plain = torch.log(0.8 * u.exp() + 0.2 * g.exp())
    torch.testing.assert_close(risk.blend(u, g, 0.2)[:2], plain[:2])
    assert risk.blend(u, g, 0.2)[2] == g[2], "a first visit takes the first estimate"
    torch.testing.assert_close(risk.blend(u, g, 1.0), g)


def test_there_is_no_value_without_a_side():
    risk, h = RISKS["pauc"](), torch.zeros(50)
    assert torch.isnan(risk.value(h, torch.zeros(50))), "no positives: no risk to speak of"


@every_risk
def test_a_slope_left_out_is_found_by_autograd(name, options, reference):
    risk = RISKS[name](**options)
    derived = dataclasses.replace(risk, slope=None)
    generator = torch.Generator().manual_seed(3)
    u = torch.rand(5, *risk.inner_shape, generator=generator, dtype=torch.float64) + 0.5
    l = torch.rand(5, 4, *risk.inner_shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(derived.coupling(l, u), risk.coupling(l, u).expand_as(derived.coupling(l, u)))
    assert risk.linear == derived.linear == (name == "auroc")


def test_psm_is_symmetric():
    t = torch.linspace(-5, 5, 11)
    torch.testing.assert_close(SURROGATES["psm"](t, 1.0) + SURROGATES["psm"](-t, 1.0), torch.ones(11))


def in_range(risk: XRisk, count: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Scores all over the range, its ends among them; vectors of length 1 where a score is made of such."""
    low, high, unit, _ = risk.score_range
    if unit:
        h = torch.randn(count, *risk.score_shape, generator=generator, dtype=dtype)
        return risk.link(torch.cat((h, -h)))
    h = torch.rand(count, *risk.score_shape, generator=generator, dtype=dtype) * (high - low) + low
    return torch.cat((h, h.new_tensor([low, high])))


@every_risk
def test_links_give_scores_in_range(name, options, reference):
    risk = RISKS[name](**options)
    generator = torch.Generator().manual_seed(4)
    for dtype in (torch.float32, torch.float64):
        h = torch.randn(500, *risk.score_shape, generator=generator, dtype=dtype)
        for size in (0.0, 1e-3, 1.0, 100.0):
            assert risk.score_range.holds(risk.link(size * h))
    inside = in_range(risk, 5, generator)
    for wrong in (1e30, -1e30, math.nan, math.inf):
        assert not risk.score_range.holds(inside.index_fill(0, torch.tensor([3]), wrong))
    if risk.score_range.bounded:
        assert not risk.score_range.holds(inside * 10)
    else:
        assert not risk.score_range.holds(inside * 1.01)


@every_risk
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inner_estimates_of_scores_in_range_lie_within_their_bounds(name, options, reference, dtype):
    """By brute force: batches of any size, any labels, blended any number of times."""
    risk = RISKS[name](**options)
    low, high = inner_range(risk)
    generator = torch.Generator().manual_seed(5)
    u = torch.full((1, *risk.inner_shape), math.nan, dtype=risk.dtype(dtype))
    for count in (1, 2, 30, 1, 30):
        a, b = in_range(risk, 30, generator, dtype), in_range(risk, count, generator, dtype)
        some = torch.randperm(len(b), generator=generator)[:count]
        y = torch.randint(0, 2, (len(some),), generator=generator).to(dtype)
        u = risk.update_u(u, risk.pair(a, b[some], y), None, 0.3)
        assert bool(((u >= low) & (u <= high)).all())
    for wrong in (-1e30, 1e30):
        assert not bool(((low <= wrong) & (high >= wrong)).any())
    l = risk.pair(a, b, torch.ones(len(b), dtype=dtype)) / (risk.lam or 1.0)
    reached = l.flatten(0, 1)
    assert bool((high - low <= 2 * (reached.amax(0) - reached.amin(0)) + 0.1).all()), "bounds are not far beyond"


def test_a_mean_of_losses_is_not_below_zero():
    """Just below it average precision has the pole of its f."""
    low, _ = inner_range(RISKS["ap"](damping=1e-9))
    assert low.tolist() == [0, 0]


def test_a_risk_of_ones_own_has_bounds():
    steep = XRisk(pair=lambda a, b, y: torch.exp(-gap(a, b)), outer=lambda g: g**3)
    assert [float(bound) for bound in inner_range(steep)] == [-MOST_ESTIMATE, MOST_ESTIMATE]
    vectors = XRisk(pair=lambda a, b, y: a @ b.mT, outer=lambda g: g**3, score_shape=(3,))
    assert [float(bound) for bound in inner_range(vectors)] == [-MOST_ESTIMATE, MOST_ESTIMATE]
    waves = XRisk(pair=lambda a, b, y: torch.sin(gap(a, b) * 1e-4), outer=lambda g: g**3)
    low, high = inner_range(waves)
    assert -1.2 < low < -1
    assert 1 < high < 1.2


@pytest.mark.parametrize("scores", list(LINKS))
@pytest.mark.parametrize("surrogate", list(SURROGATES))
@pytest.mark.parametrize("name", [name for name in RISKS if name != "contrastive"])
def test_at_the_ends_of_the_range_single_precision_is_enough(name, surrogate, scores):
    """Losses, their gradients and, with the u that belong to them, the weights of pairs."""
    risk = RISKS[name](surrogate=surrogate, scores=scores)
    low, high = risk.score_range[:2]
    a, b = torch.tensor([low, high, low, high, 0.5]), torch.tensor([high, low, low, high, 0.5])
    l, back = risk.pairs(Entry(a, ()), Entry(b, torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])))
    assert bool(l.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in back(torch.ones_like(l)))
    assert all(bool(g.isfinite().all()) for g in back(risk.pair_weights(l, risk.estimate(l))))
