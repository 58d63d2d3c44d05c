"""Attacks do what they say, and the tables say what was measured."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from fedxl import tree
from fedxl.algorithms.checks import inner_range
from fedxl.data.inputs import from_arrays
from fedxl.models import weights_of
from fedxl.risks import partial_auc
from fedxl.training.rounds import play_round
from studies.harness import Planned
from studies.hostile import study
from studies.hostile.attacks import ATTACKS, LABEL_FLIP, with_flipped_labels
from studies.hostile.study import COUNTS, DEFENCES, NOBODY, run_case
from tests.studies.running import made

RISK = partial_auc(lam=0.5)
LIAR = 0  # it holds both classes
WHO = torch.arange(study.CLIENTS) == LIAR


def case(attack: str, hostile: int, defence: str, seed: int = 10, **more: int) -> dict[str, Any]:
    return {"attack": attack, "hostile": hostile, "defence": defence, "seed": seed, **more}


@pytest.fixture(scope="module")
def a_round() -> tuple[Any, Any]:
    """The server's state before the first round of the demo, and what all clients send in it."""
    simulation = study.simulate(study.config_of(case(NOBODY, 0, "none", rounds=1)), [])
    algorithm, everyone = simulation.problem.algorithm, np.arange(study.CLIENTS)
    server = algorithm.init(weights_of(simulation.problem.model))
    server, _ = play_round(algorithm, simulation.engine, server, 0, everyone)
    _, updates = play_round(algorithm, simulation.engine, server, 1, everyone)
    return server, updates


@pytest.mark.parametrize("name", list(ATTACKS))
def test_an_attack_changes_its_clients_and_nothing_else(name, a_round):
    server, honest = a_round
    honest, sent = (tree.map(torch.nan_to_num, each) for each in (honest, ATTACKS[name](RISK, server, honest, WHO)))
    for before, now in zip(tree.leaves(honest), tree.leaves(sent), strict=True):
        assert torch.equal(before[~WHO], now[~WHO])
    packed = tree.pack(honest)
    changed = {path.partition(".")[0] for path, leaf in tree.pack(sent).items() if not leaf.equal(packed[path])}
    assert changed == {
        "sign flip": {"weights", "G"}, "scaled G": {"G"}, "poisoned scores": {"scores"}, LABEL_FLIP: set(),
    }[name]  # fmt: skip


def test_what_attacks_send(a_round):
    server, honest = a_round
    flipped = ATTACKS["sign flip"](RISK, server, honest, WHO)
    for name, start in server.weights.params.items():
        change, lie = (updates.weights.params[name][LIAR] - start for updates in (honest, flipped))
        torch.testing.assert_close(lie, -5 * change)
        torch.testing.assert_close(flipped.G[name][LIAR], -5 * honest.G[name][LIAR])
    scaled = ATTACKS["scaled G"](RISK, server, honest, WHO)
    assert all(torch.equal(scaled.G[name][LIAR], -10 * honest.G[name][LIAR]) for name in honest.G)
    poisoned = ATTACKS["poisoned scores"](RISK, server, honest, WHO)
    assert set(poisoned.scores.a.score[LIAR].tolist()) == {0.0}
    assert set(poisoned.scores.b.score[LIAR].tolist()) == {1.0}
    assert float(poisoned.scores.u[LIAR, 0]) == pytest.approx(float(inner_range(RISK)[0]))


def test_flipped_labels_are_those_of_the_hostile_clients():
    data = from_arrays([(torch.zeros(3, 2), torch.tensor([0, 0, 1])) for _ in range(3)])
    flipped = with_flipped_labels(data, [2])
    assert flipped.y[:, 0].tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 0]
    assert data.y[:, 0].tolist() == [0, 0, 1] * 3


def test_liars_of_a_smaller_count_are_among_those_of_a_larger_one():
    for seed in study.SEEDS:
        groups = [set(study.choose_liars(seed, count)) for count in COUNTS]
        assert [len(group) for group in groups] == list(COUNTS)
        assert all(less < more for less, more in itertools.pairwise(groups))


def test_a_run_of_the_study():
    """Short ones: the limits change nothing if nobody lies, a liar does, and the refused are told apart."""
    none, limits, *others = (
        run_case(Planned(case(*each, rounds=2)))[0]
        for each in (
            (NOBODY, 0, "none"), (NOBODY, 0, "limits"), ("sign flip", 4, "none"), (LABEL_FLIP, 4, "none"),
            ("poisoned scores", 1, "clipping, server's u"),
        )
    )  # fmt: skip
    assert none == limits
    assert none["refused"] == {"hostile": 0, "honest": 0}
    assert all(run["test"]["last"] != none["test"]["last"] for run in others)


def pretend(case: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng([case["seed"], case["hostile"]])
    last = 0.9 - 0.01 * case["hostile"] + 0.001 * rng.normal()
    if (case["attack"], case["hostile"], case["defence"]) == ("sign flip", 4, "none"):
        return {"diverged": "at round 3"}
    return {"test": {"chosen": last + 0.01, "last": last}, "refused": {"hostile": case["hostile"], "honest": 0}}


def test_the_tables_are_of_rows(tmp_path):
    cases = list(study.cases())
    assert len(cases) == 10 * len(DEFENCES) + 3 * 4 * 4 * len(DEFENCES)
    rows = [made(each, **pretend(each)) for each in cases]
    text = study.markdown(rows)
    honest = [row.test("last") for row in rows if row.case["attack"] == NOBODY and row.case["defence"] == "none"]
    assert f"| none | {np.mean(honest):.4f} ± {np.std(honest, ddof=1):.4f} | +0.0000 ± 0.0000 |" in text
    assert "| 0.5000 ± 0.0000 |" in text, "a run that diverged is as good as chance"
    three = [pretend(case("scaled G", 2, "trimmed mean", seed))["test"]["last"] for seed in study.SEEDS]
    assert f"{np.mean(three):.4f} ± {np.std(three, ddof=1):.4f}" in text
    study.draw(tmp_path / "hostile.png", rows)
    assert (tmp_path / "hostile.png").stat().st_size > 10_000
