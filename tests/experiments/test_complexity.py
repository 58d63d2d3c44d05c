"""The measured sample complexities, in small: what is chosen, what is reported, and the files."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from fedxl.experiments.theory import complexity, complexity_record
from fedxl.experiments.theory.complexity import METHODS, PUSH, Setting, curve, late, samples_for
from fedxl.experiments.theory.testbed import linear

from fedxl.algorithms import SOX


def test_all_methods_have_as_many_settings_and_read_as_much_in_a_round():
    assert [method.name for method in METHODS] == ["BSGD", "SOX", "MSVR", "FeDXL1 (AUROC)", "FeDXL2"]
    for method in METHODS:
        assert len(method.settings) == len({setting.name for setting in method.settings}) == 8
        for setting in method.settings:
            assert setting.local_steps * (complexity.BATCH + setting.batch2) == complexity.SAMPLES
    assert all(setting.algorithm.gamma == setting.algorithm.beta == 1 for setting in METHODS[0].settings)
    assert all(setting.algorithm.corrects for setting in METHODS[2].settings)


def test_a_run_that_diverged_is_never_chosen():
    assert late([1.0, math.nan, math.nan], 2) == math.inf
    assert late([1.0, 1e200, 1e308], 2) > 1e100
    assert samples_for(16) == [1024, 2048, 4096]


def test_the_best_setting_for_each_number_of_samples_is_reported(tmp_path):
    """A rate that hardly moves the model, one that fits, and one that throws it far away."""
    rates = (1e-6, 0.05, 30.0)
    method = replace(
        METHODS[1], settings=tuple(Setting(f"lr {lr:g}", SOX(PUSH, lr=lr, beta=0.3, gamma=0.3)) for lr in rates)
    )
    found = curve(method, rounds=4, seeds=(0, 1))
    assert found.chosen == ("lr 0.05",)
    start = math.sqrt(linear(PUSH, 1).squared_norm(complexity._origin(linear(PUSH, 1))))
    assert all(value < 0.5 * start for run in found.line.runs for value in run)
    assert found.line.runs[0] != found.line.runs[1]

    found = replace(found, line=replace(found.line, x=(1024, 2048), runs=((0.4, 0.2), (0.2, 0.1))), chosen=("a", "b"))
    complexity_record.write([found], tmp_path, {"on": "a desk"})
    record = json.loads((tmp_path / "complexity.json").read_text())
    assert record["curves"][0]["slope"] == pytest.approx(-1)
    assert record["curves"][0]["mean"] == pytest.approx([0.3, 0.15])
    text = (tmp_path / "complexity.md").read_text()
    assert "| SOX | 0.3000 ± 0.1000 | 0.1500 ± 0.0500 | -1.00 ± 0.00 | n eps^-4 |" in text
    assert (tmp_path / "complexity.png").read_bytes().startswith(b"\x89PNG")
