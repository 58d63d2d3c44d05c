"""What is out of proportion, what is usual, and that honest sites never are."""

from __future__ import annotations

import pytest
import torch

from fedxl import tree
from fedxl.algorithms.descent import _moved
from fedxl.algorithms.influence import REMEMBERED, Influence
from fedxl.algorithms.protocol import Assignment
from fedxl.config.experiment import Config, execute
from fedxl.engine.simulator import Simulator
from fedxl.experiments import demo
from fedxl.training.hooks import Hooks


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

    def round(self, engine: Simulator, algorithm, server, cohort, updates) -> None:
        found = {}
        for row, number in enumerate(cohort):
            update, share = (
                tree.map(lambda leaf, i=i: leaf[i], stacked)
                for stacked, i in ((updates, row), (engine.shares, int(number)))
            )
            sizes = algorithm.check_update(
                server, update, Assignment(share, engine.schedule.local_steps, engine.reading)
            )
            found[row] = {name: float(size) for name, size in sizes.items()} if update.share.model > 0 else {}
        algorithm.check_server(algorithm.aggregate(server, updates))
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
    "fedxl2, two a round": ({"lr": 0.3}, {}, {"cohort": 2}),
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


def test_turning_weights_round_counts_tenfold():
    old = {"w": torch.tensor([3.0, 4.0])}
    assert float(_moved({"w": torch.tensor([6.0, 8.0])}, old)) == pytest.approx(5)
    assert float(_moved({"w": torch.tensor([-9.0, -12.0])}, old)) == pytest.approx(20 + 150)
    zero = {"w": torch.zeros(2)}
    assert float(_moved(old, zero)) == pytest.approx(5), "from nothing there is nothing to turn"
