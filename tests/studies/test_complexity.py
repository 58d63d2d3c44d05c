"""The measured sample complexities, in small: what is chosen, and what is reported."""

from __future__ import annotations

import math

import pytest

from fedxl.algorithms import build
from studies.harness import Harness
from studies.theory import complexity
from studies.theory.complexity import METHODS, PUSH, Curve, Setting, curves, late, samples_for
from studies.theory.rates import Line
from studies.theory.testbed import linear


def test_all_methods_have_as_many_settings_and_read_as_much_in_a_round():
    assert {len(method.settings) for method in METHODS.values()} == {8}
    for method in METHODS.values():
        for setting in method.settings.values():
            assert setting.local_steps * (complexity.BATCH + setting.batch2) == complexity.SAMPLES


def test_a_run_that_diverged_is_never_chosen():
    assert late([1.0, math.nan, math.nan], 2) == math.inf
    assert late([1.0, 1e200, 1e308], 2) > 1e100
    assert samples_for(16) == [1024, 2048, 4096]


def test_the_best_setting_for_each_number_of_samples_is_reported(tmp_path, monkeypatch):
    """A rate that hardly moves the model, one that fits, and one that throws it far away."""
    settings = {f"lr {lr:g}": Setting(build("sox", PUSH, lr=lr, beta=0.3, gamma=0.3)) for lr in (1e-6, 0.05, 30.0)}
    method = complexity.Method(PUSH, 1, "n eps^-4", settings)
    monkeypatch.setattr(complexity, "METHODS", {"SOX": method})
    with Harness(tmp_path / "complexity.jsonl", complexity.measure, say=lambda line: None) as do:
        found, rows = curves(do, rounds=4)
    assert found["SOX"].chosen == ("lr 0.05",)
    bed = linear(PUSH, 1)
    start = math.sqrt(bed.squared_norm(complexity.origin(bed)))
    runs = found["SOX"].line.runs
    assert all(value < 0.5 * start for run in runs for value in run)
    assert runs[0] != runs[1]

    shown = {"SOX": Curve(Line((1024, 2048), ((0.4, 0.2), (0.2, 0.1))), ("a", "b"))}
    assert shown["SOX"].line.slope() == (pytest.approx(-1), 0)
    text = complexity.markdown(shown, rows)
    assert "| SOX | 0.3000 ± 0.1000 | 0.1500 ± 0.0500 | -1.00 ± 0.00 | n eps^-4 |" in text
    complexity.draw(tmp_path / "complexity.png", shown)
    assert (tmp_path / "complexity.png").read_bytes().startswith(b"\x89PNG")
