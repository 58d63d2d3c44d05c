"""Sites that differ: every cell once, every method tuned alike, and a dash where a method cannot run."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedxl import UserError
from studies import heterogeneity, skew
from studies.harness import Harness, group, read, train
from studies.heterogeneity import CellResult, has_collapsed, message
from studies.paper.setup import Budget, HyperParameters, experiment, find_task
from studies.paper.study import Study, rates, refine
from studies.paper.tables import Lead
from studies.skew import METHODS, METRIC, by_alpha, change_budget, make_plan, with_network
from tests.studies.running import command, made

TINY = Budget(
    iterations=8, trial_iterations=8, rates=(0.1, 0.3), lams=(2.0,), local_steps=4, batch=4, evaluations=2,
    network={"name": "cnn"}, run=(("executor", "vmap"), ("weighting", "samples")),
)  # fmt: skip
FEDERATED = [column.label for column in skew.METHODS if not column.joint]


def study(folder: Path, said: list[str] | None = None) -> Study:
    say = (lambda line: None) if said is None else said.append
    do = Harness(folder / "runs.jsonl", partial(train), say=say)
    return Study([find_task("digits:clients=4", "data")], TINY, 2, do)


def test_every_cell_once_and_a_dash_where_nobody_has_both_classes(tmp_path):
    said: list[str] = []
    text = heterogeneity.run(study(tmp_path, said), make_plan("0.3,equal", "0,4"))
    assert "digits (clients=4), 4 one-class sites: 4 of 4 sites hold one class" in said
    rows = read(tmp_path / "heterogeneity.jsonl")
    results = heterogeneity.table(rows, study(tmp_path).do.arrays)
    assert [found.cell for found in results] == ["equal shards", "alpha 0.3", "4 one-class sites"], (
        "equal and 0 are one"
    )
    reason = "no client holds both sides of a pair, so there is nothing to train on; use fedxl2"
    without = dict.fromkeys(("Local Pair", "Local Pair, guarded", "Local Pair, held"), reason)
    assert [found.reasons for found in results] == [{}, {}, without]
    assert [found.one_class for found in results] == [[0, 0], results[1].one_class, [4, 4]]
    assert f"– Local Pair, digits (clients=4), 4 one-class sites: {reason}." in text
    for found in results:
        assert list(found.line.ours) == [name for name in FEDERATED if name not in found.reasons]
        means = {n: np.mean(values) for n, values in found.line.ours.items() if not n.startswith("FeDXL")}
        assert found.best == max(means, key=means.__getitem__)
        assert found.lead.mean == pytest.approx(np.mean(found.line.ours["FeDXL"]) - max(means.values()))
        low, high = found.lead.interval
        assert low < found.lead.mean < high
    trials = group([row for row in rows if row.case.get("trial")], "cell", "method")
    assert {tuple(row.case["lr"] for row in own) for own in trials.values()} == {(0.1, 0.3)}, "the same rates for all"
    assert (tmp_path / "heterogeneity.png").stat().st_size > 10_000
    assert "All data in one place (Centralized), digits (clients=4): 0." in text

    before = read(tmp_path / "runs.jsonl")
    assert len(before) == (3 * 8 - 3 + 1) * (2 + 2), "each method in each cell but three, and Centralized once"
    assert heterogeneity.run(study(tmp_path), make_plan("0.3,equal", "0,4")) == text
    heterogeneity.run(study(tmp_path), make_plan("0.3,1", "0", only="fedxl"))
    after = read(tmp_path / "runs.jsonl")
    assert after[: len(before)] == before
    assert len(after) == len(before) + 4, "only the cell that is new"


def test_cells_and_methods_are_what_was_asked_for():
    found = make_plan("0.1, equal,1,0.3", "12,0,4")
    assert list(found.alphas) == ["equal", "1", "0.3", "0.1"], "the more skew, the further right"
    assert list(found.one_class) == ["0", "4", "12"]
    assert len(found.cells) == 6
    assert found.alphas["equal"] == found.one_class["0"] == by_alpha(math.inf)
    assert [method.label for method in found.federated] == FEDERATED
    assert [method.label for method in make_plan("1", "", "fedxl,local-pair").methods] == ["Local Pair", "FeDXL"]
    data = found.one_class["4"].of(find_task("cifar10", "")).data
    assert (data["partition"], data["one_class"], data["crop"]) == ("one_class", 4, 4)
    with pytest.raises(UserError, match="alphas must be positive"):
        make_plan("0", "")


def test_all_methods_try_as_many_rates_and_lam_is_fixed():
    for budget in skew.BUDGETS.values():
        spent = change_budget(budget, "", 2.0, "samples")
        tried = [rates(spent, method) + refine(spent, method, rates(spent, method)[1]) for method in METHODS]
        assert {len(set(choices)) for choices in tried} == {len(budget.rates)}
        assert {choice.lam for choices in tried for choice in choices} == {2.0, None}
    other = change_budget(skew.BUDGETS["short"], "0.3,0.03", 1.0, "clients")
    assert (other.rates, other.lams, dict(other.run)["weighting"]) == ((0.03, 0.3), (1.0,), "clients")


def test_networks_have_group_norm_unless_said_otherwise():
    def model(name: str, options: dict[str, object], budget: str = "short") -> dict[str, object]:
        task = with_network(find_task(name, ""), options)
        return experiment(task, METHODS[1], skew.BUDGETS[budget], HyperParameters(0.1), 0, 64).model

    assert model("cifar10", {}) == {"name": "resnet18", "stem": "7x7", "norm": "group"}
    assert model("cifar10", {"norm": "batch"}) == {"name": "resnet18", "stem": "7x7", "norm": "batch"}
    assert model("digits:clients=4", {}, "quick") == {"name": "mlp", "hidden": [64]}, "digits keep their network"


def test_a_run_has_collapsed_if_it_learned_nothing_or_says_so():
    def run(value: float | None, **more: object):
        return [made({"lr": 0.1}, validation={METRIC: value}, **more)]

    assert [has_collapsed(run(value)) for value in (0.56, 0.54, None)] == [False, True, True]
    assert has_collapsed(run(0.7, collapsed=3))
    assert has_collapsed([made({}, diverged="at round 3")])


@pytest.mark.parametrize(
    ("leads", "said"),
    [
        ([(0.1, 0.2), (-0.1, 0.1), (-0.2, -0.1)], "above in 1, level in 1, below in 1 of 3 cells"),
        ([(0.1, 0.2), None], "above in 1, level in 1 of 2 cells"),
        ([(-0.2, -0.1)], "below in 1 of 1 cell"),
    ],
)
def test_the_message_counts_cells_beyond_the_interval(leads, said):
    cells = [CellResult("", "", [], None, {}, {}, "Local Pair", Lead(0.0, interval)) for interval in leads]
    assert message(cells) == f"FeDXL against the best federated baseline: {said}"
    assert message([cell._replace(lead=None) for cell in cells]) == "Test partial AUC against skew"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--alphas", "0.1,x"], "alphas must be numbers, separated by commas; 'x' is none"),
        (["--one-class", "2.5"], "one-class must be whole numbers of sites, got 2.5"),
        (["--one-class", "3"], "one_class must be an even number from 0 to the number of clients, 4, got 3"),
        (["--alphas", "", "--one-class", ""], "there are no cells"),
        (["--only", "centralized"], "only must name a federated method"),
        (["--rates", "0"], "rates must be positive, got 0"),
        (["--lam", "0"], "lam must be positive, got 0"),
        (["--weighting", "sites"], "unknown weighting 'sites'"),
        (["--budget", "fast"], "unknown budget 'fast'"),
        (["--model", "norm=group"], "unknown setting 'model.norm'"),
    ],
)
def test_mistakes_are_one_line(options, line, tmp_path, monkeypatch, capsys):
    words = ["heterogeneity", "--data", "digits:clients=4", "--out", str(tmp_path), *options]
    code, _, err = command(monkeypatch, capsys, *words)
    assert code == 2
    assert line in err.splitlines()[-1]
    assert not read(tmp_path / "runs.jsonl"), "before the first run"
