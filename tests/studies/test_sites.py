"""Real hospitals by the command, on small files in the published formats; and the intervals of a C-index."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedxl.censored import harrell as concordance
from fedxl.data.inputs import from_arrays
from fedxl.data.sets import hospitals
from fedxl.metrics import auroc
from fedxl.risks import auroc as auroc_risk
from studies import sites
from studies.harness import Harness, group, read
from studies.proximal import FedProx
from tests.algorithms.rounds import after_rounds
from tests.data.test_hospitals import write_brca, write_heart
from tests.studies.running import command, made

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def quick(tmp_path, monkeypatch) -> Path:
    """The folder of small files, which pass for the published ones."""
    for name in ("BRCA_TABLE", "BRCA_SPLIT"):
        monkeypatch.setattr(hospitals, name, getattr(hospitals, name)._replace(sha256=""))
    of_any = {name: file._replace(sha256="") for name, file in hospitals.HEART_FILES.items()}
    monkeypatch.setattr(hospitals, "HEART_FILES", of_any)
    two = {name: cell._replace(rates=(0.03, 0.1)) for name, cell in sites.CELLS.items()}
    monkeypatch.setattr(sites, "CELLS", two)
    write_brca(tmp_path)
    write_heart(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "seeds"), [("tcga_brca_sites", 2), ("heart", 1)])
def test_trials_choose_rates_and_all_patients_train(name, seeds, quick, monkeypatch, capsys):
    words = ("sites", "--root", str(quick), "--only", name, "--seeds", str(seeds), "--rounds", "1")
    code, text, err = command(monkeypatch, capsys, *words, "--out", str(quick / "out"))
    assert code == 0, err
    rows = read(quick / "out" / "sites.jsonl")
    labels = list(sites.methods(sites.CELLS[name]))
    runs = group(sites.runs_of(rows), "method")
    trials = group([row for row in rows if row.case.get("trial")], "method")
    assert list(runs) == list(trials) == labels
    for label in labels:
        assert len(runs[label]) == len(trials[label]) == 2 * seeds
        assert all(row.found["validation"] == {} for row in runs[label]), "nothing is held back"
        line = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
        means = {rate: np.mean([row.validation(sites.CELLS[name].metric) for row in own])
                 for rate, own in group(trials[label], "lr").items()}  # fmt: skip
        assert line.removesuffix(" |").endswith(f"{max(means, key=means.__getitem__):g}*")
    compared = [row for row in rows if "against" in row.case]
    assert [row.case["against"] for row in compared] == labels[1:]
    assert all(low <= high for low, high in (row.found["interval"] for row in compared))
    assert all(("accuracy" in row.found) == (name == "heart") for own in runs.values() for row in own)
    assert (quick / "out" / "sites.png").stat().st_size > 10_000
    code, again, err = command(monkeypatch, capsys, *words, "--out", str(quick / "out"))
    assert (code, again, err.count("\n")) == (0, text, 1)


@pytest.mark.parametrize("metric", ["cindex", "auroc"])
def test_an_interval_is_over_the_same_patients_for_every_run(metric, monkeypatch):
    """Against the metric of patients that are repeated as often as they are drawn."""
    monkeypatch.setattr(sites, "DRAWS", 20)
    rng, count = np.random.default_rng(3), 40
    events, times = (rng.random(count) < 0.4) * 1.0, rng.integers(1, 15, count) * 1.0
    runs = [{"scores": rng.integers(0, 9, count) * 1.0, "labels": events, "times": times} for _ in range(2)]
    drawn = sites.redraw(runs, metric)
    if metric == "auroc":
        whole = np.mean([auroc(run["scores"], events) for run in runs])
        assert abs(drawn.mean() - whole) < 0.05
        return
    same = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), 20)
    for weights, value in zip(same, drawn, strict=True):
        chosen = np.repeat(np.arange(count), weights)
        each = [concordance(run["scores"][chosen], events[chosen], times[chosen]) for run in runs]
        assert value == pytest.approx(np.mean(each), abs=1e-12)
    assert not len(sites.redraw([{**runs[0]}, {}], metric)), "a run without scores"


def test_a_rate_that_spoils_a_run_is_seen():
    def row(**found):
        return made({"method": "FeDXL", "lr": 0.3, "seed": len(found)}, **found)

    good, bad, gone = row(test={"cindex": 0.81}), row(test={"cindex": 0.69}), row(diverged="at once")
    line = sites.Line("FeDXL", {0.1: [good, good], 0.3: [good, bad], 1.0: [good, gone]}, 0.1, None)
    assert line.top("cindex") == 0.81
    told = [sites._by_rate(rows, "cindex", 0.81) for rows in line.by_rate.values()]
    assert told == ["0.8100 (0.8100)", "0.7500 (0.6900), 1 low", "1 diverged, 1 low"]
    assert np.isnan(sites.Line("FeDXL", {1.0: [gone]}, 1.0, None).top("cindex"))


def test_every_method_is_tuned_alike():
    for name, cell in sites.CELLS.items():
        for label, method in sites.methods(cell).items():
            config = sites.plan(name, label, 0.3, 1).config
            assert config.algorithm[method.tuned] == 0.3
            assert (config.run["rounds"], config.run["local_steps"]) == (sites.ROUNDS, sites.STEPS)
            assert (config.run["weighting"], config.run["eval_every"]) == ("samples", sites.ROUNDS)


def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys):
    for words, line in (
        (["--only", "hart"], "unknown data set 'hart'; did you mean 'heart'?"),
        (["--only", "heart", "--root", str(tmp_path)], "there is no processed.cleveland.data in"),
    ):
        code, _, err = command(monkeypatch, capsys, "sites", *words, "--out", str(tmp_path / "out"))
        assert (code, err.count("\n")) == (2, 1)
        assert line in err


def test_the_record_is_of_a_finished_study(tmp_path, monkeypatch, capsys):
    """The command repeats no run, and comes to the table of the documentation."""

    def none_is_left(self, todo, jobs):
        raise AssertionError(f"{len(todo)} runs have no row, among them {todo[0].case}")

    monkeypatch.setattr(Harness, "_outcomes", none_is_left)
    shutil.copy(RESULTS / "sites.jsonl", tmp_path)
    names = list(group(read(RESULTS / "sites.jsonl"), "data"))
    code, text, err = command(monkeypatch, capsys, "sites", "--only", ",".join(names), "--out", str(tmp_path))
    assert code == 0, err
    assert text.strip() == (RESULTS / "sites.md").read_text().strip()
    assert len(re.findall(r"0\.\d{4} ± 0\.\d{4}", text)) >= len(names) * 5


def test_fedprox_descends_its_own_objective_and_the_distance_from_the_round_s_start():
    """Against autograd of both: three steps of one client, each on all of its examples."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 2)), np.array([1, 0, 1, 1, 0, 0])
    model = nn.Linear(2, 1).double()
    data = from_arrays([(x, y)])
    found = after_rounds(FedProx(auroc_risk(), lr=0.5, mu=0.8), model, data, rounds=1, sizes=(3, 3, 3))
    mine = copy.deepcopy(model)
    for _ in range(3):
        h = mine(torch.from_numpy(x)).squeeze(-1)
        apart = sum(
            ((w - w0.detach()) ** 2).sum() for w, w0 in zip(mine.parameters(), model.parameters(), strict=True)
        )
        loss = functional.binary_cross_entropy_with_logits(h, torch.from_numpy(y).double()) + 0.8 / 2 * apart
        mine.zero_grad()
        loss.backward()
        with torch.no_grad():
            for w in mine.parameters():
                w -= 0.5 * w.grad
    torch.testing.assert_close(found["server.weights.params.weight"], mine.weight.detach(), rtol=0, atol=1e-12)
