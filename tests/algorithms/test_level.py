"""What keeps the level of scores: the guard, even pulls, and clients with one class that only lend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedxl import tree
from fedxl.algorithms import build
from fedxl.algorithms.level import MOST_LEVEL, MOST_SPREAD, Level
from fedxl.algorithms.server_rules import next_state
from fedxl.data.examples import Weighting, facts_about
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import vectorised
from fedxl.errors import UserError
from fedxl.models import TwoViews, weights_of
from fedxl.models.layers import ScoreNorm
from fedxl.risks import auroc, contrastive, partial_auc
from fedxl.risks.pairing import Masks, Slices
from tests.algorithms.rounds import after_rounds, assert_agree
from tests.conftest import EXECUTORS, make_clients
from tests.running import engine_for, fit_named, play

OPTIONS = [
    {"level": "free"},
    {"level": "even"},
    {"level": "even", "one_class": "train"},
    {"level": "even", "hold": 0.0},
]
SKEWED = [(6, 3), (5, 0), (0, 7), (2, 9)]


def outputs(level: float, spread: float, size1: int = 5, size2: int = 7) -> torch.Tensor:
    h = torch.randn(size1 + size2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    h = h - 0.5 * (h[:size1].mean() + h[size1:].mean())
    return spread * h + level


def members(size1: int = 5, size2: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.arange(size1 + size2) < size1
    return Masks(first, ~first)


def guarded(h: torch.Tensor, both: float = 1.0) -> torch.Tensor:
    return Level("even").guard_outputs(partial_auc(), h, members(), torch.tensor(both))


def test_a_guard_changes_nothing_within_its_limits():
    h = outputs(level=0.7, spread=0.3)
    torch.testing.assert_close(guarded(h), h, rtol=0, atol=1e-15)
    far = outputs(level=80.0, spread=9.0)
    assert torch.equal(guarded(far, both=0.0), far), "a client with one class keeps its outputs"


@pytest.mark.parametrize(("level", "spread"), [(80.0, 0.2), (-80.0, 50.0), (0.1, 1e4), (3e4, 1e4)])
def test_guarded_outputs_stay_where_a_sigmoid_passes_gradient(level, spread):
    """And their order is that of the outputs."""
    h = outputs(level, spread).requires_grad_()
    seen = guarded(h)
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


def test_slices_are_masks_of_the_first_examples_and_the_others():
    h = outputs(level=1.0, spread=2.0)
    torch.testing.assert_close(Slices(5).mean(h), members().mean(h))


def test_even_factors_are_their_geometric_mean_if_both_classes_are_there():
    factors = torch.tensor([[4.0, 3.0, 0.0], [1.0, 0.0, 2.0]])  # of three labels
    assert Level("even").even_factors(factors).tolist() == [[2, 3, 0], [2, 0, 2]]
    assert torch.equal(Level("free").even_factors(factors), factors)


class Offset(nn.Module):
    """A score whose level is a parameter of its own: its gradient is the sum of the gradients by scores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1, bias=False)
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.offset


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
        algorithm = build("fedxl2", risk, lr=1.0, beta=1.0, gamma=1.0, level=level)
        engine = engine_for(algorithm, model, federation, vectorised, 1, 12, 12, weighting="samples")
        server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, np.arange(2))
        server = server._replace(pool=tree.map(lambda leaf: leaf[:12], server.pool))
        moved[level] = engine.run_round(server, 1, np.arange(2)).weights.params["offset"].tolist()
    assert moved["even"] == pytest.approx([0, 0], abs=1e-12)
    assert abs(moved["free"][0]) > 0.05


def test_the_ways_with_one_class():
    """If it lends, its weights are the server's. If it trains, its level moves."""
    clients = make_clients(SKEWED)
    federation, model = from_arrays(clients), Offset().double()
    changes = {}
    for way in ("lend", "train"):
        algorithm = build("fedxl2", partial_auc(), lr=0.5, level="even", one_class=way)
        engine = engine_for(algorithm, model, federation, vectorised, 3, 4, 4)
        server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, np.arange(4))
        updates = engine.run_round(server, 1, np.arange(4))
        changes[way] = {
            name: (leaf - server.weights.params[name]).flatten(1).norm(dim=1) if leaf.ndim > 1 else leaf.abs()
            for name, leaf in updates.weights.params.items()
        }
        pooled = next_state(algorithm, server, updates).pool.first
        assert float(pooled.weight[pooled.owner == 1].sum()) > 0, "its scores are in the pool in any case"
    lend, train = (changes[way] for way in ("lend", "train"))
    assert lend["linear.weight"][1:3].tolist() == [0, 0]
    assert lend["linear.weight"][0] > 0
    assert train["linear.weight"][1] > 0
    assert float(train["offset"][1]) > 1e-3


def test_lenders_leave_the_average_to_others():
    """The new model is the average of those that trained, by their shares."""
    clients, model = make_clients(SKEWED), Offset().double()
    algorithm, federation = build("fedxl2", partial_auc(), lr=0.5), from_arrays(clients)
    engine = engine_for(algorithm, model, federation, vectorised, 2, 4, 4, weighting="samples")
    server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, np.arange(4))
    updates = engine.run_round(server, 1, np.arange(4))
    after = next_state(algorithm, server, updates)
    share = engine.shares.model * torch.tensor([1, 0, 0, 1.0])
    wanted = torch.tensordot(share / share.sum(), updates.weights.params["linear.weight"], 1)
    torch.testing.assert_close(after.weights.params["linear.weight"], wanted)


def test_a_cohort_of_lenders_changes_the_pool_and_nothing_else():
    """Nor does a lender send a gradient, of which examples could be rebuilt: weights and G are those it received."""
    clients, model = make_clients(SKEWED), Offset().double()
    algorithm = build("fedxl2", partial_auc(), lr=0.5, weight_decay=0.01)
    federation = from_arrays(clients)
    engine = engine_for(algorithm, model, federation, vectorised, 2, 4, 4)
    server = play(algorithm, engine, algorithm.init(weights_of(model)), 0, np.arange(4))
    server = play(algorithm, engine, server, 1, np.arange(4))
    updates = engine.run_round(server, 2, np.array([1, 2]))
    for mine, sent in ((updates.weights, server.weights), (updates.G, server.G)):
        for name, leaf in tree.pack(mine).items():
            assert torch.equal(leaf, tree.pack(sent)[name].expand_as(leaf)), name
    after = next_state(algorithm, server, updates)
    assert tree.norm(tree.map(torch.sub, (after.weights, after.G), (server.weights, server.G))) == 0
    assert len(after.pool.first.weight) == 8
    assert not torch.equal(after.pool.first.entry.score, server.pool.first.entry.score[:8])


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
    algorithm = build("fedxl2", risk, lr=0.2, **options)
    states = [after_rounds(algorithm, model, federation, name, 3, weighting="samples") for name in EXECUTORS]
    assert_agree(*states, tolerance=1e-11)


def test_the_reported_risk_is_that_of_the_scores_that_are_optimised():
    """Outputs far from 0 are no reason for a risk of constant scores, if the guard shows them nearer."""
    clients = make_clients([(20, 20)] * 2, seed=1)
    model = nn.Linear(5, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 50.0)
    sizes = {"rounds": 1, "local_steps": 1, "batch1": 4, "batch2": 4, "lr": 1e-9, "validation": clients[0]}
    risks = {
        level: fit_named(model, clients, partial_auc(), level=level, **sizes).metrics["validation"]["risk"]
        for level in ("free", "even")
    }
    assert risks["free"] == pytest.approx(1.0, abs=1e-6)
    assert abs(risks["even"] - 1) > 0.01


def test_a_network_that_norms_its_scores_needs_no_guard():
    """On equal shards the default is the plain form there, to the bit; without the norm, it is guarded."""
    clients = make_clients([(12, 12)] * 2, seed=1)
    sizes = {"rounds": 2, "local_steps": 3, "batch1": 4, "batch2": 4, "lr": 5.0}
    for norms in (True, False):
        model = nn.Sequential(nn.Linear(5, 1), ScoreNorm(1)) if norms else nn.Linear(5, 1)
        plain, default = (
            fit_named(model, clients, partial_auc(), level=level, **sizes).server.weights.params
            for level in ("free", "even")
        )
        assert all(map(torch.equal, plain.values(), default.values())) == norms


def test_plain_is_one_setting_away():
    """`level = "free"` is the paper's algorithm: no guard, and clients with one class train like all others."""
    for algorithm in (build("fedxl2", partial_auc(), level="free"), build("fedxl1", auroc(), level="free")):
        assert not algorithm.level.guards(algorithm.risk)
        assert not algorithm.lends
    for centralised in (build("sox", partial_auc()), build("sgd", auroc())):
        assert centralised.level.level == "free"
    assert build("local_pair", partial_auc()).level.guards(partial_auc())
    assert build("fedxl2", partial_auc()).level.guards(partial_auc())
    assert build("fedxl2", partial_auc()).lends


def test_a_rate_that_saturates_the_plain_form_trains_with_even_levels():
    """On skewed clients, at a rate of 30: the plain form's scores end all alike, the even ones still rank."""
    clients, held = make_clients([(30, 4), (3, 40), (12, 0), (0, 30)], seed=1), make_clients([(200, 200)], seed=2)[0]
    found = {}
    for level in ("free", "even"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
        result = fit_named(
            model, clients, partial_auc(lam=0.5), rounds=12, local_steps=8, batch1=8, batch2=8, lr=30.0, level=level,
            weighting="samples", validation=held, eval_every=12, executor="vmap", dtype="float64",
        )  # fmt: skip
        found[level] = result.history[-1]["validation"]["auroc"]
    assert found["even"] > 0.75, found
    assert found["even"] > found["free"] + 0.1, found


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"level": "balance"}, "level"),
        ({"one_class": "skip"}, "one_class"),
        ({"guard": "on"}, "guard"),
        ({"level": "balanced"}, "was removed"),
    ],
)
def test_wrong_settings_are_one_line(options, says):
    with pytest.raises(UserError, match=says):
        build("fedxl2", partial_auc(), **options)


def test_a_federation_of_one_class_clients_alone_trains_unless_they_only_lend():
    clients = make_clients([(8, 0), (0, 8)])
    sizes = {"rounds": 2, "local_steps": 2, "batch1": 4, "batch2": 4, "lr": 0.5}
    with pytest.raises(UserError, match="set one_class = 'train'"):
        fit_named(nn.Linear(5, 1), clients, auroc(), one_class="lend", **sizes)
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    result = fit_named(model, clients, auroc(), **sizes)
    assert not torch.equal(result.model.weight, model.weight), "auto: with nobody to lend to, all train"


def decided(clients: list[tuple[int, int]], weighting: Weighting = "samples", **options):
    """FeDXL2 as it trains on clients with these positives and negatives."""
    facts = facts_about(from_arrays(make_clients(clients)).holdings(), weighting)
    return build("fedxl2", partial_auc(), **options).with_facts(facts)


@pytest.mark.parametrize(
    ("clients", "trains"),
    [
        ([(6, 3), (5, 2)], False),
        ([(6, 3), (0, 20)], True),  # most negatives are where there is nothing else
        ([(6, 3), (20, 0)], True),
        ([(6, 30), (0, 20)], False),  # but not if they are few
        ([(6, 3), (0, 20), (4, 0)], False),  # nor if others hold the other class alone
        ([(6, 0), (0, 20)], True),  # nobody else would
    ],
    ids=str,
)
def test_clients_with_one_class_train_if_they_all_hold_most_of_the_same_class(clients, trains):
    assert decided(clients).lends is not trains
    assert decided(clients).level.guard is not trains, "a guard would keep scores from being compared"
    assert decided(clients, one_class="lend").lends
    assert decided(clients, one_class="lend").level.guard
    assert not decided(clients, one_class="train").lends
    assert decided(clients, level="free").level.level == "free"
    assert not decided(clients, level="free").lends


def test_with_raw_scores_which_nothing_bounds_they_lend_unless_nobody_holds_both_classes():
    for clients, lends in (([(6, 3), (0, 20)], True), ([(6, 0), (0, 20)], False)):
        facts = facts_about(from_arrays(make_clients(clients)).holdings(), "clients")
        assert build("fedxl1", auroc()).with_facts(facts).lends is lends


def test_by_samples_they_lend_if_they_would_make_up_nearly_all_of_the_average():
    clients = [(6, 3), (0, 90)]
    assert decided(clients).lends
    assert not decided(clients, "clients").lends
