"""The command line as people use it: real processes where it matters."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import fedxl
from fedxl import progress
from fedxl.cli import processes
from fedxl.cli.main import app
from fedxl.cli.train import _new
from fedxl.evaluation.compare import seed_intervals
from fedxl.training import run_folder
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
    code, out, _ = command(monkeypatch, capsys, "report", str(finished), "--all")
    assert code == 0
    assert all(word in out for word in ("tiny-1", "tiny-2", "fedxl2", "local_sgd", "finished", "pauc@0.3"))
    code, out, _ = command(monkeypatch, capsys, "report", str(finished / "tiny-2"), "--markdown")
    lines = out.strip().splitlines()
    assert lines[0].startswith("| run | algorithm | round | pauc@0.3 | auroc |")
    assert set(lines[1]) <= set("|-: ")
    assert len(lines) == 3


def test_a_report_fits_80_columns_and_has_one_row_for_all_seeds(finished, monkeypatch, capsys):
    """A row for each group; the means are those of the files, the interval that of the HTML report."""
    given = ["train", "tiny.toml", "--set", "algorithm.lr=0.2", "--out", str(finished / "three")]
    assert command(monkeypatch, capsys, *given, "--seeds", "3")[0] == 0
    monkeypatch.setenv("COLUMNS", "80")
    runs = [run_folder.read_run(path) for path in sorted((finished / "three").iterdir())]
    code, out, err = command(monkeypatch, capsys, "report", str(finished), str(finished / "three"))
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 80
    (row,) = [line for line in out.splitlines() if "3 seeds" in line]
    found = seed_intervals(["pauc@0.3"], [run.scores["test"] for run in runs], same=False)["pauc@0.3"]
    values = [run.done["test"]["auroc"] for run in runs]
    assert f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]" in row
    assert f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}" in row
    assert len([line for line in out.splitlines() if "fedxl2" in line or "local_sgd" in line]) == 3
    assert "on test data [95 % interval]; of several seeds means" in " ".join(out.split())
    metrics = finished / "three" / "seed-2" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")  # as if it had been killed after an evaluation
    _, out, _ = command(monkeypatch, capsys, "report", str(finished / "three"))
    assert "2 of 3 seeds" in out
    assert f"{statistics.mean(values[:2]):.4f} ± {statistics.stdev(values[:2]):.4f}" in out, "those that have ended"
    _, out, _ = command(monkeypatch, capsys, "report", str(finished / "three" / "seed-2"))
    assert "at round 2" in out


def test_the_commands_of_the_readme_in_their_order(finished, monkeypatch, capsys):
    """Runs of several seeds lie one folder deeper: each command finds them, or names one that it can take."""
    shutil.rmtree(finished)
    assert command(monkeypatch, capsys, "train", "tiny.toml", "--seeds", "2")[0] == 0
    code, out, err = command(monkeypatch, capsys, "report", "runs")
    assert code == 0, err
    assert "2 seeds" in out
    assert command(monkeypatch, capsys, "report", "runs", "--html", "report.html")[0] == 0
    code, out, _ = command(monkeypatch, capsys, "watch", "runs/tiny-1")
    assert code == 0
    assert "finished" in out
    seed = Path("runs") / "tiny-1" / "seed-0"
    for arguments in (["watch", "runs"], ["predict", "runs/tiny-1", "new.csv", "-o", "out.csv"], ["export", "runs"]):
        code, _, err = command(monkeypatch, capsys, *arguments)
        assert code == 2
        assert f"{arguments[1]} holds 2 runs: name one, {seed}" in " ".join(err.split())


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
    assert all(name in out for name in ("[bold]tiny", "[/oops]", "risk 5"))
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
    monkeypatch.setenv("COLUMNS", "80")
    drawn = {}
    draw = demo.plots.roc_and_convergence
    monkeypatch.setattr(demo.plots, "roc_and_convergence", lambda *all: (drawn.update(all[2]), draw(*all)))
    code, out, err = command(monkeypatch, capsys, "demo", "--seeds", "2", "--out", str(tmp_path / "d"))
    assert code == 0, err
    assert all(entry.label in out for entry in demo.ENTRIES)
    assert (tmp_path / "d" / "demo.png").read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "d" / "report.html").read_text()
    assert all(entry.label in report for entry in demo.ENTRIES)
    assert str(tmp_path / "d" / "report.html") in out
    assert re.search(r"(is ahead of the next federated method, .* by|are level:) [+−]?0\.\d{3} \[", out)
    for line in drawn.values():  # the picture's intervals are the report's
        assert line.value.split(" ", 1)[1] in report
    table = (tmp_path / "d" / "results.md").read_text()
    assert table.count("\n") == 2 + len(demo.ENTRIES)
    for number in re.findall(r"\d+\.\d+(?: ± \d\.\d+)?(?= \|)", table):
        assert f" {number} " in out  # 80 columns cut none
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


def test_three_runs_started_at_once_take_three_folders(tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG)
    command = [*FEDXL, "train", "c.toml"]
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": ENVIRONMENT,
        "cwd": tmp_path,
    }
    processes = [subprocess.Popen(command, **options) for _ in range(3)]
    for process in processes:
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in folders] == ["c-1", "c-2", "c-3"]
    assert all((folder / "model.safetensors").exists() for folder in folders)


def test_one_command_runs_several_seeds_and_resumes_those_that_have_not_finished(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    given = ["train", "c.toml", "--set", "run.seed=4", "--out", "r"]
    code, out, err = command(monkeypatch, capsys, *given, "--seeds", "3")
    drawn = "differs with each seed; --set data.seed=4 keeps it"
    assert (code, drawn in out) == (0, True), err
    folders = [Path("r") / f"seed-{seed}" for seed in (4, 5, 6)]
    assert sorted(Path("r").iterdir()) == folders
    rows = [json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in folders]
    assert len({row["test"]["auroc"] for row in rows}) == 3
    values = [row["test"]["auroc"] for row in rows]
    told = f"over 3 seeds: auroc {statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"
    assert told in out
    models = [(folder / "model.safetensors").read_bytes() for folder in folders]
    for name in ("metrics.jsonl", "run.json", "scores.npz", "model.safetensors"):  # as if it had never begun
        (folders[1] / name).unlink()
    shutil.rmtree(folders[1] / "checkpoints")
    code, out, err = command(monkeypatch, capsys, "resume", "r")
    assert code == 0, err
    assert (told in out, "seed 5 (2 of 3)" in out, "seed 4" in out) == (True, True, False)
    code, out, _ = command(monkeypatch, capsys, *given[:-1], "one split", "--set=data.seed=4", "--seeds", "2")
    assert (code, drawn in out) == (0, False)
    assert [(folder / "model.safetensors").read_bytes() for folder in folders] == models
    code, _, err = command(monkeypatch, capsys, *given)
    assert (code, "r already holds a run" in err) == (2, True), err


def test_several_seeds_on_several_devices_and_with_mistakes(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(processes, "start", lambda count, given, folder, limit: asked.append((count, given)))
    command(monkeypatch, capsys, "train", "c.toml", "--seeds", "2", "--devices", "2", "--out", "r")
    assert asked == [(2, ["resume", "r/seed-0"]), (2, ["resume", "r/seed-1"])]
    mistakes = {"--set=run.cohort=99": "cohort is 99", "--seeds=0": "--seeds must lie between"}
    for given, wanted in mistakes.items():
        code, _, err = command(monkeypatch, capsys, "train", "c.toml", "--seeds", "2", given)
        assert (code, wanted in err, list(Path("runs").glob("*"))) == (2, True, []), err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = command(monkeypatch, capsys, "train", "c.toml", "--seeds", "2")
    assert (code, "which torchrun cannot" in err, list(Path("runs").glob("*"))) == (2, True, []), err


def test_a_folder_is_taken_for_good_only_by_a_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    assert [_new(Path("runs"), "c").name for _ in range(3)] == ["c-1", "c-2", "c-3"]
    code, _, err = command(monkeypatch, capsys, "train", "c.toml", "--set", "run.cohort=99")
    assert (code, "cohort is 99" in err) == (2, True), err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["c-1", "c-2", "c-3"]


def test_a_run_killed_before_its_config_was_written_can_be_started_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text(CONFIG)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    monkeypatch.chdir(tmp_path)
    code, _, err = command(monkeypatch, capsys, "resume", "run")
    assert code == 2
    assert "run holds no run yet: fedxl train CONFIG --out run" in err.replace("\n", " ")
    assert command(monkeypatch, capsys, "train", "c.toml", "--out", "run")[0] == 0


def test_a_terminal_sees_a_progress_bar_and_a_pipe_does_not(tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG.replace("rounds = 2", "rounds = 60\neval_every = 5"))
    arguments = ["train", str(tmp_path / "c.toml"), "--out"]
    piped = subprocess.run([*FEDXL, *arguments, str(tmp_path / "piped")], capture_output=True, text=True, check=True)
    assert "\r" not in piped.stdout
    # Where a run stands it says after half a minute, which a busy machine may take.
    assert len([line for line in piped.stdout.strip().splitlines() if not line.startswith("round ")]) <= 5

    shown = seen_at_a_terminal([*FEDXL, *arguments, str(tmp_path / "shown")], COLUMNS="120")
    assert b"60/60" in shown
    assert b"validation pauc@0.3" in shown, "the metric that selects"


def test_whoever_follows_a_log_sees_where_a_long_run_stands(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text(CONFIG.replace("rounds = 2", "rounds = 5\neval_every = 2"))
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    code, out, _ = command(monkeypatch, capsys, "train", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run"))
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("round ")]
    assert [re.sub(r"0\.\d{4}|\d+ (s|min)", "#", line) for line in lines] == [
        "round 1 of 5, about # left",
        "round 2 of 5, validation pauc@0.3 #, about # left",
        "round 3 of 5, validation pauc@0.3 #, about # left",
        "round 4 of 5, validation pauc@0.3 #, about # left",
    ]


LISTING = """
import sys
from typer.testing import CliRunner
from fedxl.cli.main import app
print(CliRunner().invoke(app, ["--help"], terminal_width=200).stdout)
assert "torch" not in sys.modules and "fedxl.cli.train" not in sys.modules
"""


def test_the_list_of_commands_loads_none_of_them():
    done = subprocess.run([sys.executable, "-c", LISTING], check=True, capture_output=True, text=True)
    shown = " ".join(done.stdout.replace("│", " ").split())
    group = typer.main.get_command(app)
    for name in group.list_commands(None):
        said = " ".join(group.get_command(None, name).get_short_help_str(60).removesuffix("...").split())
        assert said in shown, f"{name} says of itself what it does when it is loaded"
