"""`fedxl paper heterogeneity`: every cell once, tuned alike, a dash where a method cannot run, nothing run twice."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fedxl.experiments.paper import heterogeneity, skew
from fedxl.experiments.paper.heterogeneity import CellResult, Outcome, Results, collapsed, message
from fedxl.experiments.paper.runs import Runner, RunRecord, RunStore
from fedxl.experiments.paper.setup import Budget, HyperParameters, experiment, task
from fedxl.experiments.paper.skew import METHODS, by_alpha, changed, plan, with_network
from fedxl.experiments.paper.study import Study
from fedxl.experiments.paper.tables import Entry, Lead
from fedxl.experiments.paper.tuning import SEED, Trial, TuningResult, TuningSearch

from fedxl import UserError
from tests.cli.test_errors import command
from tests.conftest import PATIENCE

TINY = Budget(
    iterations=8, trial_iterations=8, rates=(0.1, 0.3), lams=(2.0,), local_steps=4, batch=4, evaluations=2,
    network={"name": "cnn"}, run=(("executor", "vmap"), ("weighting", "samples")),
)  # fmt: skip
FEDERATED = ["Local SGD", "CODASCA", "Local Pair", "Local Pair, guarded", "FeDXL, paper", "FeDXL, balanced", "FeDXL"]


def study(folder: Path, said: list[str] | None = None) -> Study:
    runner = Runner(RunStore(folder / "runs"), 1, "cpu")
    said = [] if said is None else said
    return Study([task("digits:clients=4", "data")], TINY, 2, runner, folder, said.append)


def records(folder: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "runs").glob("*.json")}


def test_every_cell_once_and_a_dash_where_nobody_has_both_classes(tmp_path):
    said: list[str] = []
    text = heterogeneity.run(study(tmp_path, said), plan("0.3,equal", "0,4"))
    content = json.loads((tmp_path / "heterogeneity.json").read_text())
    rows = {row["cell"]: row for row in content["rows"]}
    assert list(rows) == ["equal shards", "alpha 0.3", "4 one-class sites"], "equal and 0 are one cell"
    assert rows["4 one-class sites"]["one_class_sites"] == [4, 4]
    assert rows["equal shards"]["one_class_sites"] == [0, 0]
    assert "digits (clients=4), 4 one-class sites: 4 of 4 sites hold one class" in said
    reason = "no client holds both sides of a pair, so there is nothing to train on; use fedxl2"
    without = dict.fromkeys(("Local Pair", "Local Pair, guarded"), reason)
    assert [row["unfit"] for row in content["rows"]] == [{}, {}, without]
    assert f"– Local Pair, digits (clients=4), 4 one-class sites: {reason}." in text
    for row in content["rows"]:
        assert list(row["ours"]) == [name for name in FEDERATED if name not in row["unfit"]]
        for found in row["methods"].values():
            assert [trial["lr"] for trial in found["trials"]] == [0.1, 0.3], "the same rates for all"
            best = max(found["trials"], key=lambda trial: trial["value"])
            assert found["chosen"] == {name: best[name] for name in ("lr", "lam")}
            assert [trial["collapsed"] for trial in found["trials"]] == [t["value"] < 0.55 for t in found["trials"]]
            for run in found["runs"]:
                assert run["experiment"]["data"].items() >= row["settings"].items()
                assert run["experiment"]["run"]["weighting"] == "samples"
                assert run["experiment"]["model"]["name"] == "mlp", "digits keep their network"
                assert run["experiment"]["algorithm"]["lr"] == best["lr"]
            assert [run["experiment"]["run"]["seed"] for run in found["runs"]] == [0, 1]
        baselines = {name: np.mean(values) for name, values in row["ours"].items() if not name.startswith("FeDXL")}
        assert row["best_baseline"] == max(baselines, key=baselines.__getitem__)
        lead = np.mean(row["ours"]["FeDXL"]) - max(baselines.values())
        assert row["lead"]["mean"] == pytest.approx(lead)
        low, high = row["lead"]["interval"]
        assert low < lead < high
        line = next(line for line in text.splitlines() if f"| {row['cell']} |" in line)
        assert line.count("–") == len(row["unfit"])
        assert f"{lead:+.4f} ({low:+.4f} to {high:+.4f}), {row['best_baseline']} |" in line
    (reference,) = content["reference"]
    assert reference["method"] == "Centralized"
    assert reference["runs"][0]["experiment"]["data"]["partition"] == "equal"
    assert (tmp_path / "heterogeneity.md").read_text() == text
    assert (tmp_path / "heterogeneity.png").stat().st_size > 10_000
    assert SEED > 1, "tuned with a seed that results are not of"

    before = records(tmp_path)
    assert len(before) == (3 * 7 - 2 + 1) * (2 + 2), "each method in each cell but two, and Centralized once"
    assert heterogeneity.run(study(tmp_path), plan("0.3,equal", "0,4")) == text
    assert records(tmp_path) == before
    heterogeneity.run(study(tmp_path), plan("0.3,1", "0", only="fedxl"))
    after = records(tmp_path)
    assert len(after) == len(before) + 4, "only the cell that is new"
    assert {name: after[name] for name in before} == before


def test_cells_and_methods_are_what_was_asked_for():
    found = plan("0.1, equal,1,0.3", "12,0,4")
    assert list(found.alphas) == ["equal", "1", "0.3", "0.1"], "the more skew, the further right"
    assert list(found.one_class) == ["0", "4", "12"]
    assert len(found.cells) == 6
    assert found.alphas["equal"] == found.one_class["0"]
    assert [method.label for method in found.federated] == FEDERATED
    assert [method.label for method in plan("1", "", "fedxl,local-pair").methods] == ["Local Pair", "FeDXL"]
    data = found.one_class["4"].of(task("cifar10", "")).data
    assert (data["partition"], data["one_class"], data["crop"]) == ("one_class", 4, 4)


def test_all_methods_try_as_many_rates_and_lam_is_fixed():
    for budget in skew.BUDGETS.values():
        search = TuningSearch(changed(budget, "", 2.0, "samples"), None, "", {})
        tried = [search.rates(method) + search.refine(method, search.rates(method)[1]) for method in METHODS]
        assert {len(set(choices)) for choices in tried} == {len(budget.rates)}
        assert {choice.lam for choices in tried for choice in choices} == {2.0, None}
    other = changed(skew.BUDGETS["short"], "0.3,0.03", 1.0, "clients")
    assert (other.rates, other.lams, dict(other.run)["weighting"]) == ((0.03, 0.3), (1.0,), "clients")


def test_networks_have_group_norm_unless_said_otherwise():
    def model(name: str, options: dict[str, object]) -> dict[str, object]:
        run = with_network(task(name, ""), options)
        return experiment(run, METHODS[1], skew.BUDGETS["short"], HyperParameters(0.1), 0, 64).model

    assert model("cifar10", {}) == {"name": "resnet18", "stem": "7x7", "norm": "group"}
    assert model("cifar10", {"norm": "batch"}) == {"name": "resnet18", "stem": "7x7", "norm": "batch"}
    assert model("digits", {}) == {"name": "mlp", "hidden": [64]}


def test_a_trial_has_collapsed_if_it_learned_nothing_or_says_so():
    rate = HyperParameters(0.1)
    assert [collapsed(Trial(rate, value)) for value in (0.56, 0.54, float("nan"), float("-inf"))] == [
        False, True, True, True,
    ]  # fmt: skip
    assert collapsed(Trial(rate, 0.7, collapsed=True))
    entry = Entry(TuningResult(rate, [Trial(rate, 0.5), Trial(rate, 0.6), Trial(rate, 0.4)]), [])
    assert Outcome(entry).collapsed == 2
    runs = [RunRecord("", {"validation": {"pauc@0.3": value}}) for value in (0.9, 0.5)]
    outcome = Outcome(entry._replace(records=[*runs, RunRecord("", {"diverged": "at round 3"})]))
    assert outcome.collapsed_seeds == 2
    assert heterogeneity._rate(TINY, outcome) == "0.1* (2 collapsed; 2 of 3 seeds)"
    assert RunRecord("key", {"collapsed": "all scores are equal"}).collapsed
    assert RunRecord("key", {"diverged": "at round 3"}).collapsed
    assert not RunRecord("key", {"validation": {}}).collapsed


def test_rates_that_all_diverged_are_a_dash(tmp_path, monkeypatch):
    def diverged(self, pairs, choices):
        return {name: [Trial(choice, float("-inf")) for choice in found] for name, found in choices.items()}

    monkeypatch.setattr(TuningSearch, "trials", diverged)
    outcomes = heterogeneity._outcomes(study(tmp_path), [(task("digits", ""), METHODS[1])])
    assert outcomes == {("digits", "Local SGD"): Outcome(None, "every learning rate that was tried diverged")}


@pytest.mark.parametrize(
    ("leads", "said"),
    [
        ([(0.1, 0.2), (-0.1, 0.1), (-0.2, -0.1)], "above in 1, level in 1, below in 1 of 3 cells"),
        ([(0.1, 0.2), None], "above in 1, level in 1 of 2 cells"),
        ([(-0.2, -0.1)], "below in 1 of 1 cell"),
    ],
)
def test_the_message_counts_cells_beyond_the_interval(leads, said):
    cells = [CellResult(None, by_alpha(1), [], {}, None, "Local Pair", Lead(0.0, interval)) for interval in leads]
    assert message(Results(cells, {})) == f"FeDXL against the best federated baseline: {said}"
    assert message(Results([cell._replace(lead=None) for cell in cells], {})) == "Test partial AUC against skew"


COMMAND = [
    "paper", "heterogeneity", "--data", "digits:clients=4", "--alphas", "equal", "--one-class", "2", "--seeds", "1",
    "--iterations", "16", "--rates", "0.3", "--only", "local-pair,fedxl", "--device", "cpu",
]  # fmt: skip


def test_the_command_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """A real process: two cells, two methods. The same command with a third cell then does only what is new."""
    line = [sys.executable, "-m", "fedxl", *COMMAND, "--out", str(tmp_path)]
    first = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "| digits (clients=4) | 2 one-class sites | 2 |" in first.stdout
    assert (first.stderr.count("trial "), len(records(tmp_path))) == (12, 16), "each trial with three seeds"
    code, out, err = command(monkeypatch, capsys, *COMMAND, "--out", str(tmp_path), "--alphas", "1,equal")
    assert (code, err.count("trial ")) == (0, 6)
    assert "| digits (clients=4) | alpha 1 |" in out
    assert len(records(tmp_path)) == 24


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--alphas", "0.1,x"], "alphas must be numbers, separated by commas; 'x' is none"),
        (["--alphas", "-1"], "alphas must be positive numbers or equal, got -1"),
        (["--one-class", "2.5"], "one-class must be whole numbers of sites, got 2.5"),
        (["--one-class", "3"], "one_class must be an even number from 0 to the number of clients, 4, got 3"),
        (["--one-class", "6"], "one_class must be an even number from 0 to the number of clients, 4, got 6"),
        (["--alphas", "", "--one-class", ""], "there are no cells"),
        (["--only", "fedxk"], "unknown method 'fedxk'; did you mean 'fedxl'?"),
        (["--only", "centralized"], "only must name a federated method"),
        (["--rates", "0"], "rates must be positive, got 0"),
        (["--lam", "0"], "lam must be positive, got 0"),
        (["--weighting", "sites"], "unknown weighting 'sites'"),
        (["--budget", "fast"], "unknown budget 'fast'"),
        (["--model", "norm=group"], "unknown setting 'model.norm'"),
    ],
)
def test_mistakes_are_one_line(options, line, tmp_path, monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, *COMMAND, "--out", str(tmp_path), *options)
    assert code == 2
    assert line in err.splitlines()[-1]
    assert not records(tmp_path), "before the first run"


def test_an_infinite_alpha_is_equal_shards():
    assert by_alpha(math.inf).settings == (("partition", "equal"),)
    with pytest.raises(UserError, match="alphas must be positive"):
        plan("0", "")


def test_the_budget_of_digits_keeps_their_network():
    """A task that names options or a cell is still the digits."""
    quick = skew.BUDGETS["quick"]
    for name in ("digits", "digits:clients=4"):
        assert experiment(task(name, ""), METHODS[1], quick, HyperParameters(0.1), 0, 8).model["name"] == "mlp"
    assert experiment(task("cifar10", ""), METHODS[1], quick, HyperParameters(0.1), 0, 8).model["name"] == "cnn"
