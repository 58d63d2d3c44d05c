"""Attacks do what they say, and the tables say what was measured."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from fedxl import tree
from fedxl.algorithms.compositional import Weights
from fedxl.algorithms.fedxl_state import FeDXLServer, FeDXLUpdate
from fedxl.algorithms.pool import S1Scores, S2Scores, empty
from fedxl.algorithms.protocol import Share
from fedxl.data.federation import from_arrays
from fedxl.risks import partial_auc
from studies.harness import Planned
from studies.hostile import study
from studies.hostile.attacks import ATTACKS, LABEL_FLIP, with_flipped_labels
from studies.hostile.study import COUNTS, DEFENCES, NOBODY, run_case
from tests.studies.running import made

RISK = partial_auc(lam=0.5)
WHO = torch.tensor([False, True, False])


def a_round() -> tuple[FeDXLServer, FeDXLUpdate]:
    w, one = torch.tensor([1.0, 2.0]), torch.ones(3)
    scores = torch.full((3, 4), 0.5)
    first = S1Scores(scores, scores, scores, scores.long())
    second = S2Scores(scores, 0 * scores, scores, scores.long())
    weights, G = Weights({"w": w + torch.arange(3.0)[:, None]}, {}), {"w": torch.ones(3, 2)}
    server = FeDXLServer(Weights({"w": w}, {}), {"w": 0 * w}, empty(RISK, w, owned=False), torch.tensor(4))
    return server, FeDXLUpdate(weights, G, first, second, Share(*[one] * 5), one.long())


@pytest.mark.parametrize("name", list(ATTACKS))
def test_an_attack_changes_its_clients_and_nothing_else(name):
    server, honest = a_round()
    sent = ATTACKS[name](RISK, server, honest, WHO)
    for before, now in zip(tree.leaves(honest), tree.leaves(sent), strict=True):
        assert torch.equal(before[~WHO], now[~WHO])
    changed = {
        path.partition(".")[0] for path, leaf in tree.pack(sent).items() if not leaf.equal(tree.pack(honest)[path])
    }
    assert changed == {
        "sign flip": {"weights", "G"}, "scaled G": {"G"}, "poisoned scores": {"first", "second"}, LABEL_FLIP: set(),
    }[name]  # fmt: skip


def test_what_attacks_send():
    server, honest = a_round()
    flipped = ATTACKS["sign flip"](RISK, server, honest, WHO)
    assert flipped.weights.params["w"][1].tolist() == [1 - 5, 2 - 5]
    assert flipped.G["w"][1].tolist() == [-5, -5]
    assert ATTACKS["scaled G"](RISK, server, honest, WHO).G["w"][1].tolist() == [-10, -10]
    poisoned = ATTACKS["poisoned scores"](RISK, server, honest, WHO)
    assert poisoned.first.a[1].tolist() == [0] * 4
    assert poisoned.second.b[1].tolist() == [1] * 4
    assert float(poisoned.first.u[1, 0]) == pytest.approx(float(RISK.inner_range()[0]))


def test_flipped_labels_are_those_of_the_hostile_clients():
    federation = from_arrays([(torch.zeros(3, 2), torch.tensor([0, 0, 1])) for _ in range(3)])
    flipped = with_flipped_labels(federation, [2])
    assert flipped.source.labels.tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 0]
    assert federation.source.labels.tolist() == [0, 0, 1] * 3


def test_liars_of_a_smaller_count_are_among_those_of_a_larger_one():
    for seed in study.SEEDS:
        groups = [set(study.choose_liars(seed, count)) for count in COUNTS]
        assert [len(group) for group in groups] == list(COUNTS)
        assert all(less < more for less, more in itertools.pairwise(groups))


def case(attack: str, hostile: int, defence: str, seed: int = 10, **more: int) -> dict[str, Any]:
    return {"attack": attack, "hostile": hostile, "defence": defence, "seed": seed, **more}


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
