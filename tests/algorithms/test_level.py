"""What keeps the level of scores: the guard, balanced pulls, one-class clients, own fresh pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedxl import tree
from fedxl.algorithms import FeDXL1, FeDXL2, LocalPair
from fedxl.algorithms.level import MOST_LEVEL, MOST_SPREAD, balanced, centred, guarded
from fedxl.data.federation import from_arrays
from fedxl.engine.executors import loop, vectorised
from fedxl.errors import UserError
from fedxl.models import TwoViews, weights_of
from fedxl.models.layers import ScoreNorm
from fedxl.risks import auroc, average_precision, contrastive, partial_auc
from tests.conftest import EXECUTORS, make_clients
from tests.running import engine_for, fit_named, play

OPTIONS = [
    {"level": "free"},
    {"level": "free", "reach": 0.1},
    {"level": "bounded", "reach": 0.1},
    {"level": "balanced"},
    {"level": "even", "one_class": "train"},
    {"level": "balanced", "one_class": "centre"},
    {"level": "balanced", "mix": 0.25},
]
SKEWED = [(6, 3), (5, 0), (0, 7), (2, 9)]


def outputs(level: float, spread: float, size1: int = 5, size2: int = 7) -> torch.Tensor:
    h = torch.randn(size1 + size2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    h = h - 0.5 * (h[:size1].mean() + h[size1:].mean())
    return spread * h + level


def test_a_guard_changes_nothing_within_its_limits():
    h = outputs(level=0.7, spread=0.3)
    torch.testing.assert_close(guarded(h, h[:5], h[5:]), h, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("level", "spread"), [(80.0, 0.2), (-80.0, 50.0), (0.1, 1e4), (3e4, 1e4)])
def test_guarded_outputs_stay_where_a_sigmoid_passes_gradient(level, spread):
    """And their order is that of the outputs."""
    h = outputs(level, spread).requires_grad_()
    seen = guarded(h, h[:5], h[5:])
    a, b = seen.detach()[:5], seen.detach()[5:]
    mean = 0.5 * (a.mean() + b.mean())
    variance = 0.5 * ((a - mean).square().mean() + (b - mean).square().mean())
    assert abs(float(mean)) <= MOST_LEVEL + 1e-9
    assert float(variance) <= MOST_SPREAD**2 * (1 + 1e-6)
    assert torch.equal(seen.argsort(), h.argsort())
    weights = torch.randn(12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weights * torch.sigmoid(seen)).sum(), h)
    assert float(gradient.norm()) > 0
    if abs(level) > MOST_LEVEL:
        assert abs(float(gradient.sum())) < 1e-9 * float(gradient.abs().sum()), "no step moves the level further"


def test_balanced_and_centred_gradients_sum_to_zero():
    """The first over both sides together, which keeps the difference between the sides' sums; the second by side."""
    d = outputs(level=1.0, spread=2.0)
    even = balanced(d, 5)
    assert float(even.sum()) == pytest.approx(0, abs=1e-12)
    assert float(even[:5].sum() - even[5:].sum()) == pytest.approx(float(d[:5].sum() - d[5:].sum()))
    torch.testing.assert_close(even[:5] - even[0], d[:5] - d[0], rtol=0, atol=1e-12)
    assert [float(side.sum()) for side in centred(d, 5).split([5, 7])] == pytest.approx([0, 0], abs=1e-12)


class Offset(nn.Module):
    """A score whose level is a parameter of its own: its gradient is the sum of the gradients by scores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1, bias=False)
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.offset


def local_models(algorithm, clients, weighting="samples", steps=3) -> tuple[list[float], float]:
    """How far each client moves its level in the first round, and how far the server's moves."""
    torch.manual_seed(0)
    model, federation = Offset().double(), from_arrays(clients)
    engine = engine_for(algorithm, model, federation, loop, steps, 4, 4, weighting=weighting)
    server = algorithm.init(weights_of(model))
    everyone = np.arange(len(clients))
    server = play(algorithm, engine, server, 0, everyone)
    updates = engine.run_round(server, 1, everyone)
    after = algorithm.aggregate(server, updates)
    return updates.weights.params["offset"].tolist(), float(after.weights.params["offset"])


@pytest.mark.parametrize(
    "risk", [auroc(), auroc(scores="sigmoid"), partial_auc(), partial_auc(scores="raw"), average_precision()]
)
def test_balanced_clients_conserve_the_level(risk):
    """To rounding, with linear and nonlinear f, raw and sigmoid scores. The paper's plain form does not."""
    clients = make_clients(SKEWED)
    moved, server = local_models(FeDXL2(risk, lr=0.3, level="balanced"), clients)
    assert moved == pytest.approx([0] * 4, abs=1e-12), "one-class clients only lend"
    assert server == pytest.approx(0, abs=1e-12)
    free, _ = local_models(FeDXL2(risk, lr=0.3, level="free"), clients)
    assert all(abs(level) > 1e-4 for level in free)


@pytest.mark.parametrize("risk", [auroc(), partial_auc(scores="raw")])
def test_even_pulls_keep_the_level_where_only_the_counts_are_skewed(risk):
    """A client that holds every positive three times counts three times as much for them, and its level stays.

    Its scores are those of all: the batch, and what it reads of the pool. What is left of its pull on the level is
    what its scores differ by from others', which is how sites that see the world differently are aligned.
    """
    x, y = make_clients([(4, 4)])[0]
    many = torch.cat((x, x[y == 1], x[y == 1])), torch.cat((y, y[y == 1], y[y == 1]))
    model, federation, moved = Offset().double(), from_arrays([many, (x, y)]), {}
    for level in ("free", "even"):
        algorithm = FeDXL2(risk, lr=1.0, beta=1.0, gamma=1.0, level=level)
        engine = engine_for(algorithm, model, federation, vectorised, 1, 12, 12, weighting="samples")
        server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, np.arange(2))
        server = server._replace(pool=tree.map(lambda leaf: leaf[:12], server.pool))
        moved[level] = engine.run_round(server, 1, np.arange(2)).weights.params["offset"].tolist()
    assert moved["even"] == pytest.approx([0, 0], abs=1e-12)
    assert abs(moved["free"][0]) > 0.05


def test_a_client_with_one_class_moves_its_level_no_further_than_its_reach():
    """The score is linear, so the mean that the limit is on moves just as predicted."""
    clients = make_clients(SKEWED)
    for reach in (0.01, 0.05):
        bounded = FeDXL2(auroc(), lr=5.0, level="bounded", reach=reach)
        moved, _ = local_models(bounded, clients)
        assert all(0 < abs(level) <= reach for level in moved[1:3])
    unbounded, _ = local_models(FeDXL2(auroc(), lr=5.0, level="bounded", reach=0.0), clients)
    assert all(abs(level) > 0.05 for level in unbounded[1:3])


def test_the_ways_with_one_class():
    """Lending: its weights are the server's. Centred: it trains, and its level stays."""
    clients = make_clients(SKEWED)
    federation, model = from_arrays(clients), Offset().double()
    changes = {}
    for way in ("lend", "centre", "train"):
        algorithm = FeDXL2(partial_auc(), lr=0.5, level="balanced", one_class=way)
        engine = engine_for(algorithm, model, federation, vectorised, 3, 4, 4)
        server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, np.arange(4))
        updates = engine.run_round(server, 1, np.arange(4))
        changes[way] = {
            name: (leaf - server.weights.params[name]).flatten(1).norm(dim=1) if leaf.ndim > 1 else leaf.abs()
            for name, leaf in updates.weights.params.items()
        }
        assert float(updates.first.weight[1].sum()) > 0, "its scores are in the pool in any case"
    lend, centre, train = (changes[way] for way in ("lend", "centre", "train"))
    assert lend["linear.weight"][1:3].tolist() == [0, 0]
    assert lend["linear.weight"][0] > 0
    assert centre["linear.weight"][1] > 0
    assert float(centre["offset"][1]) < 1e-12
    assert train["linear.weight"][1] > 0
    assert float(train["offset"][1]) > 1e-3


def test_lenders_leave_the_average_to_others():
    """The new model is the average of those that trained, by their shares."""
    clients, model = make_clients(SKEWED), Offset().double()
    algorithm, federation = FeDXL2(partial_auc(), lr=0.5), from_arrays(clients)
    engine = engine_for(algorithm, model, federation, vectorised, 2, 4, 4, weighting="samples")
    server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, np.arange(4))
    updates = engine.run_round(server, 1, np.arange(4))
    after = algorithm.aggregate(server, updates)
    share = engine.shares.model * torch.tensor([1, 0, 0, 1.0])
    wanted = torch.tensordot(share / share.sum(), updates.weights.params["linear.weight"], 1)
    torch.testing.assert_close(after.weights.params["linear.weight"], wanted)


def test_a_cohort_of_lenders_changes_the_pool_and_nothing_else():
    """Nor does a lender send a gradient, of which examples could be rebuilt: weights and G are those it received."""
    clients, model = make_clients(SKEWED), Offset().double()
    algorithm, federation = FeDXL2(partial_auc(), lr=0.5, weight_decay=0.01), from_arrays(clients)
    engine = engine_for(algorithm, model, federation, vectorised, 2, 4, 4)
    server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, np.arange(4))
    server = play(algorithm, engine, server, 1, np.arange(4))
    updates = engine.run_round(server, 2, np.array([1, 2]))
    for mine, sent in ((updates.weights, server.weights), (updates.G, server.G)):
        for name, leaf in tree.pack(mine).items():
            assert torch.equal(leaf, tree.pack(sent)[name].expand_as(leaf)), name
    after = algorithm.aggregate(server, updates)
    assert tree.norm(tree.map(torch.sub, (after.weights, after.G), (server.weights, server.G))) == 0
    assert len(after.pool.first.a) == 8
    assert not torch.equal(after.pool.first.a, server.pool.first.a[:8])


@pytest.mark.parametrize("risk", [auroc(), partial_auc(lam=0.5), average_precision()])
def test_own_fresh_pairs_at_one_nth_are_the_exact_gradient(risk):
    """Two clients with all of their examples in a batch: the averaged step is that of F, to rounding.

    A client draws nothing of its own from the pool, so its own pooled scores do not matter: those of client 0 are
    spoilt where it would read them.
    """
    clients = make_clients([(4, 4)] * 2, seed=7)
    torch.manual_seed(1)
    model, federation = nn.Linear(5, 1).double(), from_arrays(clients)
    size2 = 8 if risk.sides[1] == "all" else 4
    algorithm = FeDXL2(risk, lr=1.0, beta=1.0, gamma=1.0, level="free", mix=1 / 2)
    engine = engine_for(algorithm, model, federation, vectorised, 1, 4, size2)
    server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, np.arange(2))
    exact = gradient_of(model, clients, risk)
    spoilt = [
        server._replace(pool=server.pool._replace(second=spoil(server.pool.second, client))) for client in range(2)
    ]
    updates = [engine.run_round(spoilt[client], 1, np.array([client])) for client in range(2)]
    for name, before in server.weights.params.items():
        step = before - 0.5 * sum(update.weights.params[name][0] for update in updates)
        torch.testing.assert_close(step, exact[name], rtol=0, atol=1e-12)


def spoil(side, client: int):
    return side._replace(b=torch.where(side.owner == client, 1e3, side.b))


def gradient_of(model, clients, risk) -> dict[str, torch.Tensor]:
    """Autograd of the whole risk."""
    x, y = (torch.cat(parts) for parts in zip(*clients, strict=True))
    leaves = {name: p.clone().requires_grad_() for name, p in weights_of(model).params.items()}
    h = torch.func.functional_call(model, leaves, (x,)).squeeze(-1)
    return dict(zip(leaves, torch.autograd.grad(risk.value(h, y), list(leaves.values())), strict=True))


def test_the_average_over_alike_clients_is_unbiased():
    """Balancing changes each client's step, not their average, where all clients see the same examples.

    Two clients, one with each positive twice, one with each negative twice, so that their factors differ.
    """
    x, y = make_clients([(4, 4)])[0]
    more = (torch.cat((x, x[y == 1])), torch.cat((y, y[y == 1])))
    less = (torch.cat((x, x[y == 0])), torch.cat((y, y[y == 0])))
    risk, model = auroc(), nn.Linear(5, 1, bias=False).double()
    steps = {}
    for level in ("free", "balanced"):
        algorithm = FeDXL2(risk, lr=1.0, beta=1.0, level=level)
        federation = from_arrays([more, less])
        engine = engine_for(algorithm, model, federation, vectorised, 1, 8, 8, weighting="samples")
        server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, np.arange(2))
        # The scores of one client are those of all examples: a draw of 8 takes each once.
        server = server._replace(pool=tree.map(lambda leaf: leaf[:8], server.pool))
        updates = engine.run_round(server, 1, np.arange(2))
        after = algorithm.aggregate(server, updates)
        steps[level] = updates.weights.params["weight"], after.weights.params["weight"]
    local, average = ([steps[level][i] for level in steps] for i in range(2))
    assert not torch.allclose(*local, atol=1e-4)
    torch.testing.assert_close(*average, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("risk", [auroc(), partial_auc(), contrastive(dim=3)], ids=["auroc", "pauc", "contrastive"])
def test_executors_agree(options, risk):
    """With clients of one class, three rounds, float64."""
    federation = from_arrays(make_clients(SKEWED))
    if risk.score_shape:
        federation = from_arrays([(torch.stack((x, x.flip(-1)), 1), y) for x, y in make_clients(SKEWED)])
        model: nn.Module = TwoViews(nn.Linear(5, 3)).double()
    else:
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    states = []
    for executor in EXECUTORS.values():
        algorithm = FeDXL2(risk, lr=0.2, **options)
        engine = engine_for(algorithm, model, federation, executor(), 3, 4, 4, weighting="samples")
        server = algorithm.init(weights_of(model))
        for r in range(4):
            server = play(algorithm, engine, server, r, np.arange(4))
        states.append(tree.pack({"server": server}))
    for other in states[1:]:
        for name, leaf in states[0].items():
            torch.testing.assert_close(leaf, other[name], rtol=0, atol=1e-11, equal_nan=True)


def test_the_reported_risk_is_that_of_the_scores_that_are_optimised():
    """Outputs far from 0 are no reason for a risk of constant scores, if the guard shows them nearer."""
    clients = make_clients([(20, 20)] * 2, seed=1)
    model = nn.Linear(5, 1)
    nn.init.constant_(model.bias, 50.0)
    sizes = {"rounds": 1, "local_steps": 1, "batch1": 4, "batch2": 4, "lr": 1e-9, "validation": clients[0]}
    risks = {
        level: fit_named(model, clients, partial_auc(), level=level, **sizes).metrics["validation"]["risk"]
        for level in ("free", "even")
    }
    assert risks["free"] == pytest.approx(1.0, abs=1e-6)
    assert abs(risks["even"] - 1) > 0.01


def test_a_network_that_norms_its_scores_needs_no_guard():
    """On equal shards the default is the plain form there, to the bit; a guard that is asked for changes it."""
    clients = make_clients([(12, 12)] * 2, seed=1)
    model = nn.Sequential(nn.Linear(5, 1), ScoreNorm(1))
    sizes = {"rounds": 2, "local_steps": 3, "batch1": 4, "batch2": 4, "lr": 5.0}
    plain, default, guarded_too = (
        fit_named(model, clients, partial_auc(), **options, **sizes).server.weights.params
        for options in ({"level": "free"}, {"level": "even"}, {"level": "even", "guard": "on"})
    )
    assert all(map(torch.equal, plain.values(), default.values()))
    assert not all(map(torch.equal, plain.values(), guarded_too.values()))


def test_plain_is_one_setting_away():
    """`level = "free"` is the paper's algorithm: no guard, one-class clients train as far as they go."""
    for algorithm in (FeDXL2(partial_auc(), level="free"), FeDXL1(auroc(), level="free")):
        assert not algorithm.guards
        assert algorithm.with_one_class == "train"
    assert LocalPair(partial_auc()).level == "free"


def test_a_rate_that_saturates_the_plain_form_trains_with_balanced_levels():
    """On skewed clients, at a rate of 30: the plain form's scores end all alike, the balanced ones still rank."""
    clients, held = make_clients([(30, 4), (3, 40), (12, 0), (0, 30)], seed=1), make_clients([(200, 200)], seed=2)[0]
    found = {}
    for level in ("free", "balanced"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
        result = fit_named(
            model, clients, partial_auc(lam=0.5), rounds=12, local_steps=8, batch1=8, batch2=8, lr=30.0, level=level,
            weighting="samples", validation=held, eval_every=12, executor="vmap", dtype="float64",
        )  # fmt: skip
        found[level] = result.history[-1]["validation"]["auroc"]
    assert found["balanced"] > 0.75, found
    assert found["balanced"] > found["free"] + 0.1, found


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"level": "balance"}, "level"),
        ({"one_class": "skip"}, "one_class"),
        ({"reach": -1.0}, "reach must not be negative"),
        ({"reach": 1.0}, "set one_class = 'train', too"),
        ({"mix": 1.0}, r"mix must lie in \[0, 1\)"),
    ],
)
def test_wrong_settings_are_one_line(options, says):
    with pytest.raises(UserError, match=says):
        FeDXL2(partial_auc(), **options)


def test_a_federation_of_one_class_clients_alone_trains_unless_they_only_lend():
    clients = make_clients([(8, 0), (0, 8)])
    sizes = {"rounds": 2, "local_steps": 2, "batch1": 4, "batch2": 4, "lr": 0.5}
    with pytest.raises(UserError, match="set one_class = 'train'"):
        fit_named(nn.Linear(5, 1), clients, auroc(), one_class="lend", **sizes)
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    result = fit_named(model, clients, auroc(), **sizes)
    assert not torch.equal(result.model.weight, model.weight), "auto: with nobody to lend to, all train"
