"""`python -m studies paper`: the search is the same for all methods, and no command repeats what another has run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fedxl import UserError
from studies.harness import Harness, group, read, train
from studies.paper import ablation, runtime, setup, tables
from studies.paper.commands import details
from studies.paper.published import METHODS
from studies.paper.published import TABLE1 as PUBLISHED1
from studies.paper.published import TABLE2 as PUBLISHED2
from studies.paper.setup import BUDGETS, Budget, HyperParameters, experiment, find_task, title_of
from studies.paper.study import TABLE1, TABLE2, TUNING_SEED, Study, rates, refine
from tests.studies.running import command, made

TINY = Budget(
    iterations=16, trial_iterations=8, rates=(0.1, 0.3), lams=(2.0, 1.0), local_steps=4, batch=4, evaluations=2,
    run=(("executor", "vmap"),),
)  # fmt: skip


def study(folder: Path, budget: Budget = TINY, seeds: int = 2) -> Study:
    do = Harness(folder / "runs.jsonl", partial(train, more=details), say=lambda line: None)
    return Study([find_task("digits", "data")], budget, seeds, do)


@pytest.mark.parametrize("comparison", [TABLE1, TABLE2], ids=lambda comparison: comparison.name)
def test_a_table_holds_every_method_and_is_not_run_twice(tmp_path, comparison):
    text = tables.run(study(tmp_path), comparison)
    rows = read(tmp_path / f"{comparison.name}.jsonl")
    for line in tables.table(comparison, rows, study(tmp_path).do.arrays):
        assert list(line.ours) == list(line.drawn) == list(METHODS)
    for method, own in group(rows, "method").items():
        # Equal budgets: as many trials for whoever has no lam; and none of a seed that results are reported of.
        trials, runs = ([row for row in own if bool(row.case.get("trial")) == trial] for trial in (True, False))
        assert len(trials) == 3, method
        assert {row.case["seed"] for row in trials} == {TUNING_SEED}
        assert [row.case["seed"] for row in runs] == [0, 1]
        top = max(trials, key=lambda row: row.validation(comparison.select))
        assert [(row.case["lr"], row.case.get("lam")) for row in runs] == [(top.case["lr"], top.case.get("lam"))] * 2
    assert (tmp_path / f"{comparison.name}.png").stat().st_size > 10_000
    assert "95 % interval" in text

    again = tables.markdown(comparison, rows, tables.table(comparison, rows))
    assert [line for line in text.splitlines() if "ours" in line] == [l for l in again.splitlines() if "ours" in l]
    assert "95 % interval" not in again, "scores are not in the rows"

    before = read(tmp_path / "runs.jsonl")
    assert len(before) == 5 * (3 + 2)
    assert tables.run(study(tmp_path), comparison) == text
    tables.run(study(tmp_path, seeds=3), comparison)
    after = read(tmp_path / "runs.jsonl")
    assert after[:25] == before
    assert len(after) == 30, "another seed is five more runs"


def test_runtime_and_ablations_share_their_trials(tmp_path):
    text = runtime.run(study(tmp_path, replace(TINY, iterations=48), seeds=1), TABLE1)
    rows = [row for row in read(tmp_path / "runtime.jsonl") if not row.case.get("trial")]
    traffic = {row.case["method"]: row.found["traffic"] for row in rows}
    assert list(traffic) == list(METHODS[1:])
    weights = 4 * (64 * 64 + 64 + 64 + 1)  # the network's bytes
    assert weights < traffic["Local SGD"]["down"] < weights + 100
    assert 2 * weights < traffic["Local Pair"]["up"] < 2 * weights + 100, "weights and G"
    assert "| digits | Local SGD |" in text
    assert "in 48 iterations, evaluated every 4 rounds; one seed." in text
    count = len(read(tmp_path / "runs.jsonl"))
    for varied in (ablation.VARY_K, ablation.VARY_N):
        text = ablation.run(study(tmp_path, seeds=1), TABLE1, varied)
        assert "one seed." in text
        assert "±" not in text, "one run has no spread"
        rows = [row for row in read(tmp_path / f"{varied.name}.jsonl") if not row.case.get("trial")]
        assert [row.case[varied.letter] for row in rows] == list(varied.values)
        assert ablation.markdown(varied, rows) == text, "the table is of rows alone"
        assert (tmp_path / f"{varied.name}.png").stat().st_size > 10_000
    assert len(read(tmp_path / "runs.jsonl")) == count + 8, "no trial twice"


def test_when_training_is_near_its_best():
    history = [
        {"round": 4, "training_seconds": 50.0, "train": {"pauc@0.5": 0.5}},  # fifty seconds, most of them compiling
        {"round": 8, "training_seconds": 52.0, "train": {"pauc@0.5": 0.791}},
        {"round": 12, "training_seconds": 54.0, "train": {"pauc@0.5": 0.80}},
        {"round": 16, "training_seconds": 56.0, "train": {"pauc@0.5": 0.78}},
    ]
    assert runtime.reached(history) == (8, 4.0, 0.80)


def test_a_diverged_run_is_shown_as_such():
    rows = [made({"data": "digits", "method": name, "seed": 0}, diverged="at round 3") for name in METHODS]
    (line,) = tables.table(TABLE2, rows)
    assert line.drawn == {}
    assert str(tables.lead(line, "CODASCA")) == "diverged"


def test_the_search_tries_as_many_rates_where_there_is_no_lam():
    for budget in BUDGETS.values():
        for method in TABLE1.methods:
            tried = rates(budget, method) + refine(budget, method, rates(budget, method)[1])
            assert len(set(tried)) == len(budget.rates) + len(budget.lams) - 1


def test_data_sets_take_options():
    found = find_task("chestmnist:set=chestmnist_64,label=infiltration,clients=4", "somewhere", {"score_norm": True})
    assert found.data == {
        "name": "medmnist", "set": "chestmnist_64", "label": "infiltration", "crop": 2, "flip": True,
        "site_noise": 0.04, "root": "somewhere", "clients": 4,
    }  # fmt: skip
    assert title_of(found.case) == (
        "ChestMNIST (set=chestmnist_64, label=infiltration, clients=4), score_norm = True"
    )
    for budget, name in (("full", "densenet121"), ("quick", "cnn")):
        config = experiment(found, TABLE1.methods[0], BUDGETS[budget], HyperParameters(0.1, 2.0), 0, 100)
        assert config.model == {"name": name, "score_norm": True}
    joint = experiment(found, TABLE1.methods[0], BUDGETS["full"], HyperParameters(0.1, 2.0), 0, 100)
    assert joint.run["batch1"] == 4 * 32, "all clients' images in a step"
    with pytest.raises(UserError, match="must read key=value"):
        find_task("cifar10:crop", "")
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        find_task("cifar1", "")


def test_the_full_budget_is_the_papers():
    full = BUDGETS["full"]
    task = find_task("cifar10", "")
    config = experiment(task, TABLE1.methods[-1], full, HyperParameters(0.1, 2.0), 0, full.iterations)
    assert (config.run["rounds"], config.run["local_steps"]) == (625, 32)
    assert (config.run["batch1"], config.run["batch2"]) == (32, 32)
    assert config.algorithm["milestones"] == [5000, 10_000, 15_000]
    assert (min(full.rates), max(full.rates), sorted(full.lams)) == (1e-3, 1, [1, 2, 3, 4, 5])
    lengths = {name: budget.with_iterations(640) for name, budget in BUDGETS.items()}
    assert {name: b.trial_iterations for name, b in lengths.items()} == {"quick": 320, "short": 320, "full": 160}


def test_the_papers_results_are_copied_right():
    """Checks against the text: FeDXL is best among the federated ones in every row, and two cells by hand."""
    assert PUBLISHED1["cifar10", "pauc@0.5"]["FeDXL"] == (0.7978, 0.0026)
    assert PUBLISHED2["chexpert", "auroc"]["CODASCA"] == (0.7062, 0.0085)
    for rows in (PUBLISHED1, PUBLISHED2):
        for row in rows.values():
            assert max(METHODS[1:], key=lambda name: row[name].mean) == "FeDXL"
    assert {name for name, _ in PUBLISHED1} == set(setup.PAPER_TASKS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "fast"], "unknown budget 'fast'"),
        (["--seeds", "0"], "seeds must be at least 1"),
        (["--model", "stem"], "'stem' must read key=value, as in --model score_norm=true"),
        (["--budget", "quick", "--model", "stem=7x7"], "unknown setting 'model.stem'"),
        (["--data", "cifar10", "--root", "/nowhere"], "there is no cifar-10-batches-bin in /nowhere"),
        (["--only", "fedxk"], "unknown method 'fedxk'"),
    ],
)
def test_mistakes_are_one_line(options, message, tmp_path, monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, "paper", "table1", "--out", str(tmp_path), *options)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("iterations", "warned"), [(8, True), (9, False)])
def test_trials_of_one_round_are_warned_of(iterations, warned, tmp_path, monkeypatch, capsys):
    options = (
        "--budget",
        "quick",
        "--trial-iterations",
        str(iterations),
        "--data",
        "cifar10",
        "--root",
        str(tmp_path),
    )
    code, _, err = command(monkeypatch, capsys, "paper", "table2", *options)
    assert code == 2, "there are no files"
    assert ("use more than 8 for two rounds" in err) == warned
