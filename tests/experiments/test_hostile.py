"""Attacks do what they say, the study resumes, and its record says what was measured."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from fedxl.experiments.hostile import record, study
from fedxl.experiments.hostile.attacks import ATTACKS, LABEL_FLIP, with_flipped_labels
from fedxl.experiments.hostile.study import COUNTS, DEFENCES, NOBODY, Case

from fedxl import UserError, tree
from fedxl.algorithms.compositional import Weights
from fedxl.algorithms.fedxl_state import FeDXLServer, FeDXLUpdate
from fedxl.algorithms.pool import S1Scores, S2Scores, empty
from fedxl.algorithms.protocol import Share
from fedxl.data.federation import from_arrays
from fedxl.risks import partial_auc

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
        groups = [set(study.liars(seed, count)) for count in COUNTS]
        assert [len(group) for group in groups] == list(COUNTS)
        assert all(less < more for less, more in itertools.pairwise(groups))


def short(case: Case):
    config = study.config_of(case)
    return replace(config, run={**config.run, "rounds": 2, "local_steps": 2, "eval_every": 1})


def test_a_run_of_the_study():
    """Short ones: the limits change nothing if nobody lies, a liar does, and the refused are told apart."""
    found = {
        case: study.run_case(case, short(case))
        for case in (
            Case(NOBODY, 0, "none", 10), Case(NOBODY, 0, "limits", 10), Case("sign flip", 4, "none", 10),
            Case(LABEL_FLIP, 4, "none", 10), Case("poisoned scores", 1, "clipping, server's u", 10),
        )
    }  # fmt: skip
    none, limits, *others = found.values()
    assert none == limits
    assert none["refused"] == {"hostile": 0, "honest": 0}
    assert all(run["last"] != none["last"] for run in others)


def pretended(case: Case) -> dict:
    rng = np.random.default_rng([case.seed, case.hostile])
    last = 0.9 - 0.01 * case.hostile + 0.001 * rng.normal()
    gone = case.attack == "sign flip" and case.hostile == 4 and case.defence == "none"
    refused = {"hostile": case.hostile, "honest": 0}
    return {
        "chosen": None if gone else last + 0.01,
        "last": None if gone else last,
        "refused": None if gone else refused,
    }


def test_the_study_resumes_and_is_recorded(tmp_path):
    cases, ran = list(study.cases()), []
    assert len(cases) == len(set(cases)) == 10 * len(DEFENCES) + 3 * 4 * 4 * len(DEFENCES)

    def run(case):
        ran.append(case)
        return pretended(case)

    path = tmp_path / "hostile.json"
    study.study(path, cases[:5], run)
    runs = study.study(path, cases[:20], run)
    assert ran == cases[:20], "none twice"
    assert json.loads(path.read_text())["runs"] == runs

    runs = [
        {"attack": c.attack, "hostile": c.hostile, "defence": c.defence, "seed": c.seed, **pretended(c)}
        for c in cases
    ]
    record.write(runs, tmp_path, "a machine")
    text = (tmp_path / "hostile.md").read_text()
    honest = [run["last"] for run in runs if run["attack"] == NOBODY and run["defence"] == "none"]
    assert f"| none | {np.mean(honest):.4f} ± {np.std(honest, ddof=1):.4f} | +0.0000 ± 0.0000 |" in text
    assert "| 0.5000 ± 0.0000 |" in text, "a run that diverged is as good as chance"
    three = [pretended(Case("scaled G", 2, "median", seed))["last"] for seed in study.SEEDS]
    assert f"{np.mean(three):.4f} ± {np.std(three, ddof=1):.4f}" in text
    assert (tmp_path / "hostile.png").stat().st_size > 10_000


def test_another_file_is_not_taken_for_results(tmp_path):
    path = tmp_path / "hostile.json"
    for content in ("{", "[]", '{"runs": [{"attack": 1}]}', '{"runs": 3}'):
        path.write_text(content)
        with pytest.raises(UserError, match="holds no results of this study"):
            study.study(path, [])
