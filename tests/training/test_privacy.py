"""What a private run has spent, against counts of all orders and against the exact curve of Gaussian mechanisms."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize, special
from torch import nn

from fedxl import UserError, auroc, fit, from_frame, partial_auc
from fedxl.algorithms import FeDXL2, build
from fedxl.algorithms.pool import thin
from fedxl.algorithms.private import ByExample
from fedxl.config.experiment import Config, simulate
from fedxl.data.inputs import from_arrays
from fedxl.data.participation import Plan
from fedxl.data.tables.prepare import Number, Preparation
from fedxl.engine.drawing import Drawing, Schedule
from fedxl.prediction.export import export
from fedxl.reporting import document, runs
from fedxl.training.privacy import Ledger, Releases, epsilon, most_squared, most_uploaded, promise
from fedxl.training.result import Result
from fedxl.training.run_folder import Member, read_run
from fedxl.training.settings import Hooks, Settings
from tests.conftest import RAGGED, make_clients

PRIVATE = {"level": "free", "pool_u": "server", "dp_clip": 0.1, "dp_noise": 4.0, "dp_score_noise": 2.0}


def exact_epsilon(squared_mu: float, delta: float) -> float:
    """Balle, Wang. Improving the Gaussian Mechanism for Differential Privacy. ICML 2018, theorem 8.

    delta(epsilon) = Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu) of a Gaussian mechanism
    with sensitivity mu and noise 1. Any number of them, chosen one after another, are one with the sum of squared mu.
    """
    mu = math.sqrt(squared_mu)

    def excess(epsilon: float) -> float:
        second = math.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu))
        return float(special.ndtr(mu / 2 - epsilon / mu) - second) - delta

    return 0.0 if excess(0.0) <= 0 else float(optimize.brentq(excess, 0.0, squared_mu + 40 * mu + 40, xtol=1e-12))


@pytest.mark.parametrize("blanks", [1, 2])
@pytest.mark.parametrize(
    ("gradients", "scores", "noise", "score_noise", "delta"),
    [
        (1, 0, 1.0, 1.0, 1e-5),
        (0, 1, 1.0, 0.5, 1e-5),
        (100, 40, 20.0, 6.0, 1e-6),
        (427, 440, 30.0, 10.0, 1e-3),
        (2500, 1, 10.0, 2.0, 1e-5),
        (10, 3000, 1.5, 4.0, 1e-9),
    ],
)
def test_the_accountants_epsilon_is_that_of_one_gaussian_mechanism(
    gradients, scores, noise, score_noise, delta, blanks
):
    settings = ByExample(1.0, noise, score_noise, delta)
    found = epsilon(Releases(gradients, scores), settings, blanks)
    exact = exact_epsilon(blanks**2 * (gradients / noise**2 + scores * (0.5 / score_noise) ** 2), delta)
    assert found == pytest.approx(exact, rel=1e-3)
    assert found >= exact * (1 - 1e-6), "and never less"


def test_nothing_released_costs_nothing_and_no_noise_promises_nothing():
    settings = ByExample(1.0, 1e-9, 1.0, 1e-5)
    assert epsilon(Releases(0, 0), settings) == 0
    assert epsilon(Releases(1, 0), settings) == math.inf
    assert epsilon(Releases(1, 0), ByExample(1.0, 1e-200, 1.0, 1e-5)) == math.inf
    assert epsilon(Releases(1, 1), ByExample(1.0, 1e200, 1e200, 1e-5)) == 0


def test_an_example_counts_as_often_as_any_order_lets_it():
    """All ways to place one example in each epoch, for small sizes."""
    rng = np.random.default_rng(0)
    for count, size, begin, steps in rng.integers((1, 1, 0, 1), (7, 7, 4, 5), (150, 4)).tolist():
        end = begin + steps
        epochs = range(begin * size // count, (end * size - 1) // count + 1)
        if len(epochs) > 6:
            continue
        places = [
            sorted({p // size for p in range(e * count, (e + 1) * count) if begin <= p // size < end}) for e in epochs
        ]
        most = max(sum(way.count(step) ** 2 for step in set(way)) for way in itertools.product(*places))
        assert most_squared(count, size, begin, end) == most, (count, size, begin, end)


@pytest.mark.parametrize(
    ("count", "total", "kept", "rounds"), [(5, 12, 3, 4), (30, 12, 5, 9), (3, 8, 8, 2), (7, 10, 1, 6)]
)
def test_scores_leave_as_often_as_epochs_have_an_uploaded_place(count, total, kept, rounds):
    read = torch.arange(total * rounds).reshape(rounds, total, 1)
    uploaded = torch.stack([thin(one, kept) for one in read])
    assert most_uploaded(count, total, kept, rounds) == len(set((uploaded // count).flatten().tolist()))


def test_no_client_reads_an_example_more_often_than_is_accounted_for():
    """What the engine draws, counted example by example."""
    algorithm = build("fedxl2", partial_auc(scores="sigmoid"), **PRIVATE)
    steps, rounds, reading = 3, 5, algorithm.reading(4, 5)
    drawing = Drawing(from_arrays(make_clients(RAGGED)), reading, Schedule(steps, 4, 5, 11))
    tight = 0
    for client, held in enumerate(RAGGED):
        visits = [drawing.draw(client, visit, visit, None).examples for visit in range(rounds + 1)]
        for side, count in enumerate(held):
            if not count:
                continue
            part = slice(0, 4) if side == 0 else slice(4, 9)
            size = part.stop - part.start
            read = np.concatenate([visit[:, part] for visit in visits])
            for example in np.unique(read):
                each = (read == example).sum(1)  # by step
                squared, most = int((each[steps:] ** 2).sum()), most_squared(count, size, steps, (rounds + 1) * steps)
                assert squared <= most
                assert each.sum() <= most_uploaded(count, steps * size, steps * size, rounds + 1)
                tight += squared == most
    assert tight, "the bound is reached"


def account(rounds: int, cohort: int = 0, **options) -> Ledger:
    run = Settings(rounds=rounds, local_steps=3, batch1=4, batch2=5, cohort=cohort, seed=2)
    algorithm = build("fedxl2", partial_auc(scores="sigmoid"), **{**PRIVATE, **options})
    members = [Member(str(number), *held) for number, held in enumerate([(8, 15), (0, 2), (16, 20), (8, 30)])]
    plan = Plan(num_clients=len(members), size=cohort, seed=run.seed)
    return Ledger(algorithm, algorithm.reading(4, 5), run, members, plan)


def test_the_client_with_the_fewest_examples_counts_most_unless_it_only_lends():
    trains, lends = account(6).after(6), account(6, one_class="lend").after(6)
    assert trains.gradients == most_squared(2, 5, 3, 21)
    assert lends.scores == -(-7 * 15 // 2), "its scores are uploaded all the same"
    assert lends.gradients == 0
    assert lends.epsilon < trains.epsilon < trains.epsilon_replaced
    few = account(6, one_class="lend", uploads=1).after(6)
    assert few.scores <= 7


def test_who_is_not_drawn_spends_nothing():
    ledger = account(8, cohort=1)
    warm_ups, visits = ledger._visits(8)
    assert warm_ups.sum() == 1
    assert visits.sum() == 8
    assert ledger.after(8).epsilon < account(8).after(8).epsilon
    assert ledger.after(3).epsilon <= ledger.after(8).epsilon


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_site_that_may_miss_the_warm_up_is_accounted_for_as_if_it_had(rounds):
    """What the engine draws in its first rounds, which are then all of training; over many seeds."""
    steps, members = 2, [Member("a", 6, 6)]
    algorithm = build("fedxl2", partial_auc(scores="sigmoid"), uploads=1, **PRIVATE)
    reading, run = algorithm.reading(4, 4), Settings(rounds=rounds, local_steps=steps, batch1=4, batch2=4)
    known = (algorithm, reading, run, members, Plan(num_clients=1, size=0, seed=0))
    there, missed = Ledger(*known).after(rounds), Ledger(*known, may_miss=True).after(rounds)
    found = 0
    for seed in range(200):
        drawing = Drawing(from_arrays(make_clients([(6, 6)])), reading, Schedule(steps, 4, 4, seed))
        read = np.concatenate([drawing.draw(0, visit + 1, visit, None).examples for visit in range(rounds)])
        found = max(found, *(int(((read == example).sum(1) ** 2).sum()) for example in range(12)))
    assert found == most_squared(6, 4, 0, rounds * steps), "reached, and never exceeded"
    assert found <= missed.gradients
    assert missed.epsilon >= there.epsilon
    if rounds == 1:
        assert (there.gradients, found) == (2, 4)
        assert missed.epsilon == pytest.approx(exact_epsilon(4 / 4.0**2 + 1 / (2 * 2.0) ** 2, 1e-5), rel=1e-3)


def network() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def train(out, say, **options):
    clients = [(x.float(), y) for x, y in make_clients([(8, 15), (16, 20)])]
    algorithm = build("fedxl2", partial_auc(scores="sigmoid"), **PRIVATE)
    hooks = {"hooks": Hooks(say=say)} if say else {}
    return fit(
        network(), clients, algorithm, rounds=4, local_steps=2, batch_size=(4, 5), eval_every=2, device="cpu",
        out=out, executor="loop", **hooks, **options,
    )  # fmt: skip


def test_a_run_says_and_records_what_it_spends(tmp_path):
    said: list[str] = []
    train(tmp_path / "run", said.append)
    promised = json.loads((tmp_path / "run" / "run.json").read_text())["privacy"]
    rows = [json.loads(line)["privacy"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epsilon"] for row in rows] == sorted(row["epsilon"] for row in rows)
    assert rows[0]["epsilon"] < rows[-1]["epsilon"] == promised["epsilon"]
    squared = promised["gradients"] / 4.0**2 + promised["scores"] / (2 * 2.0) ** 2
    assert promised["epsilon"] == pytest.approx(exact_epsilon(squared, 1e-5), rel=1e-3)
    shown = f"epsilon {promised['epsilon']:.3g} at delta 1e-05"
    about = [line for line in said if line.startswith("differential privacy of examples: ")]
    assert about == [
        f"differential privacy of examples: {shown} after all 4 rounds",
        f"differential privacy of examples: {shown}",
    ]


def test_reports_and_model_cards_say_what_was_spent(tmp_path):
    train(tmp_path / "private", lambda line: None, test=make_clients([(8, 9)], seed=3)[0])
    spent = json.loads((tmp_path / "private" / "run.json").read_text())["privacy"]["epsilon"]
    columns, rows = runs.table([tmp_path / "private"])
    assert dict(zip(columns, rows[0], strict=True))["epsilon"] == f"{spent:.3g} at delta 1e-05"
    told = document.build([read_run(tmp_path / "private")]).answer
    assert any(f"differential privacy: epsilon {spent:.3g} at delta 1e-05" in line for line in told)
    export(tmp_path / "private", tmp_path / "model", model=network(), onnx=False)
    assert f"epsilon {spent:.3g} at delta 1e-05 after all rounds" in (tmp_path / "model" / "README.md").read_text()


def test_a_resumed_run_ends_with_the_same_account(tmp_path):
    whole = train(tmp_path / "whole", None)
    stops = iter([False, True])
    hooks = Hooks(say=lambda line: None, should_stop=lambda: next(stops))
    assert train(tmp_path / "parts", None, hooks=hooks).interrupted
    again = train(tmp_path / "parts", lambda line: None, resume=True)
    assert again.history[-1]["privacy"] == whole.history[-1]["privacy"]
    for one, other in zip(again.weights.params.values(), whole.weights.params.values(), strict=True):
        assert torch.equal(one, other), "its noise is the same, too"


def test_without_dp_accounting_nothing_begins(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"pip install 'fedxl\[dp\]'"):
        train(tmp_path / "run", None)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.fixture
def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    columns = {"age": rng.normal(50, 10, 80), "dose": rng.normal(size=80), "sick": [0, 1] * 40, "site": ["a"] * 80}
    return pd.DataFrame(columns)


def of_table(rows: Any, out: Path | None = None, **options: Any) -> Result:
    """A private run on a table; it has two columns to learn from."""
    algorithm = build("fedxl2", partial_auc(scores="sigmoid"), **PRIVATE)
    splits, model = from_frame(rows, label="sick", site="site", **options), nn.Linear(2, 1)
    return fit(model, splits, algorithm, rounds=1, local_steps=1, batch_size=2, device="cpu", out=out)


def test_a_private_run_on_a_table_needs_a_preparation_of_other_rows(tmp_path, table):
    with pytest.raises(UserError, match=r"columns must not be scaled by their own means.*takes a preparation\.json"):
        of_table(table, tmp_path / "run")
    assert not (tmp_path / "run").exists(), "and nothing of the means is written"
    public = Preparation((Number("age", 50.0, 10.0), Number("dose", 0.0, 1.0)), None, "sick", "1", "0", "site")
    (tmp_path / "public.json").write_text(public.to_text())
    result = of_table(table, tmp_path / "run", preparation=str(tmp_path / "public.json"))
    assert result.preparation == public
    promised = json.loads((tmp_path / "run" / "run.json").read_text())["privacy"]
    assert promised["condition"] == "if no preparation of a table was made from private rows"
    assert promise(promised).endswith("at delta 1e-05 (if no preparation of a table was made from private rows)")


def test_a_config_of_a_private_run_on_a_table_needs_one_too(tmp_path, table):
    table.to_csv(tmp_path / "all.csv", index=False)
    data = {"name": "table", "path": str(tmp_path / "all.csv"), "label": "sick", "site": "site"}
    risk, algorithm = {"name": "pauc", "scores": "sigmoid"}, {"name": "fedxl2", **PRIVATE}
    with pytest.raises(UserError, match="columns must not be scaled by their own means"):
        simulate(Config(data=data, risk=risk, algorithm=algorithm, run={}), lambda line: None)


def test_other_runs_record_nothing_of_it(tmp_path):
    model = nn.Linear(5, 1)
    clients = [(x.float(), y) for x, y in make_clients([(8, 15), (16, 20)])]
    result = fit(
        model, clients, FeDXL2(auroc()), rounds=1, local_steps=1, batch_size=2, eval_every=1, out=tmp_path / "r"
    )
    assert "privacy" not in result.history[-1]
    assert "privacy" not in json.loads((tmp_path / "r" / "run.json").read_text())
