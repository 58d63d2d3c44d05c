"""Which round is chosen where evaluations tie, and what a run says if validation data are too few to tell."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedxl import FeDXL2, Result, auroc, fit
from fedxl.evaluation.scores import Scores
from fedxl.training.choice import best_row, better, how_sure
from fedxl.training.run_folder import read_run
from fedxl.training.settings import Hooks
from tests.conftest import Clients, make_clients


def row(round: int, value: float | None, risk: float | None = 0.5, **more: Any) -> dict[str, Any]:
    return {"round": round, "validation": {"auroc": value, "risk": risk}, **more}


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([row(2, 0.8, 0.1), row(4, 0.9, 0.9)], 4),
        ([row(2, 0.9, 0.3), row(4, 0.9, 0.2), row(6, 0.9, 0.4)], 4),
        ([row(2, 0.9), row(4, 0.9), row(6, 0.8, 0.1)], 4),
        ([row(2, 0.9, None), row(4, 0.9, None)], 4),
        ([row(2, None), row(4, 0.6), {"round": 6}], 4),
        ([row(2, None), {"round": 4}], None),
        ([], None),
    ],
    ids=["the metric", "the smaller risk", "the later round", "no risk", "no reply", "no metric", "no row"],
)
def test_ties_go_to_the_smaller_risk_and_then_to_the_later_round(rows, chosen):
    found = best_row(rows, "auroc")
    assert (found["round"] if found else None) == chosen


def test_less_may_be_better():
    assert best_row([row(2, 0.5, 0.3), row(4, 0.9, 0.4)], "-risk")["round"] == 2


def test_evaluations_by_other_sites_are_compared_where_both_took_part():
    """A better mean alone is no better model: the sites behind it are others."""

    def by(round: int, value: float, **sites: float) -> dict[str, Any]:
        each = {name: {"auroc": one, "positives": 2, "negatives": 3} for name, one in sites.items()}
        away = {name: "it is away" for name in "abc" if name not in sites}
        return row(round, value, validation_from=" ".join(sites), validation_by_site=each | away)

    both, first = by(2, 0.7, a=0.8, b=0.6), by(4, 0.75, a=0.75)
    assert not better(first, both, "auroc")
    assert better(both, first, "auroc")
    assert better(by(4, 0.6, b=0.65), both, "auroc")
    assert not better(by(6, 1.0, b=1.0), first, "auroc"), "nothing in common"


def separated(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = make_clients([(count, count)], seed=seed)[0]
    return x + 8 * y[:, None], y


def run(clients: Clients, validation: Any, out: Path | None = None, **settings: Any) -> Result:
    torch.manual_seed(0)
    options = {"rounds": 6, "local_steps": 2, "batch_size": 4, "eval_every": 1, "executor": "loop", **settings}
    lr, say = options.pop("lr", 0.05), options.pop("say", lambda line: None)
    sizes = {"device": "cpu", "dtype": "float64", "out": out, "hooks": Hooks(say=say)}
    algorithm = FeDXL2(auroc(scores="sigmoid"), lr=lr)
    return fit(nn.Linear(5, 1).double(), clients, algorithm, validation=validation, **options, **sizes)


def test_a_run_whose_ranking_is_perfect_takes_the_smallest_risk():
    """Once every pair is ranked rightly, AUROC says nothing more; the risk still does."""
    result = run([separated(12, 1), separated(9, 2)], separated(20, 3), rounds=10, lr=2.0)
    values = [record["validation"] for record in result.history]
    perfect = [number for number, one in enumerate(values, 1) if one["auroc"] == 1]
    assert len(perfect) > 1, "the run must tie"
    assert result.best_round == min(perfect, key=lambda number: values[number - 1]["risk"]) > perfect[0]
    assert result.metrics["validation"] == values[result.best_round - 1]


def test_a_run_that_stands_still_takes_its_last_round(tmp_path):
    result = run(make_clients([(12, 12)]), make_clients([(9, 9)], seed=1)[0], tmp_path, lr=1e-300)
    assert len({json.dumps(record["validation"]) for record in result.history}) == 1, "the run must tie"
    assert result.best_round == read_run(tmp_path).best_round == 6


def few(positives: int) -> tuple[torch.Tensor, torch.Tensor]:
    return make_clients([(positives, 200)], seed=5)[0]


def test_with_ten_positives_the_choice_is_said_to_be_uncertain(tmp_path):
    said: list[str] = []
    result = run(make_clients([(12, 30), (9, 20)]), few(10), tmp_path, say=said.append)
    (line,) = [line for line in said if line.startswith("validation data hold ")]
    assert line.startswith("validation data hold 10 examples of the smaller class: auroc is known to ± 0.")
    assert line.endswith("of 6 evaluations lie that close to the best, so they cannot be told apart")
    told = read_run(tmp_path).done["choice"]
    values = [record["validation"]["auroc"] for record in result.history]
    near = sum(value >= max(values) - told["error"] for value in values)
    assert (told["metric"], told["near"], told["evaluations"], told["fewest"]) == ("auroc", near, 6, 10)
    assert near > 1


def test_with_many_positives_nothing_is_said_of_it(tmp_path):
    said: list[str] = []
    run(make_clients([(12, 30), (9, 20)]), few(30), tmp_path, say=said.append)
    assert not [line for line in said if "validation data" in line]
    assert read_run(tmp_path).done["choice"]["fewest"] == 30, "it is on record all the same"


def test_the_error_is_that_of_hanley_and_mcneil():
    """By hand: (0.8 * 0.2 + 9 (2/3 - 0.64) + 9 (1.28 / 1.8 - 0.64)) / 100 for ten examples of each class."""
    found = Scores.of(range(20), [0, 1] * 10)
    choice = how_sure("auroc", [0.69, 0.7, 0.8, 0.75], 0.8, found)
    assert choice.error == pytest.approx(math.sqrt(0.0104))
    assert (choice.near, choice.evaluations, choice.fewest) == (3, 4, 10)
    assert how_sure("risk", [-3.0, -2.0], -2.0, found) is None, "of what is no area nothing is known"
    assert how_sure("auroc", [0.7, 0.8], 0.8, Scores.of(range(5), [1] * 5)) is None
