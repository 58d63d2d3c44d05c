"""The benchmark command: one table, the same numbers as JSON, mistakes in one line."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import step as bench
from fedxl import UserError
from fedxl.models import cnn


def command(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["benchmarks.step", *arguments])
    with pytest.raises(SystemExit) as stop:
        bench.command()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


TINY = ["cnn", "--clients", "2", "--steps", "2", "--batch", "3", "--size", "8", "--rounds", "1", "--device", "cpu"]


def test_a_table_and_its_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    target = tmp_path / "times.json"
    arguments = [*TINY, "--set", "channels=4", "--precision", "fp32", "--json", str(target)]
    code, out, _ = command(monkeypatch, capsys, *arguments)
    assert code == 0, out
    record = json.loads(target.read_text())
    assert record["setting"]["clients"] == 2
    assert record["model"] == {"name": "cnn", "options": ["channels=4"]}
    assert {"device", "torch", "python"} <= record["machine"].keys()
    rows = {(row["algorithm"], row["executor"]): row for row in record["rows"]}
    assert rows.keys() == {
        ("one model", "joint batch"),
        *((algorithm, executor) for algorithm in ("fedxl2", "local_sgd") for executor in ("loop", "vmap")),
    }
    bound = rows["one model", "joint batch"]["ms_per_step"]
    for (algorithm, executor), row in rows.items():
        assert row["ms_per_step"] > 0
        assert row["images_per_second"] == pytest.approx(2 * 2 * 3 / row["ms_per_step"] * 1000)
        assert row["to_joint_batch"] == pytest.approx(row["ms_per_step"] / bound)
        if executor == "vmap":
            assert row["to_loop"] == pytest.approx(row["ms_per_step"] / rows[algorithm, "loop"]["ms_per_step"])
        assert algorithm in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["resnet"], "unknown model 'resnet'; did you mean"),
        (["cnn", "--set", "depth=3"], "unknown setting 'model.depth'"),
        (["cnn", "--set", "norm=layer"], "norm must be one of"),
        (["cnn", "--clients", "0"], "clients must be at least 1, got 0"),
        (["cnn", "--precision", "fp8"], "unknown precision 'fp8'"),
        (["cnn", "--device", "tpu9"], "cannot use device 'tpu9'"),
        (["cnn", "--rounds", "0"], "rounds must be at least 1"),
    ],
)
def test_mistakes_are_one_line(arguments, line, monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, *arguments)
    assert code == 2
    assert line in err
    assert len(err.strip().splitlines()) == 1


def test_rounds_are_timed_whole():
    """The job that is timed trains: its weights move, averages included."""
    setting = bench.Setting(clients=2, local_steps=2, batch=3, shape=(3, 8, 8), precision="fp32", device="cpu")
    job = bench.Job(cnn((3, 8, 8)), bench.images(setting), "fedxl2", bench.executor("vmap"), 2, 3)
    before = job.server.weights.params
    assert bench.timed(job, 2, warm_up=1) > 0
    assert job.number == 4, "round 0, one to warm up, two timed"
    assert any((before[name] - after).abs().max() > 0 for name, after in job.server.weights.params.items())


def test_half_precision_is_for_gpus():
    with pytest.raises(UserError, match="bf16 is for GPUs"):
        bench.Setting(precision="bf16", device="cpu")
