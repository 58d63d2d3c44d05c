"""A search end to end: what it keeps, what it looks at, what it spends, and that a kill changes nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedxl import UserError
from fedxl.cli.main import app
from fedxl.config import experiment as configs
from fedxl.config.experiment import Config
from fedxl.data.examples import Splits
from fedxl.data.inputs import from_arrays
from fedxl.evaluation import scores
from fedxl.experiments.tune import outcome
from fedxl.experiments.tune.outcome import best_so_far
from fedxl.experiments.tune.plan import FIRST_SEED, Choice, Plan, Range, TuneSettings, plan
from fedxl.experiments.tune.search import Search, best_of, promoted, propose
from fedxl.experiments.tune.trials import Outcome, Trial, TrialStore
from fedxl.training.evaluate import HeldBack
from fedxl.training.health import COLLAPSED, Watch
from fedxl.training.run_folder import checkpointed
from fedxl.training.settings import Hooks
from tests.conftest import make_clients, until
from tests.training.faults import Disk, failing

QUIET = Hooks(say=lambda line: None)


def data(test_seed: int = 3) -> Splits:
    """Small enough for many runs, hard enough that settings matter."""
    held = [from_arrays(make_clients([(25, 30)], seed=seed)) for seed in (9, test_seed)]
    return Splits(from_arrays(make_clients([(8, 8)] * 3)), *held)


def config(**run) -> Config:
    settings = {
        "rounds": 9, "local_steps": 1, "batch1": 2, "batch2": 2, "eval_every": 1, "checkpoint_every": 2,
        "executor": "loop", "device": "cpu", "dtype": "float64",
    }  # fmt: skip
    return Config(
        data={"name": "tests.experiments.test_tune:data"},
        model={"name": "linear"},
        risk={"name": "pauc"},
        algorithm={"name": "fedxl2"},
        run={**settings, **run},
    )


def a_plan(
    space: dict | None = None, algorithms=("fedxl2", "local_sgd"), run: dict | None = None, **settings
) -> Plan:
    tune = TuneSettings(algorithms=tuple(algorithms), **{"trials": 9, **settings})
    return plan(config(**(run or {})), tune, {"algorithm": {"lr": {"log": [0.001, 3.0]}}} if space is None else space)


def results(todo: Plan, folder: Path, jobs: int = 1) -> dict:
    """All that a search came to, without the time it took."""
    outcome.save(todo, Search(todo, folder, jobs)(), folder, lambda line: None)
    return json.loads((folder / "results.json").read_text())


def test_promoted_trials_come_to_what_a_run_to_the_end_comes_to(tmp_path):
    todo = a_plan(algorithms=["fedxl2"])
    found = Search(todo, tmp_path)()
    for algorithm, trials in found.items():
        best = best_of(trials)
        assert [rung.rounds for rung in todo.rungs] == [outcome.rounds for outcome in best.outcomes] == [1, 3, 9]
        straight = configs.execute(todo.configure(algorithm, best.settings, {"seed": FIRST_SEED}), hooks=QUIET)
        assert best.value == straight.metrics["validation"]["pauc@0.3"]
        kept = [sum(trial.at(rung.rounds) is not None for trial in trials) for rung in todo.rungs]
        assert kept == [9, 3, 1]
        first = sorted(trials, key=lambda trial: -trial.outcomes[0].value)
        assert {trial.number for trial in trials if len(trial.outcomes) > 1} == {t.number for t in first[:3]}


def test_every_algorithm_spends_the_same_rounds(tmp_path):
    todo = a_plan(seeds=2, trials=4, run={"rounds": 6})
    found = Search(todo, tmp_path)()
    store = TrialStore(tmp_path)
    for trials in found.values():
        # What is on disk: the last checkpoint of each run.
        trained = sum(checkpointed(store.run(trial, seed)) for trial in trials for seed in range(2))
        assert trained == todo.budget == sum(trial.last.spent for trial in trials)


def test_the_value_of_a_trial_is_the_mean_over_its_seeds(tmp_path):
    todo = a_plan(seeds=2, trials=1, algorithms=["fedxl2"], sampler="random", run={"rounds": 2})
    (trial,) = Search(todo, tmp_path)()["fedxl2"]
    each = [
        configs.execute(todo.configure("fedxl2", trial.settings, {"seed": FIRST_SEED + extra}), hooks=QUIET)
        for extra in range(2)
    ]
    values = [result.metrics["validation"]["pauc@0.3"] for result in each]
    assert values[0] != values[1]
    assert trial.value == sum(values) / 2
    assert trial.last.values == tuple(values)


def test_test_data_are_never_looked_at(tmp_path, monkeypatch):
    looked: list[str] = []
    examine = HeldBack.examine
    monkeypatch.setattr(HeldBack, "examine", lambda self, w, split: looked.append(split) or examine(self, w, split))
    found = Search(a_plan(trials=2), tmp_path)()
    assert set(looked) == {"validation"}
    run = TrialStore(tmp_path).run(found["fedxl2"][0], 0)
    assert set(scores.load(run / "scores.npz")) == {"validation"}
    monkeypatch.undo()
    configs.execute(config(rounds=1), hooks=QUIET)  # while a run on its own does


def test_a_full_disk_ends_a_search_in_one_line_and_the_same_command_goes_on(tmp_path):
    text = configs.dump(config(rounds=2)) + "[tune]\ntrials = 2\nsampler = 'random'\n"
    (tmp_path / "c.toml").write_text(text)

    def searched(folder: Path) -> BaseException | None:
        found = CliRunner().invoke(app, ["tune", str(tmp_path / "c.toml"), "--out", str(folder)]).exception
        assert found is None or isinstance(found, UserError), found
        return found

    assert searched(tmp_path / "whole") is None
    expected = json.loads((tmp_path / "whole" / "results.json").read_text())["best"]
    told, at = list[str](), 0
    while True:
        folder = tmp_path / f"at-{at}"
        folder.mkdir()
        with failing(Disk(folder, at=at, full=True)) as disk:
            error = searched(folder)
        assert (error is None) == (not disk.fired)
        if error is None:
            break
        told.append(str(error))
        assert searched(folder) is None
        assert json.loads((folder / "results.json").read_text())["best"] == expected
        at += 5
    assert all("No space left on device" in line and len(line.splitlines()) == 1 for line in told), told
    assert any("finished trials are kept" in line for line in told)


def in_child(todo: Plan, folder: Path) -> multiprocessing.Process:
    def search() -> None:
        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        Search(todo, folder)()

    process = multiprocessing.get_context("fork").Process(target=search)
    process.start()
    return process


def rungs_done(folder: Path) -> int:
    """A record is written whole or not at all, so that it can be read at any moment."""
    records = [json.loads(path.read_text()) for path in folder.glob("trials/*.json")]
    return sum(len(record["outcomes"]) for record in records)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("sampler", ["halving", "optuna"])
def test_killed_again_and_again_it_comes_to_the_same(tmp_path, sampler):
    if sampler == "optuna":
        pytest.importorskip("optuna")
    todo = a_plan(sampler=sampler, trials=4, run={"rounds": 4, "eval_every": 2})
    whole = results(todo, tmp_path / "whole")
    folder = tmp_path / "killed"
    for at_least in (1, 4, 6):
        process = in_child(todo, folder)
        assert until(lambda n=at_least: rungs_done(folder) >= n, process.is_alive)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    before = {path: path.read_text() for path in folder.glob("trials/*.json")}
    assert results(todo, folder) == whole
    for path, text in before.items():
        done = json.loads(text)["outcomes"]
        assert json.loads(path.read_text())["outcomes"][: len(done)] == done, "what was done is not done again"


@pytest.mark.slow
def test_several_processes_come_to_the_same(tmp_path):
    todo = a_plan(trials=3, run={"rounds": 3})
    assert results(todo, tmp_path / "two", jobs=2) == results(todo, tmp_path / "one")


def test_trials_that_diverge_are_failures_not_crashes(tmp_path):
    space = {"algorithm": {"lr": [0.1, 1e200], "weight_decay": [1.0]}}
    todo = a_plan(space, ["local_sgd"], trials=6)
    found = Search(todo, tmp_path)()
    failed = [trial for trial in found["local_sgd"] if trial.last.failed]
    assert {trial.settings["algorithm.lr"] for trial in failed} == {1e200}
    assert all("diverged" in trial.last.failed for trial in failed)
    assert best_of(found["local_sgd"]).settings["algorithm.lr"] == 0.1
    assert outcome.rows(todo, found)[0][4] == str(len(failed))
    outcome.save(todo, found, tmp_path, lambda line: None)
    hopeless = a_plan({"algorithm": {"lr": [1e200], "weight_decay": [1.0]}}, ["local_sgd"], trials=2)
    with pytest.raises(UserError, match="every trial has diverged or collapsed"):
        results(hopeless, tmp_path / "hopeless")


def test_a_trial_ends_where_its_scores_collapse(tmp_path, monkeypatch):
    """At the first evaluation that finds it, whichever that is: here the second of those with a large lr."""

    def watch(self, server, round, outputs):
        return {COLLAPSED: True} if round >= 2 and self.algorithm.lr > 0.5 else {}

    monkeypatch.setattr(Watch, "__call__", watch)
    todo = a_plan({"algorithm": {"lr": [0.1, 1.0]}}, ["fedxl2"], trials=4, sampler="random", run={"rounds": 4})
    for each in Search(todo, tmp_path)()["fedxl2"]:
        collapsed = each.settings["algorithm.lr"] == 1.0
        assert each.last.failed == ("the scores have collapsed by round 2" if collapsed else "")
        assert each.last.spent == (2 if collapsed else 4)


def trial(number: int, *values: float | None) -> Trial:
    outcomes = [
        Outcome(
            rounds=3**i, value=v, values=() if v is None else (v,), spent=3**i, seconds=0.0, failed="" if v else "x"
        )
        for i, v in enumerate(values)
    ]
    return Trial("fedxl2", number, {"algorithm.lr": number / 10}, outcomes)


def test_failed_trials_are_never_promoted_and_longer_ones_win():
    trials = [trial(1, 0.5), trial(2, None), trial(3, 0.9), trial(4, None), trial(5, 0.5)]
    assert [each.number for each in promoted(trials, 2, 1)] == [1, 3]  # of equal ones the earlier
    assert [each.number for each in promoted(trials, 4, 1)] == [1, 3, 5]
    assert best_of([trial(1, 0.9), trial(2, 0.8, 0.7), trial(3, 0.8, None)]).number == 2
    assert best_of([trial(1, None)]) is None
    so_far = best_so_far([trial(1, None), trial(2, 0.4), trial(3, 0.3), trial(4, 0.6)], "auroc")
    assert so_far[1:] == [0.4, 0.4, 0.6]
    assert so_far[0] != so_far[0]


def test_another_search_in_the_same_folder_is_refused_and_more_trials_are_not(tmp_path):
    Search(a_plan(trials=2, sampler="random", run={"rounds": 1}), tmp_path)()
    for changed, name in {"tune.seed": {"seed": 1}, "config.run": {"run": {"rounds": 2}}}.items():
        given = {"trials": 2, "sampler": "random", "run": {"rounds": 1}, **name}
        with pytest.raises(UserError, match=f"holds a search with another {changed};"):
            Search(a_plan(**given), tmp_path)()
    more = a_plan(trials=3, sampler="random", run={"rounds": 1}, algorithms=["fedxl2", "local_pair"])
    found = Search(more, tmp_path)()
    assert {name: len(trials) for name, trials in found.items()} == {"fedxl2": 3, "local_pair": 3}
    (tmp_path / "trials" / "fedxl2-0001.json").write_text('{"algorithm": "fedxl2"}')
    with pytest.raises(UserError, match=r"remove it and .*fedxl2-0001-seed-\* to repeat the trial"):
        Search(more, tmp_path)()


def test_a_trial_is_repeated_as_the_message_says(tmp_path):
    todo = a_plan(algorithms=["fedxl2"], trials=3)
    before = results(todo, tmp_path)
    best = best_of(Search(todo, tmp_path)()["fedxl2"])
    store = TrialStore(tmp_path)
    store.path(best).unlink()
    with pytest.raises(UserError, match="ahead of its trial's record; remove it to repeat the trial"):
        Search(todo, tmp_path)()
    shutil.rmtree(store.run(best, 0))
    assert results(todo, tmp_path) == before


def test_optuna_learns_from_the_trials_before():
    """A maximum of a known function: TPE's later proposals are nearer to it than random ones."""
    pytest.importorskip("optuna")
    space = {"algorithm.lr": Range(0.001, 10.0, "log"), "algorithm.gamma": Choice((0.1, 0.5))}

    def value(settings: dict) -> float | None:
        far = abs(torch.tensor(settings["algorithm.lr"]).log10().item() + 1)  # best at 0.1
        return None if settings["algorithm.lr"] > 3 else -far - settings["algorithm.gamma"]

    def distances(sampler: str) -> list[float]:
        done: list[Trial] = []
        for number in range(40):
            settings = propose(sampler, space, 0, number, done)
            assert settings == propose(sampler, space, 0, number, done), "the same again after a kill"
            each = trial(number, value(settings))
            each.settings = settings
            done.append(each)
        return [-(value(each.settings) or -3.0) for each in done[20:]]

    assert sum(distances("optuna")) < 0.75 * sum(distances("random"))


def test_the_command_writes_settings_that_are_ready_to_run(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    text = (
        configs.dump(config(rounds=4))
        + '[tune]\ntrials = 3\nsampler = "random"\nalgorithms = ["fedxl2", "local_pair"]\n'
    )
    Path("mine.toml").write_text(text + "[tune.space.algorithm]\nlr = {log = [0.01, 1.0]}\n")
    done = CliRunner().invoke(app, ["tune", "mine.toml"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    folder = Path("tune/mine")
    content = json.loads((folder / "results.json").read_text())
    winner = max(content["best"], key=lambda name: content["best"][name]["value"])
    best = configs.read(folder / "best.toml")
    assert best.algorithm == {"name": winner, "lr": content["best"][winner]["settings"]["algorithm.lr"]}
    assert best.run == config(rounds=4).run
    assert configs.read(Path("mine.toml")) == config(rounds=4), "other commands leave [tune] alone"
    assert {path.name for path in folder.glob("best-*.toml")} == {"best-fedxl2.toml", "best-local_pair.toml"}
    assert (folder / "tune.png").read_bytes().startswith(b"\x89PNG")
    value = f"{content['best'][winner]['value']:.4f}"
    assert value in done.stdout
    assert value in (folder / "tune.md").read_text()
    assert configs.execute(best, hooks=QUIET).metrics["test"]
    again = CliRunner().invoke(app, ["tune", "mine.toml"], catch_exceptions=False)
    assert again.stdout == done.stdout, "nothing is left to do"


def test_tuning_needs_validation_data(tmp_path):
    blind = Config(**{**config().tables(), "data": {"name": "tests.experiments.test_tune:without_validation"}})
    todo = plan(blind, TuneSettings(trials=1), {})
    with pytest.raises(UserError, match="tuning needs validation data"):
        Search(todo, tmp_path)()


def without_validation() -> Splits:
    return data()._replace(validation=None)
