"""What TensorBoard and MLflow have of a run, read back with their own libraries, against its metrics.jsonl."""

from __future__ import annotations

import json
import logging
import socket
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from fedxl import UserError, auroc
from fedxl.tracking.tracker import GIVE_UP, STOPPED, Tracked, Trackers, scalars
from fedxl.training.settings import Hooks
from tests.conftest import make_clients
from tests.running import fit_named

VALIDATION = make_clients([(25, 30)], seed=9)[0]


def run(out: Path | None, track=(), resume: bool = False, hooks: Hooks | None = None, **changes):
    torch.manual_seed(0)
    settings = {
        "rounds": 8, "local_steps": 2, "batch1": 2, "batch2": 2, "lr": 0.5, "eval_every": 2, "checkpoint_every": 3,
        "executor": "vmap", "dtype": "float64", "device": "cpu", **changes,
    }  # fmt: skip
    return fit_named(
        nn.Linear(5, 1), make_clients([(8, 8)] * 3), auroc(), validation=VALIDATION, test=VALIDATION, track=track,
        out=out, resume=resume, hooks=hooks or Hooks(say=lambda line: None), **settings,
    )  # fmt: skip


def stopped_after(rounds: int) -> Hooks:
    asked = iter(range(1000))
    return Hooks(say=lambda line: None, should_stop=lambda: next(asked) >= rounds)


def expected(out: Path) -> dict[str, list[tuple[int, float]]]:
    """From metrics.jsonl, which tests of resuming compare with an undisturbed run."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for split in ("validation", "test", "choice"):
            for name, value in row.get(split, {}).items():
                if not isinstance(value, str):  # the metric that the choice is by
                    key = f"{split}/{name.replace('@', '_at_')}"
                    found.setdefault(key, []).append((row["round"], value))
    return found


# TensorBoard


def events(out: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    level = logging.getLogger("tensorboard").level
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells what it purges
    found = EventAccumulator(str(out / "tensorboard"))
    found.Reload()
    logging.getLogger("tensorboard").setLevel(level)
    return found


def in_events(out: Path) -> dict[str, list[tuple[int, float]]]:
    found = events(out)
    tags = [tag for tag in found.Tags()["scalars"] if not tag.startswith(("run/", "traffic/"))]
    return {tag: [(event.step, pytest.approx(event.value)) for event in found.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("stops", [(), (3,), (4, 2), (8,)], ids=str)
def test_event_files_hold_each_evaluation_once(tmp_path, stops):
    for number, stop in enumerate(stops):
        run(tmp_path, ["tensorboard"], resume=number > 0, hooks=stopped_after(stop))
    run(tmp_path, ["tensorboard"], resume=bool(stops))
    assert in_events(tmp_path) == expected(tmp_path)


def test_event_files_after_a_finished_run_is_extended(tmp_path):
    run(tmp_path, ["tensorboard"], rounds=5)
    run(tmp_path, ["tensorboard"], resume=True, rounds=8)
    assert in_events(tmp_path) == expected(tmp_path)


def test_event_files_hold_the_settings(tmp_path):
    run(tmp_path, ["tensorboard"])
    plugin = events(tmp_path).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    given = HParamsPluginData.FromString(plugin).session_start_info.hparams
    assert given["algorithm.lr"].number_value == 0.5
    assert given["run.eval_every"].number_value == 2


# MLflow


@pytest.fixture
def offline(monkeypatch):
    """Nothing may leave this machine."""

    def refuse(*args, **kwargs):
        raise AssertionError("it reached out to the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


def in_mlflow(db: Path) -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow = pytest.importorskip("mlflow")
        client = mlflow.MlflowClient(f"sqlite:///{db}")
        number = client.get_experiment_by_name("fedxl").experiment_id
        runs = client.search_runs([number])
        for each in runs:
            history = {name: client.get_metric_history(each.info.run_id, name) for name in each.data.metrics}
            each.history = {
                name: [(metric.step, metric.value) for metric in found]
                for name, found in history.items()
                if not name.startswith(("run/", "traffic/"))
            }
    return runs


def test_a_database_beside_the_run_holds_each_evaluation_once(tmp_path, offline):
    pytest.importorskip("mlflow")
    out, lines = tmp_path / "mine", []
    run(out, ["mlflow"], hooks=Hooks(say=lines.append, should_stop=iter([False] * 5 + [True]).__next__))
    (stopped,) = in_mlflow(tmp_path / "mlflow.db")
    assert stopped.info.status == "KILLED"
    run(out, ["mlflow"], resume=True)
    run(out, ["mlflow"], resume=True)  # it has finished already: nothing is new
    (found,) = in_mlflow(tmp_path / "mlflow.db")
    assert found.history == expected(out)
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.params["algorithm.lr"] == "0.5"
    assert found.data.params["run.rounds"] == "8"
    assert not any("tracking" in line for line in lines)
    assert not list(tmp_path.glob("mlruns*"))


def test_a_server_that_is_not_there_costs_two_lines(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens: a connection is refused at once
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        lines: list[str] = []
        found = run(tmp_path / "a", ["mlflow"], tracking_uri=uri, hooks=Hooks(say=lines.append))
    assert found.metrics["test"] == run(None).metrics["test"]
    told = [line for line in lines if "tracking" in line]
    assert len(told) == 2
    assert "the next evaluation tries again" in told[0]
    assert "continues without it" in told[1]


# Trackers in general


class Flaky:
    """Fails in the calls whose numbers are given."""

    def __init__(self, *failing: int) -> None:
        self.failing, self.calls, self.seen = failing, 0, []

    def _do(self, what) -> None:
        self.calls += 1
        if self.calls in self.failing:
            raise OSError("disk full\nand more")
        self.seen.append(what)

    def begin(self, run) -> None:
        self._do("begin")

    def write(self, row) -> None:
        self._do(row["round"])

    def end(self, state) -> None:
        self._do(state)


def follow(tracker: Flaky) -> list[str]:
    lines: list[str] = []
    trackers = Trackers({"own": tracker}, lines.append)
    trackers.begin(Tracked(Path("x"), {}, "auroc", False, 0, []))
    for round in range(1, 7):
        trackers.write({"round": round})
    trackers.end(STOPPED)
    return lines


def test_what_was_missed_is_written_later_and_in_order():
    tracker = Flaky(1, 4, 5)
    lines = follow(tracker)
    assert tracker.seen == ["begin", 1, 2, 3, 4, 5, 6, STOPPED]
    assert all("disk full" in line and "\n" not in line and "and more" not in line for line in lines)


def test_one_that_keeps_failing_is_left_alone():
    tracker = Flaky(*range(1, 100))
    lines = follow(tracker)
    assert tracker.calls == GIVE_UP
    assert len(lines) == 2


def test_a_run_is_the_same_with_a_tracker_that_always_fails(tmp_path):
    lines: list[str] = []
    tracked = run(tmp_path / "a", ["tests.tracking.test_tracking:AlwaysFails"], hooks=Hooks(say=lines.append))
    assert tracked.metrics == run(None).metrics
    assert any("AlwaysFails failed (disk full); the run continues" in line for line in lines)


class AlwaysFails(Flaky):
    def __init__(self) -> None:
        super().__init__(*range(100))


def test_names_are_those_that_both_take_and_differ():
    row = {"round": 2, "seconds": 1.5, "collapsed": True, "validation": {"auroc": 0.9, "ap": None, "positives": 3}}
    row |= {"validation_by_site": {"Haus ä": {"auroc": 0.8}, "Haus ö": {"auroc": 0.7}, "gone": "no reply"}}
    assert scalars(row) == {
        "run/seconds": 1.5, "run/collapsed": 1.0, "validation/auroc": 0.9, "validation/positives": 3.0,
        "validation_by_site/Haus__/auroc": 0.8, "validation_by_site/Haus__/auroc_2": 0.7,
    }  # fmt: skip


def test_mistakes_are_one_line_before_anything_is_written(tmp_path):
    for settings, message in {
        ("tensorbord",): "did you mean 'tensorboard'",
        ("tensorboard", "sqlite:///x.db"): 'add "mlflow" to track',
        ("mlflow", "http://me:secret@host"): "must hold no password",
    }.items():
        with pytest.raises(UserError, match=message):
            run(tmp_path / "a", settings[:1], tracking_uri="".join(settings[1:]))
        assert not (tmp_path / "a").exists()
    with pytest.raises(UserError, match="track needs a folder"):
        run(None, ["tensorboard"])


def test_a_library_that_is_missing_is_one_line(tmp_path, monkeypatch):
    import sys

    for name, modules in {"tensorboard": ("torch.utils.tensorboard",), "mlflow": ("mlflow",)}.items():
        for module in modules:
            monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delattr(torch.utils, name, raising=False)
        with pytest.raises(UserError, match=rf"pip install 'fedxl\[{name}\]'"):
            run(tmp_path / "a", [name])
