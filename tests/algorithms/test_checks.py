"""Which updates a server refuses: impossible ones, and those far larger than usual; but no honest one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedxl import auroc, partial_auc, several, tree
from fedxl.algorithms import build
from fedxl.algorithms.checks import (
    REMEMBERED,
    WEIGHTS,
    Influence,
    check_distance,
    check_scores,
    check_server,
    check_update,
)
from fedxl.algorithms.pool import S1, S2, Pool, Scores
from fedxl.algorithms.protocol import Assignment
from fedxl.algorithms.server_rules import next_state
from fedxl.config.experiment import Config, execute
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import loop
from fedxl.engine.simulator import Simulator
from fedxl.errors import RefusedError
from fedxl.experiments import demo
from fedxl.models import weights_of
from fedxl.risks.pairing import Entry
from fedxl.training.settings import Hooks
from tests.conftest import make_clients
from tests.running import engine_for, play


def refused(influence: Influence, *sizes: float) -> list[int]:
    return sorted(influence.excesses({row: {"weights": size} for row, size in enumerate(sizes)}))


def test_what_is_far_beyond_the_upper_quartile_is_refused():
    assert refused(Influence(20), 1, 2, 3, 61) == [3]
    assert refused(Influence(20), 1, 2, 3, 59) == []
    assert refused(Influence(20), 1, 2, 41) == [2]
    assert refused(Influence(0), 1, 1, 1e300) == [], "switched off"
    assert refused(Influence(20), *[1.0] * 12, *[1e6] * 4) == [12, 13, 14, 15], "a quarter of them hostile"


def test_what_does_not_move_says_nothing():
    assert refused(Influence(20), 0, 0, 0, 0, 1, 2, 3) == []
    assert refused(Influence(20), 0, 0, 5) == [], "nothing to compare with"
    assert Influence(20).excesses({0: {}, 1: {"weights": 1.0}, 2: {"weights": 1.0}, 3: {"weights": 30.0}}).keys() == {
        3
    }


def test_few_are_compared_with_the_rounds_before():
    influence = Influence(20)
    assert refused(influence, 1e6) == [], "alone in the first round of all"
    assert refused(influence, 1, 30) == [1], "of two the smaller one"
    for size in (1.0, 3.0, 2.0):
        influence.remember([{"weights": size}])
    assert refused(influence, 39) == []
    assert refused(influence, 41) == [0]
    assert refused(influence, 41, 0.1) == [0]
    assert refused(influence, 100, 200) == [], "if both have grown, the pace has"
    assert refused(influence, 0.1, 0.1, 39) == [], "and in a round of many as well"


def test_only_the_last_rounds_are_remembered():
    influence = Influence(20)
    for _ in range(REMEMBERED):
        influence.remember([{"weights": 1.0}])
    for _ in range(REMEMBERED):
        influence.remember([{"weights": 0.0}, {"weights": 10.0}])
    assert influence.usual == {"weights": [10.0] * REMEMBERED}


class Measured:
    """Compares all updates of a simulation as a server would, and counts those that it would refuse."""

    def __init__(self) -> None:
        self.influence, self.refused, self.updates = Influence(20), 0, 0

    def round(self, engine: Simulator, phase, server, cohort, updates) -> None:
        found = {}
        for row, number in enumerate(cohort):
            update, share = (
                tree.map(lambda leaf, i=i: leaf[i], stacked)
                for stacked, i in ((updates, row), (engine.shares, int(number)))
            )
            assignment = Assignment(share, engine.schedule.local_steps, engine.reading)
            found[row] = check_update(phase, server, update, assignment)
        check_server(phase, next_state(phase, server, updates))
        self.refused += len(self.influence.excesses(found))
        self.updates += len(found)
        self.influence.remember(found.values())


HONEST = {
    "fedxl2": ({"lr": 0.3, "weight_decay": 1e-3}, {"lam": 0.5}, {}),
    "fedxl2, rare positives": ({"lr": 0.3}, {}, {"weighting": "samples"}),
    "fedxl2, raw": ({"lr": 0.03}, {"scores": "raw", "surrogate": "logistic"}, {}),
    "fedxl1": ({"lr": 0.3}, {"name": "auroc"}, {}),
    "local_sgd": ({"lr": 0.3}, {}, {}),
    "local_pair": ({"lr": 3.0}, {}, {}),
    "codasca": ({"lr": 1.0}, {}, {}),
    "fedxl2, two per round": ({"lr": 0.3}, {}, {"cohort": 2}),
}


@pytest.mark.parametrize("case", list(HONEST))
@pytest.mark.parametrize("seed", [2, 3])
def test_honest_sites_are_never_refused(monkeypatch, case, seed):
    """Sixteen sites that differ, six of one class, at the learning rates of the demo."""
    options, risk, run = HONEST[case]
    measured, run_round = Measured(), Simulator.run_round

    def watched(self, server, round, cohort):
        updates = run_round(self, server, round, cohort)
        measured.round(self, self.algorithm.phase(round), server, cohort, updates)
        return updates

    monkeypatch.setattr(Simulator, "run_round", watched)
    experiment = Config(
        data={"name": "digits", "seed": seed, "ratio": 0.02 if "rare" in case else 0.1},
        model={"name": "mlp", "hidden": [64]},
        risk={**demo.RISK, **risk},
        algorithm={"name": case.partition(",")[0], **options},
        run={**demo.RUN, "rounds": 10, "eval_every": 10, "seed": seed, **run},
    )
    execute(experiment, hooks=Hooks(say=lambda line: None))
    assert measured.updates >= 10 * run.get("cohort", 16)
    assert measured.refused == 0


# Updates that no honest client sends.


def distance(new: Tensor, old: Tensor, network: nn.Module) -> float:
    """The size of an update that changes weights from old to new."""
    sent = Sent(build("local_sgd", auroc()), network)
    server, update = (
        state._replace(weights=state.weights._replace(params={"w": value}))
        for state, value in ((sent.server, old), (sent.update, new))
    )
    return check_update(sent.algorithm, server, update, sent.assignment)[WEIGHTS]


class Sent:
    """An honest update of the first client, and what it was asked for."""

    def __init__(self, algorithm: Any, model: nn.Module, clients: Any = None, labels: int = 0) -> None:
        federation = from_arrays(clients or make_clients([(6, 9), (5, 7)]), labels=labels)
        engine = engine_for(algorithm, model, federation, loop, 3, 4, 5)
        self.server, self.algorithm = algorithm.init(weights_of(model)), algorithm
        everyone = np.arange(len(federation.parts))
        for r in range(algorithm.first_round, 2):
            self.server = play(algorithm, engine, self.server, r, everyone)
        updates = engine.run_round(self.server, 2, everyone)
        self.update, share = (tree.map(lambda leaf: leaf[0], stacked) for stacked in (updates, engine.shares))
        self.assignment = Assignment(share, 3, engine.reading)

    def check(self, update: Any) -> Any:
        return check_update(self.algorithm, self.server, update, self.assignment)


def test_reversing_weights_counts_tenfold(network):
    old = torch.tensor([3.0, 4.0]).double()
    assert distance(2 * old, old, network()) == pytest.approx(5)
    assert distance(-3 * old, old, network()) == pytest.approx(20 + 150)
    assert distance(old, 0 * old, network()) == pytest.approx(5), "from nothing there is nothing to reverse"


def test_impossible_updates_are_refused(network):
    sent = Sent(build("fedxl2", partial_auc(), lr=0.1), network())
    update, scores = sent.update, sent.update.scores
    assert sent.check(update)[WEIGHTS] > 0
    share = update.share
    no_part = share._replace(model=0 * share.model)
    more = share._replace(mass=2 * share.mass)
    lies = {
        "its share is not": [update._replace(share=no_part), update._replace(share=more)],
        "it reports 4 steps of 3": [update._replace(steps=update.steps + 1)],
        r"its scores \(first\)": [replaced(update, a=scores.a._replace(score=scores.a.score + 1.5))],
        r"its scores \(second\)": [
            replaced(update, b=scores.b._replace(score=scores.b.score * wrong)) for wrong in (-1, torch.nan)
        ],
        r"its labels \(second\)": [replaced(update, b=scores.b._replace(target=scores.b.target + 0.5))],
        "its inner estimates u": [replaced(update, u=scores.u + 100), replaced(update, u=scores.u - 100)],
    }
    for told, wrong in lies.items():
        for lie in wrong:
            with pytest.raises(RefusedError, match=told):
                sent.check(lie)
    sent.check(replaced(update, u=torch.full_like(scores.u, torch.nan)))  # unknown: never drawn


def replaced(update: Any, **scores: Any) -> Any:
    return update._replace(scores=update.scores._replace(**scores))


def test_nobody_changes_weights_in_the_warm_up(network):
    sent = Sent(build("fedxl2", partial_auc(), lr=0.1), network())
    warm_up = sent.algorithm.phase(0)
    still = sent.update._replace(weights=sent.server.weights, G=tree.map(torch.zeros_like, sent.server.G))
    check_update(warm_up, sent.server, still, sent.assignment)
    for lie in (still._replace(weights=sent.update.weights), still._replace(G=sent.update.G)):
        with pytest.raises(RefusedError, match="in the warm-up round"):
            check_update(warm_up, sent.server, lie, sent.assignment)


def test_clients_that_do_not_count_have_no_sizes(network):
    """They are not compared with others, but their scores are checked."""
    sent = Sent(build("fedxl2", partial_auc()), network(), make_clients([(6, 0), (5, 7)]))
    assert sent.check(sent.update) == {}
    with pytest.raises(RefusedError, match="scores"):
        sent.check(replaced(sent.update, a=sent.update.scores.a._replace(score=sent.update.scores.a.score + 2)))


def test_impossible_couples_of_several_labels_are_refused(network):
    random = torch.Generator().manual_seed(2)
    x, y = torch.randn(20, 5, generator=random).double(), torch.randint(0, 2, (20, 3), generator=random).double()
    y[::4, 1] = torch.nan
    algorithm = build("fedxl2", several(partial_auc(), 3), lr=0.1)
    sent = Sent(algorithm, network(3), [(x[:9], y[:9]), (x[9:], y[9:])], labels=3)
    sent.check(sent.update)
    scores = sent.update.scores
    first = "not scores of labels that there are"
    for told, lie in (
        (first, {"a": scores.a._replace(target=scores.a.target + 3)}),
        (first, {"a": scores.a._replace(target=scores.a.target - 3)}),
        (r"its labels \(second\)", {"b": scores.b._replace(target=scores.b.target + 2)}),
        (r"its scores \(first\)", {"a": scores.a._replace(score=scores.a.score + 5)}),
    ):
        with pytest.raises(RefusedError, match=told):
            check_scores(algorithm.risk, scores._replace(**lie))


def pool_of(a: Tensor, b: Tensor) -> Pool:
    one, age = torch.ones(len(a)), torch.zeros(len(a), dtype=torch.int64)
    first, second = Entry(a, ()), Entry(b, torch.zeros_like(b))
    return Pool(S1(first, torch.zeros_like(a), one, age, one), S2(second, one, age, one))


def test_raw_scores_far_from_the_pool_are_refused():
    rng = torch.Generator().manual_seed(0)
    scores = 50 + 30 * torch.randn(2, 64, generator=rng)
    pool, mass = pool_of(*scores), torch.ones(2)
    middle = torch.cat([*scores]).median()
    spread = (torch.cat([*scores]) - middle).abs().median()
    raw, new = auroc(), torch.full((8,), 50.0)

    def sent(a: Tensor, b: Tensor) -> Scores:
        return Scores(Entry(a, ()), torch.zeros_like(a), Entry(b, torch.zeros_like(b)))

    near = new.index_fill(0, torch.tensor([3]), float(middle + 99 * spread))
    check_distance(raw, pool, sent(new, near), mass)
    beyond = sent(new, new.index_fill(0, torch.tensor([3]), float(middle - 101 * spread)))
    with pytest.raises(RefusedError, match=r"its scores \(second\) lie more than 100 times the pool's spread"):
        check_distance(raw, pool, beyond, mass)
    check_distance(raw, pool, beyond, torch.tensor([1.0, 0.0]))  # a side that it does not hold is not pooled
    same = pool_of(new, new)
    check_distance(raw, same, sent(new, new + 999), mass)  # all alike: ten margins are the least spread
    with pytest.raises(RefusedError, match="first"):
        check_distance(raw, same, sent(new - 1001, new), mass)
    check_distance(raw, pool_of(new[:1], new[:1]), sent(new, 1e3 * new), mass)  # as a client sees the pool
    check_distance(partial_auc(scores="sigmoid"), pool, sent(new, 1e9 * new), mass)  # for others to refuse
