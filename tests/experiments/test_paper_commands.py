"""`fedxl paper`: the search is the same for all, nothing is run twice, and an interruption loses no finished run."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fedxl.experiments.paper import ablation, runs, runtime, setup, tables
from fedxl.experiments.paper.published import METHODS
from fedxl.experiments.paper.published import TABLE1 as PUBLISHED1
from fedxl.experiments.paper.published import TABLE2 as PUBLISHED2
from fedxl.experiments.paper.runs import PlannedRun, Runner, RunRecord, RunStore
from fedxl.experiments.paper.setup import BUDGETS, Budget, HyperParameters, experiment, task
from fedxl.experiments.paper.study import TABLE1, TABLE2, Study, outline
from fedxl.experiments.paper.tuning import SEED, Trial, TuningSearch, choose

from fedxl import UserError, progress
from fedxl.config.experiment import Config
from fedxl.errors import DivergedError
from fedxl.reporting.text import mean_with_spread
from fedxl.training.hooks import Hooks, Progress
from tests.cli.test_errors import command
from tests.conftest import PATIENCE, until

TINY = Budget(
    iterations=16, trial_iterations=8, rates=(0.1, 0.3), lams=(2.0, 1.0), local_steps=4, batch=4, evaluations=2,
    run=(("executor", "vmap"),),
)  # fmt: skip


def study(folder: Path, budget: Budget = TINY, seeds: int = 2) -> Study:
    runner = Runner(RunStore(folder / "runs"), 1, "cpu")
    return Study([task("digits", "data")], budget, seeds, runner, folder, lambda line: None)


def records(folder: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "runs").glob("*.json")}


@pytest.mark.parametrize("comparison", [TABLE1, TABLE2], ids=lambda comparison: comparison.name)
def test_a_table_holds_every_method_and_is_not_run_twice(tmp_path, comparison):
    text = tables.run(study(tmp_path), comparison)
    content = json.loads((tmp_path / f"{comparison.name}.json").read_text())
    assert [row["figure"] for row in content["rows"]] == list(comparison.metrics)
    assert list(content["rows"][0]["ours"]) == list(METHODS)
    assert all(len(values) == 2 for values in content["rows"][0]["ours"].values())
    for method in content["methods"]:
        # Equal budgets: as many trials for whoever has no lam; and none of a seed that results are reported of.
        assert len(method["trials"]) == 3
        best = max(method["trials"], key=lambda trial: trial["value"])
        assert method["chosen"] == {name: best[name] for name in ("lr", "lam")}
        assert {run["experiment"]["run"]["seed"] for run in method["runs"]} == {0, 1}
        for run in method["runs"]:
            top, value = max(run["curve"], key=lambda point: point[1])
            assert (top, value) == (run["best_round"], round(run["validation"][next(iter(comparison.metrics))], 5))
        assert all(run["experiment"]["algorithm"]["lr"] == best["lr"] for run in method["runs"])
        assert all(
            run["experiment"]["data"].get("flipped", 0) == comparison.data.get("flipped", 0) for run in method["runs"]
        )
    assert SEED > 1
    assert (tmp_path / f"{comparison.name}.png").stat().st_size > 10_000
    assert (tmp_path / f"{comparison.name}.md").read_text() == text
    for row in content["rows"]:
        for name, (low, high) in row["intervals"].items():
            assert low < sum(row["ours"][name]) / 2 < high

    before = records(tmp_path)
    assert len(before) == 5 * (3 + 2)
    assert tables.run(study(tmp_path), comparison) == text
    assert records(tmp_path) == before
    tables.run(study(tmp_path, seeds=3), comparison)
    after = records(tmp_path)
    assert len(after) == len(before) + 5, "another seed is five more runs"
    assert {name: after[name] for name in before} == before


def test_runtime_and_ablations(tmp_path):
    text = runtime.run(study(tmp_path, replace(TINY, iterations=48), seeds=1))
    content = json.loads((tmp_path / "runtime.json").read_text())
    assert [row["method"] for row in content["rows"]] == list(METHODS[1:])
    traffic = {row["method"]: row["traffic"] for row in content["rows"]}
    weights = 4 * (64 * 64 + 64 + 64 + 1)  # the network's bytes
    assert weights < traffic["Local SGD"]["down"] < weights + 100
    assert 2 * weights < traffic["Local Pair"]["up"] < 2 * weights + 100, "weights and G"
    # Four steps of four scores of S1 with their u, and of S2 with their y. The pool is one entry a side, no score.
    passive, emptied = 16 * 4 * 4, 2 * (3 * 4 + 8)
    assert traffic["FeDXL"]["down"] == 2 * weights + passive + emptied + 8, "weights, G, scores and the step's number"
    assert "| Local SGD |" in text
    assert "in 48 iterations, evaluated every 4 rounds; one seed." in text
    for varied in (ablation.VARY_K, ablation.VARY_N):
        text = ablation.run(study(tmp_path, seeds=1), varied)
        assert "one seed." in text
        assert "±" not in text, "one run has no spread"
        rows = json.loads((tmp_path / f"{varied.name}.json").read_text())["rows"]
        assert [row["value"] for row in rows] == list(varied.values)
        settings = [row["runs"][0]["experiment"] for row in rows]
        if varied.run:
            assert [s["run"]["local_steps"] for s in settings] == list(varied.values)
            assert [s["run"]["rounds"] for s in settings] == [16, 2, 1, 1]
        else:
            assert [s["data"]["present"] for s in settings] == list(varied.values)
        assert (tmp_path / f"{varied.name}.png").stat().st_size > 10_000


def test_when_training_is_near_its_best():
    history = [
        {"round": 4, "training_seconds": 50.0, "train": {"pauc@0.5": 0.5}},  # fifty seconds, most of them compiling
        {"round": 8, "training_seconds": 52.0, "train": {"pauc@0.5": 0.791}},
        {"round": 12, "training_seconds": 54.0, "train": {"pauc@0.5": 0.80}},
        {"round": 16, "training_seconds": 56.0, "train": {"pauc@0.5": 0.78}},
    ]
    found = runtime.reached(history)
    assert (found.rounds, found.seconds, found.best) == (8, 4.0, 0.80)


def test_a_diverged_trial_loses_and_if_all_do_it_is_said(monkeypatch, tmp_path):
    def explode(*args: Any, **kwargs: Any) -> None:
        raise DivergedError("the weights were no longer finite")

    monkeypatch.setattr(runs, "execute", explode)
    with pytest.raises(UserError, match="every learning rate that was tried diverged"):
        tables.run(study(tmp_path), TABLE1)
    assert choose([Trial(HyperParameters(1.0), float("-inf")), Trial(HyperParameters(0.1), 0.6)]) == HyperParameters(
        0.1
    )


def test_a_trial_that_has_collapsed_ends_there(tmp_path):
    """Its value is what it had; a run that is no trial goes on to its end, and its record says so, too."""
    budget, store = replace(TINY, evaluations=5), RunStore(tmp_path)
    lines, done = [], []

    def perform(lr: float, trial: bool) -> RunRecord:
        column = next(method for method in TABLE1.methods if method.label == "FeDXL")
        config = experiment(task("digits", ""), column, budget, HyperParameters(lr, 2.0), int(trial), 40)
        job = PlannedRun(f"lr {lr:g}", config, trial=trial)
        record = runs.perform(job, store, "cpu", 1, done.append)
        lines.append(runs._line(job, record))
        assert store.find(job) == record
        return record

    wild, whole, mild = perform(1e4, True), perform(1e4, False), perform(0.1, True)
    assert wild.collapsed_in == 2
    assert (wild.content["rounds"], len(wild.content["history"])) == (2, 1)
    assert wild.validation("pauc@0.3") == wild.content["history"][0]["validation"]["pauc@0.3"]
    assert math.isnan(wild.test("pauc@0.3")), "it was not tested"
    assert wild.content["executor"].startswith("executor: vmap") or not wild.content["executor"]
    assert whole.collapsed_in == 2
    assert (whole.content["rounds"], whole.test("auroc") > 0) == (10, True)
    assert mild.collapsed_in is None
    assert mild.content["rounds"] == 10
    assert sum(done) == 3 * 40, "progress reaches its end"
    assert ["collapsed by round 2" in line for line in lines] == [True, True, False]


def test_tuning_marks_its_runs_as_trials():
    planned: list[PlannedRun] = []

    def runner(jobs: list[PlannedRun]) -> list[RunRecord]:
        planned.extend(jobs)
        return [RunRecord(job.key, {"validation": {"auroc": job.config.algorithm["lr"]}}) for job in jobs]

    TuningSearch(TINY, runner, "auroc", {})([task("digits", "")], TABLE1.methods)
    assert planned
    assert all(job.trial for job in planned)


def test_a_diverged_run_is_shown_as_such(tmp_path):
    store = RunStore(tmp_path / "runs")
    wild = RunRecord("wild", {"diverged": "at round 3", "machine": {}})
    entries = {("digits", name): tables.Entry(None, [wild]) for name in METHODS}
    row = tables.row(store, TABLE2, entries, task("digits", ""), "auroc")
    assert row.drawn == {}
    assert mean_with_spread(row.ours["FeDXL"]) == "diverged"


def test_the_search_tries_as_many_rates_where_there_is_no_lam():
    for budget in BUDGETS.values():
        search = TuningSearch(budget, None, "", {})
        for method in TABLE1.methods:
            tried = search.rates(method) + search.refine(method, search.rates(method)[1])
            assert len(set(tried)) == len(budget.rates) + len(budget.lams) - 1


def test_a_run_is_known_by_what_it_is_not_by_where(tmp_path):
    def key(root: str, **changes: Any) -> str:
        return PlannedRun(
            "", experiment(task("cifar10", root), TABLE1.methods[1], TINY, HyperParameters(0.1), 0, 16, **changes)
        ).key

    assert key("here") == key("there")
    assert key("here") != key("here", compile=False), "its seconds are others"
    assert key("here") != key("here", data={"flipped": 0.2})
    run = {"experiment": {"data": {"name": "cifar10", "root": "/home/me"}, "run": {}}, "test": {}}
    assert "/home/me" not in str(outline(RunRecord("key", run))), "tables do not reveal the data's folder"


def test_a_damaged_record_is_named(tmp_path):
    job = PlannedRun("", experiment(task("digits", ""), TABLE1.methods[1], TINY, HyperParameters(0.1), 0, 16))
    (tmp_path / f"{job.key}.json").write_text("{")
    with pytest.raises(UserError, match="remove it to repeat the run"):
        RunStore(tmp_path).find(job)


def test_data_sets_take_options():
    found = task("chestmnist:set=chestmnist_64,label=infiltration,clients=4", "somewhere")
    assert found.data == {
        "name": "medmnist", "set": "chestmnist_64", "label": "infiltration", "crop": 2, "flip": True,
        "site_noise": 0.04, "root": "somewhere", "clients": 4,
    }  # fmt: skip
    other = found.with_network({"score_norm": True})
    assert other.title == f"{found.title}, score_norm = True"
    for budget, name in (("full", "densenet121"), ("quick", "cnn")):
        config = experiment(other, TABLE1.methods[0], BUDGETS[budget], HyperParameters(0.1, 2.0), 0, 100)
        assert config.model == {"name": name, "score_norm": True}
    joint = experiment(found, TABLE1.methods[0], BUDGETS["full"], HyperParameters(0.1, 2.0), 0, 100)
    assert joint.run["batch1"] == 4 * 32, "all clients' images in a step"
    with pytest.raises(UserError, match="must read key=value"):
        task("cifar10:crop", "")
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        task("cifar1", "")


def test_the_full_budget_is_the_papers():
    full = BUDGETS["full"]
    config = experiment(task("cifar10", ""), TABLE1.methods[-1], full, HyperParameters(0.1, 2.0), 0, full.iterations)
    assert (config.run["rounds"], config.run["local_steps"]) == (625, 32)
    assert (config.run["batch1"], config.run["batch2"]) == (32, 32)
    assert config.algorithm["milestones"] == [5000, 10_000, 15_000]
    assert config.algorithm["beta"] == 0.1
    assert min(full.rates) == 1e-3
    assert max(full.rates) == 1
    assert sorted(full.lams) == [1, 2, 3, 4, 5]


def test_the_papers_results_are_copied_right():
    """Checks against the text: FeDXL is best among the federated ones in every row, and two cells by hand."""
    assert PUBLISHED1["cifar10", "pauc@0.5"]["FeDXL"] == (0.7978, 0.0026)
    assert PUBLISHED2["chexpert", "auroc"]["CODASCA"] == (0.7062, 0.0085)
    for rows in (PUBLISHED1, PUBLISHED2):
        for row in rows.values():
            assert max(METHODS[1:], key=lambda name: row[name].mean) == "FeDXL"
    assert {name for name, _ in PUBLISHED1} == set(setup.PAPER_TASKS)


@pytest.mark.parametrize(("iterations", "said"), [(7, True), (8, True), (9, False)])
def test_trials_of_one_round_are_warned_of(iterations, said, tmp_path, monkeypatch, capsys):
    trials, data = ("--trial-iterations", str(iterations)), ("--data", "cifar10", "--root", str(tmp_path))
    code, _, told = command(monkeypatch, capsys, "paper", "table2", "--budget", "quick", *trials, *data)
    assert code == 2, "there are no files"
    assert ("use more than 8 for two rounds" in told) == said


def test_trials_stay_the_share_of_a_run_that_they_are():
    lengths = {name: budget.with_iterations(640) for name, budget in BUDGETS.items()}
    assert {name: (b.iterations, b.trial_iterations) for name, b in lengths.items()} == {
        "quick": (640, 320), "short": (640, 320), "full": (640, 160),
    }  # fmt: skip
    assert BUDGETS["short"].with_iterations(640, 64).trial_iterations == 64
    assert BUDGETS["full"].with_iterations(1).trial_iterations == 1


COMMAND = [
    sys.executable,
    "-m",
    "fedxl",
    "paper",
    "table2",
    "--budget",
    "quick",
    "--seeds",
    "1",
    "--device",
    "cpu",
]


def two_jobs() -> list[PlannedRun]:
    configs = [
        experiment(task("digits", ""), TABLE2.methods[4], TINY, HyperParameters(lr), 0, 16) for lr in (0.1, 0.3)
    ]
    return [PlannedRun(f"lr {config.algorithm['lr']}", config) for config in configs]


def test_a_log_says_how_much_of_all_runs_is_done(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    runner = Runner(RunStore(tmp_path), 1, "cpu")
    runner(two_jobs()[:1])
    assert "one run, iterations: 12 of 16, about" in capsys.readouterr().err
    runner(two_jobs())
    told = re.findall(r"one run \(1 done before\), iterations: (\d+) of 16", capsys.readouterr().err)
    assert told == ["0", "4", "8", "12"]
    runner(two_jobs())
    assert capsys.readouterr().err == "", "nothing is left to be done"


def test_workers_say_how_much_of_their_runs_is_done(tmp_path, monkeypatch):
    told: list[int] = []

    @contextmanager
    def collected(what: str, total: int) -> Iterator[Callable[[int], None]]:
        assert total == 32
        yield told.append

    monkeypatch.setattr(runs, "progress", collected)
    runner = Runner(RunStore(tmp_path), 2, "cpu")
    runner(two_jobs())
    runner.stop_workers()
    assert sum(told) == 32


def test_what_a_diverged_run_need_not_do_counts_as_done(tmp_path, monkeypatch):
    def diverge(config: Config, hooks: Hooks) -> None:
        hooks.on_progress(Progress(1, 4, 0.0, None))
        raise DivergedError("at round 2")

    monkeypatch.setattr(runs, "execute", diverge)
    job = PlannedRun("wild", experiment(task("digits", ""), TABLE2.methods[4], TINY, HyperParameters(9.0), 0, 16))
    told: list[int] = []
    assert runs.perform(job, RunStore(tmp_path), "cpu", 1, told.append).diverged
    assert told == [4, 12]


def test_kinds_of_runs_are_programs():
    def kind(data: str = "cifar10", method: int = 4, lr: float = 0.1, **run: Any) -> str:
        return PlannedRun(
            "", experiment(task(data, ""), TABLE1.methods[method], TINY, HyperParameters(lr, 2.0), 0, 16, **run)
        ).kind

    assert kind() == kind(lr=1.0) == kind(rounds=7)
    others = [
        kind(method=3),
        kind(local_steps=8),
        kind("cifar10:present=4"),
        kind("cifar10:clients=4"),
        kind("digits"),
    ]
    assert len({kind(), *others}) == 6


def test_interrupted_it_keeps_what_is_done_and_goes_on(tmp_path):
    """A real process with two workers, interrupted as by Ctrl-C, then finished."""
    process = subprocess.Popen(
        [*COMMAND, "--jobs", "2", "--out", str(tmp_path)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which whoever runs the tests may ignore
    )  # fmt: skip
    until(lambda: len(records(tmp_path)) >= 2, lambda: process.poll() is None)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    assert "the same command continues from there" in said
    assert "Traceback" not in said
    kept = records(tmp_path)
    assert 2 <= len(kept) < 30
    again = subprocess.run(
        [*COMMAND, "--out", str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert {name: stamp for name, stamp in records(tmp_path).items() if name in kept} == kept
    assert "| digits | AUC | ours |" in again.stdout
    assert again.stderr.count("trial") == 25 - sum(1 for name in kept if name), "the rest was done, no more"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "fast"], "unknown budget 'fast'"),
        (["--seeds", "0"], "seeds must be at least 1"),
        (["--model", "stem"], "'stem' must read key=value, as in --model score_norm=true"),
        (["--budget", "quick", "--model", "stem=7x7"], "unknown setting 'model.stem'"),
        (["--data", "cifar10", "--root", "/nowhere"], "there is no cifar-10-batches-py in /nowhere"),
    ],
)
def test_mistakes_are_one_line(options, message, tmp_path, monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, "paper", "table1", "--out", str(tmp_path), *options)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
