"""A run says when its scores have collapsed, and when passive scores have grown old."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from torch import nn

from fedxl import FeDXL2, LocalPair, LocalSGD, auroc, build, fit, partial_auc, sampling
from fedxl.algorithms.level import Level
from fedxl.models import weights_of
from fedxl.training.health import Watch, remark_on
from fedxl.training.result import Result
from fedxl.training.settings import Hooks
from tests.conftest import make_clients

VALIDATION = make_clients([(30, 60)], seed=9)[0]


def model() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def run(algorithm: Any, said: list[str], clients: Any = None, network: Any = None, **changes: Any) -> Result:
    settings = {
        "rounds": 6, "local_steps": 4, "batch_size": 8, "eval_every": 2, "dtype": "float64", "executor": "vmap",
        "device": "cpu", "validation": VALIDATION, "hooks": Hooks(say=said.append), **changes,
    }  # fmt: skip
    clients = clients or make_clients([(12, 30), (20, 0), (0, 25), (9, 40)])
    return fit(network or model(), clients, algorithm, **settings)


def test_a_collapse_is_said_at_the_first_evaluation_and_once(tmp_path):
    said: list[str] = []
    result = run(build("fedxl2", partial_auc(), lr=1000.0, level="free"), said, out=tmp_path)
    [line] = said
    assert line.startswith("the scores have collapsed by round 2: ")
    assert "smaller lr" in line
    assert [record.get("collapsed") for record in result.history] == [True] * 3
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("collapsed") for row in rows if "validation" in row] == [True] * 3
    run(build("fedxl2", partial_auc(), lr=1000.0, level="free"), said, out=tmp_path, resume=True, rounds=8)
    assert len(said) == 1, "nor again when the run is resumed"


def test_without_scores_of_its_own_fedxl_asks_the_pool():
    said: list[str] = []
    result = run(build("fedxl2", partial_auc(), lr=1000.0, level="free"), said, validation=None)
    assert result.history[0]["collapsed"]
    assert len(said) == 1


def test_a_network_that_zeros_hold_still_is_told():
    """Its first layer gives 0 and its last one passes nothing back, so AUROC stays 0.5."""
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    for leaf in network.parameters():
        nn.init.zeros_(leaf)
    said: list[str] = []
    result = run(FeDXL2(partial_auc(), lr=0.1), said, network=network)
    assert result.history[-1]["validation"]["auroc"] == 0.5
    assert [line for line in said if "the weights have not moved" in line] == said != []
    linear = nn.Linear(5, 1).double()
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    run(FeDXL2(partial_auc(), lr=0.1), said, network=linear)
    assert len(said) == 1, "a linear network learns from 0"


def zero_head() -> nn.Module:
    network = model()
    nn.init.zeros_(network[2].weight)
    nn.init.zeros_(network[2].bias)
    return network


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        (FeDXL2(partial_auc(), lr=0.3), {}),
        (FeDXL2(partial_auc(), lr=0.3), {"validation": None}),
        (FeDXL2(partial_auc(), lr=1e-9), {"network": zero_head()}),
        (FeDXL2(partial_auc(), lr=1e-9), {"network": zero_head(), "validation": None}),
        (build("fedxl1", auroc(scores="raw"), lr=1000.0, level="free"), {}),
        (LocalPair(partial_auc(), lr=0.3), {}),
    ],
    ids=["healthy", "by its pool", "slow", "slow, by its pool", "raw scores do not saturate", "local pair"],
)
def test_who_learns_or_has_not_begun_is_not_collapsed(algorithm, changes):
    said: list[str] = []
    result = run(algorithm, said, **changes)
    assert not [line for line in said if "collapsed" in line]
    assert not any("collapsed" in record for record in result.history)


def test_cross_entropy_does_not_depend_on_the_link_of_the_reported_risk():
    """With rare positives all of its outputs may be far down and still rank well."""
    said: list[str] = []
    start, moved = weights_of(model()), weights_of(zero_head())

    def collapsed(algorithm: Any, h: torch.Tensor) -> bool:
        watch = Watch(algorithm, said.append, start)
        return watch(algorithm.init(moved), 1, (h, VALIDATION[1])) == {"collapsed": True}

    low = -12 + torch.linspace(0, 1, len(VALIDATION[1])).double()
    assert not collapsed(LocalSGD(partial_auc(), lr=0.1), low)
    assert collapsed(LocalSGD(partial_auc(), lr=0.1), torch.full_like(low, -3.0))
    assert collapsed(LocalPair(partial_auc(), level=Level("free")), low), "its gradient is that of the link"


def test_a_run_may_stop_where_its_scores_have_collapsed():
    said: list[str] = []
    hooks = Hooks(say=said.append, stop_collapsed=True)
    result = run(build("fedxl2", partial_auc(), lr=1000.0, level="free"), said, hooks=hooks, rounds=20)
    assert result.interrupted
    assert [record["round"] for record in result.history] == [2]
    assert result.metrics["validation"]["auroc"] == result.history[0]["validation"]["auroc"]
    assert not run(FeDXL2(partial_auc(), lr=0.3), said, hooks=hooks).interrupted


@pytest.mark.parametrize("pool_rounds", [1, 3])
def test_old_passive_scores_are_said_and_again_when_twice_as_old(pool_rounds):
    """One client of twenty has positives. It is in the first cohort, and then it is not drawn any more."""

    def drawn(seed: int) -> list[int]:
        return [r for r in range(46) if 0 in sampling.cohort(seed, r, 20, 1)]

    seed = next(seed for seed in itertools.count() if drawn(seed) == [0])
    clients = make_clients([(6, 6)] + [(0, 6)] * 19)
    said: list[str] = []
    algorithm = build("fedxl2", partial_auc(), lr=0.01, pool_rounds=pool_rounds, one_class="lend")
    settings = {"rounds": 45, "local_steps": 1, "eval_every": 1, "cohort": 1, "validation": None, "seed": seed}
    result = run(algorithm, said, clients, **settings)
    assert "nobody has trained yet" in said.pop(0)
    ages = [int(line.split(" are ")[1].split()[0]) for line in said]
    assert all(line.startswith("the passive scores of S1 (positive) are ") for line in said)
    assert all("a larger cohort would help" in line for line in said)
    first = 11 + pool_rounds - 1
    assert ages == [age for age in (first, 2 * first, 4 * first) if age <= 45]
    assert result.server.pool.first.age.unique().tolist() == [45]
    assert result.server.pool.second.age.min() == 0


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        return self.layer(x).detach()


class Squashed(Detached):
    def forward(self, x):
        return torch.sigmoid(self.layer(x.float())).squeeze(-1)


@pytest.mark.parametrize(
    ("algorithm", "network", "line"),
    [
        (FeDXL2(partial_auc(), lr=1e6), model, "times as far from their first values as those were long"),
        (FeDXL2(partial_auc(), lr=1e-12), model, "by round 2 the weights have not moved"),
        (LocalPair(partial_auc(), lr=0.3), Detached, "by round 2 the weights have not moved"),
    ],
    ids=["lr too large", "lr too small", "no gradient"],
)
@pytest.mark.parametrize("validation", [None, VALIDATION])
def test_weights_that_do_not_move_or_fly_away_are_said_once(algorithm, network, line, validation):
    said: list[str] = []
    run(algorithm, said, network=network(), validation=validation)
    assert len([each for each in said if line in each]) == 1


def test_a_column_that_is_the_label_is_said_before_training():
    told = "the label of every training example follows from 'column 2' alone"
    clients, said = make_clients([(8, 8)] * 2), list[str]()
    run(FeDXL2(partial_auc(), lr=0.1), said, clients)
    assert not any("follows from" in line for line in said)
    for x, y in clients:
        x[:, 2] = 7 - y
    run(FeDXL2(partial_auc(), lr=0.1), said, clients)
    assert any(line.startswith(told) for line in said)


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        (FeDXL2(partial_auc(scores="sigmoid")), True),
        (FeDXL2(partial_auc(scores="raw")), False),
        (LocalSGD(auroc()), True),
        (LocalSGD(auroc(), loss="squared"), False),
    ],
)
def test_a_second_sigmoid_is_said(algorithm, told):
    reading, x = algorithm.reading(1, 1), VALIDATION[0][:2]
    for network in (nn.Sequential(model(), nn.Sigmoid()), Squashed()):
        assert bool(remark_on(network, x, algorithm, reading)) == told
    assert not remark_on(model(), x, algorithm, reading)
