"""The command line as people use it: real processes where it matters."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fedxl
from fedxl import progress
from tests.cli.test_errors import CONFIG, command
from tests.conftest import PATIENCE, seen_at_a_terminal, until
from tests.training.test_resume import ODD

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
FEDXL = [sys.executable, "-m", "fedxl"]


@pytest.fixture
def finished(tmp_path, monkeypatch, capsys) -> Path:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    for name in ("fedxl2", "local_sgd"):
        code, out, _ = command(monkeypatch, capsys, "train", "tiny.toml", "--set", f"algorithm.name={name}")
        assert code == 0, out
    return tmp_path / "runs"


def test_train_leaves_everything_in_a_new_folder(finished):
    assert sorted(path.name for path in finished.iterdir()) == ["tiny-1", "tiny-2"]
    run = finished / "tiny-1"
    assert {path.name for path in run.iterdir()} == {
        ".lock",
        "config.toml",
        "metrics.jsonl",
        "run.json",
        "scores.npz",
        "model.safetensors",
        "checkpoints",
        "trained_on.npy",
    }
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["round"] == 2
    assert {"auroc", "ap", "pauc@0.3", "pauc_raw@0.3", "risk", "positives"} <= records[0]["validation"].keys()
    assert 0 < records[-1]["test"]["auroc"] < 1


def test_report_as_text_and_markdown(finished, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "report", str(finished))
    assert code == 0
    assert all(word in out for word in ("tiny-1", "tiny-2", "fedxl2", "local_sgd", "finished", "pauc@0.3"))
    code, out, _ = command(monkeypatch, capsys, "report", str(finished / "tiny-2"), "--markdown")
    lines = out.strip().splitlines()
    assert lines[0].startswith("| run | algorithm | risk |")
    assert set(lines[1]) <= set("|-: ")
    assert len(lines) == 3


def test_report_of_a_run_whose_files_were_tampered_with(finished, monkeypatch, capsys):
    """Lines that no run has written are left out; a config that is none is one line."""
    run = finished / "tiny-1"
    good = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("\n".join(["x", *ODD, good]))
    assert command(monkeypatch, capsys, "report", str(finished))[0] == 0
    run = run.rename(finished / "[bold]tiny")
    (run / "config.toml").write_text("[algorithm]\nname = '[/oops]'\n[risk]\nname = 5\n")
    code, out, _ = command(monkeypatch, capsys, "report", str(run))
    assert code == 0
    assert all(name in out for name in ("[bold]tiny", "[/oops]", " 5 "))
    for text in ("algorithm = 5", "x = " + "9" * 5000, "x = " + "[" * 5000, "a" + ".a" * 3000 + " = 1", "\udcff"):
        (run / "config.toml").write_text(text, errors="surrogateescape")
        code, _, err = command(monkeypatch, capsys, "report", str(run))
        assert (code, len(err.strip().splitlines())) == (2, 1), err


def test_the_saved_model_loads_with_plain_torch(finished):
    from safetensors.torch import load_file

    from fedxl.models import mlp

    mlp((1, 8, 8), hidden=(4,)).load_state_dict(load_file(finished / "tiny-1" / "model.safetensors"))


def test_resuming_a_finished_run_says_the_same(finished, monkeypatch, capsys):
    before = (finished / "tiny-1" / "model.safetensors").read_bytes()
    code, out, _ = command(monkeypatch, capsys, "resume", str(finished / "tiny-1"))
    assert code == 0
    assert "best round" in out
    assert (finished / "tiny-1" / "model.safetensors").read_bytes() == before


def test_a_run_whose_config_was_edited_is_not_mixed_with_another(finished, monkeypatch, capsys):
    config = finished / "tiny-1" / "config.toml"
    for before, after, named in (("[4]", "[8]", "model.hidden"), ('"pauc"', '"auroc"', "risk.name")):
        text = config.read_text()
        config.write_text(text.replace(before, after))
        code, _, err = command(monkeypatch, capsys, "resume", str(finished / "tiny-1"))
        config.write_text(text)
        assert code == 2
        assert named in err


def test_the_demo_writes_its_table_and_plot(tmp_path, monkeypatch, capsys):
    from fedxl.experiments import demo

    monkeypatch.setattr(demo, "RUN", {**demo.RUN, "rounds": 2, "local_steps": 2})
    code, out, err = command(monkeypatch, capsys, "demo", "--seeds", "2", "--out", str(tmp_path / "d"))
    assert code == 0, err
    assert all(entry.label in out for entry in demo.ENTRIES)
    assert (tmp_path / "d" / "demo.png").read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "d" / "report.html").read_text()
    assert all(entry.label in report for entry in demo.ENTRIES)
    assert str(tmp_path / "d" / "report.html") in out
    assert re.search(r"(is ahead of the next federated method, .* by|are level:) [+-]0\.\d{3} \[", out)
    assert (tmp_path / "d" / "results.md").read_text().count("\n") == 2 + len(demo.ENTRIES)
    results = json.loads((tmp_path / "d" / "results.json").read_text())
    assert all(len(runs) == 2 and 0 < runs[0]["test"]["auroc"] < 1 for runs in results.values())


@pytest.mark.parametrize("verb", ["algorithms", "risks"])
def test_lists_hold_one_line_each(verb, monkeypatch, capsys):
    from fedxl import ALGORITHMS
    from fedxl.risks import KNOWN_RISKS

    code, out, _ = command(monkeypatch, capsys, verb)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(
        {"algorithms": ALGORITHMS, "risks": KNOWN_RISKS}[verb]
    )
    assert all(len(line.split()) > 3 for line in out.splitlines())


def test_which_version_this_is(monkeypatch, capsys):
    assert command(monkeypatch, capsys, "--version") == (0, f"fedxl {fedxl.__version__}\n", "")


def test_a_site_prepares_its_data_with_progress_at_a_terminal(tmp_path):
    (tmp_path / "site.toml").write_text(
        '[site]\nname = "north"\n[data]\nname = "digits"\nclients = 2\none_class = 0\n'
    )
    shown = seen_at_a_terminal([*FEDXL, "site", "prepare", str(tmp_path)], COLUMNS="120")
    assert b"preparing north" in shown
    assert b"examples ready in" in shown


def test_every_algorithm_and_risk_trains_from_a_config(tmp_path, monkeypatch, capsys):
    from fedxl import ALGORITHMS, RISKS

    (tmp_path / "c.toml").write_text(CONFIG)
    pairs = [(name, "auroc") for name in ALGORITHMS] + [("fedxl2", name) for name in RISKS if name != "contrastive"]
    for number, (algorithm, risk) in enumerate(pairs):
        chosen = ["--set", f"algorithm.name={algorithm}", "--set", f"risk.name={risk}"]
        code, _, err = command(
            monkeypatch, capsys, "train", str(tmp_path / "c.toml"), "--out", str(tmp_path / str(number)), *chosen
        )
        assert code == 0, f"{algorithm}, {risk}: {err}"
    views = ["--set", "risk.name=contrastive", "--set", "risk.dim=4", "--set", "data.views=true"]
    code, out, err = command(
        monkeypatch, capsys, "train", str(tmp_path / "c.toml"), "--out", str(tmp_path / "views"), *views
    )
    assert code == 0, err
    assert "risk" in out


def test_a_model_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(width: int, **more):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 1))\n"
        "def broken():\n"
        "    return nn.Relu()\n"
    )
    (tmp_path / "c.toml").write_text(CONFIG.replace('name = "mlp"\nhidden = [4]', 'name = "mine:net"\nwidth = 3'))
    monkeypatch.chdir(tmp_path)
    code, _, err = command(monkeypatch, capsys, "train", "c.toml", "--set", "model.depth=2")
    assert code == 0, err
    code, _, err = command(monkeypatch, capsys, "train", "c.toml", "--set", "model.width=wide")
    assert (code, "'model.width' must be a whole number" in err) == (2, True), err
    code, _, err = command(monkeypatch, capsys, "train", "c.toml", "--set", "model.name=mine:broken")
    assert (code, "unknown setting 'model.width'" in err) == (2, True), err


def test_ctrl_c_finishes_the_round_saves_and_says_how_to_go_on(tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG)
    run = tmp_path / "run"
    arguments = ["train", str(tmp_path / "c.toml"), "--out", str(run), "--set", "run.rounds=100000"]
    process = subprocess.Popen(
        [*FEDXL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    until(lambda: bool(list(run.glob("checkpoints/*.safetensors"))), lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert f"fedxl resume {run}" in out.replace("\n", " ")
    assert "Traceback" not in err
    stopped_at = int(sorted(run.glob("checkpoints/*.safetensors"))[-1].stem.removeprefix("round-"))

    config = run / "config.toml"  # let it end soon after where it stopped
    config.write_text(re.sub(r"rounds = \d+", f"rounds = {stopped_at + 3}", config.read_text()))
    again = subprocess.run([*FEDXL, "resume", str(run)], capture_output=True, text=True, check=True)
    assert "best round" in again.stdout
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["round"] == stopped_at + 3


def test_a_terminal_sees_a_progress_bar_and_a_pipe_does_not(tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG.replace("rounds = 2", "rounds = 60\neval_every = 5"))
    arguments = ["train", str(tmp_path / "c.toml"), "--out"]
    piped = subprocess.run([*FEDXL, *arguments, str(tmp_path / "piped")], capture_output=True, text=True, check=True)
    assert "\r" not in piped.stdout
    # Where a run stands it says after half a minute, which a busy machine may take.
    assert len([line for line in piped.stdout.strip().splitlines() if not line.startswith("round ")]) <= 5

    shown = seen_at_a_terminal([*FEDXL, *arguments, str(tmp_path / "shown")], COLUMNS="120")
    assert b"rounds/s" in shown
    assert b"60/60" in shown
    assert b"validation auroc" in shown


def test_whoever_follows_a_log_sees_where_a_long_run_stands(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text(CONFIG.replace("rounds = 2", "rounds = 5\neval_every = 2"))
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    code, out, _ = command(monkeypatch, capsys, "train", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run"))
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("round ")]
    assert [re.sub(r"0\.\d{4}|\d+ (s|min)", "#", line) for line in lines] == [
        "round 1 of 5, about # left",
        "round 2 of 5, validation auroc #, about # left",
        "round 3 of 5, validation auroc #, about # left",
        "round 4 of 5, validation auroc #, about # left",
    ]
