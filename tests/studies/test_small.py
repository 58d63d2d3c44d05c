"""The smaller studies by their commands, in seconds: what they write, and that they go on where they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedxl.data.sets.published import CHEST
from studies import coverage, demo, labels, ranking
from studies.harness import group, read
from tests.studies.running import command

QUICK = {
    "optimisers": ("--rounds", "1", "--seeds", "1"),
    "participation": ("--rounds", "1", "--seeds", "2"),
    "settings": ("--rounds", "1", "--algorithms", "fedxl2,local_sgd"),
    "ranking": ("--steps", "8", "--seeds", "1", "--data", "digits"),
    "coverage": ("--sets", "5", "--draws", "20", "--only", "delong", "--only", "ap of 3"),
}


@pytest.mark.parametrize("name", list(QUICK))
def test_a_study_is_recorded_and_not_run_twice(name, tmp_path, monkeypatch, capsys):
    code, text, err = command(monkeypatch, capsys, name, *QUICK[name], "--out", str(tmp_path))
    assert code == 0, err
    assert (tmp_path / f"{name}.md").read_text().strip() == text.strip()
    rows = read(tmp_path / f"{name}.jsonl")
    assert err.count("\n") >= len(rows), "a line per run"
    code, again, err = command(monkeypatch, capsys, name, *QUICK[name], "--out", str(tmp_path))
    assert (code, again, err.count("\n")) == (0, text, 1)
    assert read(tmp_path / f"{name}.jsonl") == rows


def test_every_variant_and_method_has_as_many_trials():
    assert {len(variant.tried) for variant in demo.VARIANTS.values()} == {3}
    assert {len(tried) for tried in ranking.RATES.values()} == {3}
    assert {len(tried) for tried in labels.RATES.values()} == {5}


def test_the_day_of_the_trace():
    awake = demo.day()["rounds"]
    hours = [sum(client in hour for hour in awake) for client in range(demo.CLIENTS)]
    assert hours == [demo.RARELY] * 4 + [demo.OFTEN] * 12
    assert min(map(len, awake)) >= demo.COHORT


def test_all_shapes_have_the_auroc_that_was_asked_for():
    for shape in coverage.SHAPES:
        scores, truth = coverage.everybody(shape, coverage.distance(shape, 0.85))
        assert coverage.metrics.auroc(scores, truth) == pytest.approx(0.85, abs=1e-3), shape


def chest(folder: Path) -> None:
    """Images whose first pixels are their labels."""
    rng, content = np.random.default_rng(0), {}
    for part, count in (("train", 240), ("val", 60), ("test", 80)):
        found = rng.integers(2, size=(count, len(CHEST)), dtype=np.uint8)
        images = rng.integers(100, size=(count, 28, 28), dtype=np.uint8)
        images[:, 0, : len(CHEST)] += 100 * found
        content |= {f"{part}_images": images, f"{part}_labels": found}
    np.savez_compressed(folder / "chestmnist.npz", **content)


def test_the_labels_of_one_run_and_of_runs_of_their_own(tmp_path, monkeypatch, capsys):
    chest(tmp_path)
    monkeypatch.setattr(labels, "RATES", {True: (10.0,), False: (1.0,)})
    words = ("labels", "--root", str(tmp_path), "--rounds", "1", "--seeds", "1", "--labels", "mass")
    code, text, err = command(monkeypatch, capsys, *words, "--out", str(tmp_path))
    assert code == 0, err
    rows = read(tmp_path / "labels.jsonl")
    trials = group([row for row in rows if row.case.get("trial")], "kind")
    assert [len(found) for found in trials.values()] == [1] * 4
    runs = [row for row in rows if not row.case.get("trial")]
    assert [row.case["kind"] for row in runs] == list(labels.KINDS)
    assert "| mass | " in text
    assert (tmp_path / "labels.png").stat().st_size > 10_000
    code, _, err = command(monkeypatch, capsys, "labels", "--labels", "mas", "--out", str(tmp_path))
    assert (code, "unknown label 'mas'; did you mean 'mass'?" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["ranking", "--data", "digit"], "unknown data set 'digit'; did you mean 'digits'?"),
        (["coverage", "--only", "delon"], "unknown kind 'delon'; did you mean 'delong'?"),
        (["coverage", "--sets", "0"], "sets and draws must be at least 1, got 0 and 500"),
        (["hostile", "--jobs", "0"], "jobs must be at least 1, got 0"),
    ],
)
def test_mistakes_are_one_line(words, line, tmp_path, monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, *words, "--out", str(tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert line in err
