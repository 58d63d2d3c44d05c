"""`fedxl watch`: what it says of runs that go on, have ended, were killed or are damaged."""

from __future__ import annotations

import fcntl
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedxl.cli.main import app
from fedxl.cli.report import GONE, follow
from fedxl.errors import UserError
from fedxl.reporting import runs, watch
from fedxl.reporting.watch import curve, panel
from fedxl.training.run_folder import LOCK, being_written
from fedxl.training.run_writer import RunWriter
from tests.conftest import seen_at_a_terminal

ROWS = [
    {"round": 5, "seconds": 10.0, "validation": {"auroc": 0.7, "pauc@0.3": 0.6, "positives": 9, "negatives": 9}},
    {"round": 10, "seconds": 20.0, "validation": {"auroc": 0.8, "pauc@0.3": 0.9}},
    {"round": 15, "seconds": 30.0, "validation": {"auroc": 0.9, "pauc@0.3": 0.8}},
]
FINAL = {"round": 20, "best_round": 10, "seconds": 40.0, "test": {"auroc": 0.75, "pauc@0.3": 0.65}}


def a_run(folder: Path, rows=ROWS, metric: str = "pauc@0.3", **settings) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {f"run.{name}": value for name, value in {"rounds": 40, **settings}.items()}
    (folder / "run.json").write_text(json.dumps({"settings": settings, "select": metric}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def drawn(view: watch.View, width: int = 80, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(width=width, file=file, force_terminal=True, color_system=None)
    console.print(panel(view, console))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def test_a_run_that_goes_on(tmp_path):
    folder = a_run(tmp_path / "a", patience=4)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "round-00000018.safetensors").write_bytes(b"")
    with RunWriter(folder, resume=True):
        before = files(folder)
        view = watch.look(folder)
        assert files(folder) == before, "it only looks"
    assert (view.round, view.rounds, view.best, view.waited) == (18, 40, (10, 0.9), 1)
    # 10 rounds in 20 seconds, and 22 are left.
    assert watch.pace(view) == "2.0 s per round, about 44 s left"
    if view.alive is not None:
        assert view.alive
    assert "1 of 4 evaluations without a better one" in watch.standing(view)
    shown = drawn(view)
    for text in (
        "a: running",
        "round 18 of 40",
        "validation pauc@0.3 0.8000, best 0.9000 in round 10",
        "auroc 0.9000",
    ):
        assert text in shown


def test_a_site_that_is_waited_for(tmp_path):
    folder = a_run(tmp_path / "a")
    lost = {"state": "lost", "since": "20:54:13", "until": "20:55:13"}
    (folder / "status.json").write_text(json.dumps({"sites": {"north": {"state": "connected"}, "brook": lost}}))
    assert "brook" not in watch.line(watch.look(folder)), "nobody works on the run"
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        view = watch.look(folder)
    for shown in (watch.line(view), drawn(view)):
        assert "brook: lost at 20:54:13, waited for until 20:55:13" in shown
        assert "s left" not in shown, "nobody knows how long a wait takes"


def test_how_many_sites_took_part(tmp_path):
    took_part = [{"round": 14, "sites": ["a", "b", "c"], "of": 3}, {"round": 15, "sites": ["a", "c"], "of": 3}]
    view = watch.look(a_run(tmp_path / "a", [*ROWS[:2], {**ROWS[2], "participants": took_part}]))
    assert watch.participants(view) == "round 15, trained by 2 of 3 sites"
    assert "round 15, trained by 2 of 3 sites" in drawn(view)
    assert ", round 15, trained by 2 of 3 sites, " in watch.line(view)
    assert not watch.participants(watch.look(a_run(tmp_path / "b"))), "a simulation"


def test_less_may_be_better(tmp_path):
    rows = [{"round": r, "seconds": r, "validation": {"risk": risk}} for r, risk in ((1, 0.5), (2, 0.3), (3, 0.4))]
    assert watch.look(a_run(tmp_path / "a", rows, "-risk")).best == (2, 0.3)


def test_nobody_works_on_a_run_that_was_killed(tmp_path):
    if being_written(tmp_path) is None:
        pytest.skip("this system does not say who holds a lock")
    view = watch.look(a_run(tmp_path / "a"))
    assert view.alive is False
    assert watch.line(view).startswith("round 15 of 40, stopped, ")
    assert "left" not in watch.pace(view)


def test_a_cut_off_line_is_not_there_yet(tmp_path):
    folder = a_run(tmp_path / "a")
    whole = (folder / "metrics.jsonl").read_bytes()
    for cut in range(1, 60):
        (folder / "metrics.jsonl").write_bytes(whole[:-cut])
        view = watch.look(folder)
        assert len(view.rows) == (3 if cut == 1 else 2)
        assert drawn(view)


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"settings": 3, "select": null}'])
def test_run_json_may_be_missing_or_damaged(tmp_path, damage):
    folder = a_run(tmp_path / "a")
    (folder / "run.json").write_text(damage)
    view = watch.look(folder)
    assert (view.rounds, view.metric) == (0, "auroc")
    assert "round 15" in drawn(view)
    assert watch.line(view)


def test_rounds_of_a_config_that_was_changed_count(tmp_path):
    folder = a_run(tmp_path / "a")
    (folder / "config.toml").write_text("[run]\nrounds = 70\n")
    assert watch.look(folder).rounds == 70


def test_sites_that_did_not_reply_come_first_and_cannot_forge_lines(tmp_path):
    row = {
        **ROWS[2],
        "validation_by_site": {"berlin": {"pauc@0.3": 0.8}, "oslo": "no reply\n\x1b[2Jall is well"},
        "dropped": [{"round": 14, "site": "rome", "reason": "its update is too large"}],
    }
    view = watch.look(a_run(tmp_path / "a", [*ROWS[:2], row]))
    assert [site.name for site in view.sites] == ["berlin", "oslo", "rome"]
    assert view.sites[0].metric == 0.8
    assert math.isnan(view.sites[1].metric)
    shown = drawn(view, 100)
    assert "\x1b[2J" not in shown
    assert shown.index("rome") < shown.index("berlin")
    assert "left out in round 14: its update is too large" in watch.line(view)
    assert "\n" not in watch.line(view)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_drawing_fits(tmp_path, width, encoding):
    rng = np.random.default_rng(0)
    rows = [
        {"round": r, "seconds": r, "validation": {"pauc@0.3": float(v)}} for r, v in enumerate(rng.random(500), 1)
    ]
    shown = drawn(watch.look(a_run(tmp_path / "a", rows)), width, encoding)
    assert max(map(len, shown.splitlines())) <= width


def test_the_curve_rises_where_the_values_do():
    lines = curve(np.linspace(0, 1, 40).tolist(), 40)
    heights = [sum(line[11 + column] != " " for line in lines) for column in range(40)]
    assert heights == sorted(heights)
    assert heights[0] == 1
    assert heights[-1] == 6
    assert {len(line) for line in lines} == {11 + 40}


# The command


def test_a_finished_run_is_printed_once(tmp_path):
    folder = a_run(tmp_path / "a", [*ROWS, FINAL | {"stopped_early": True}])
    done = CliRunner().invoke(app, ["watch", str(folder)])
    assert done.exit_code == 0
    assert done.stdout == (
        "round 20, stopped early, validation pauc@0.3 0.8000, best 0.9000 in round 10, 2.0 s per round, "
        "best round 10, test: auroc 0.7500  pauc@0.3 0.6500\n"
    )
    (folder / "config.toml").write_text('[algorithm]\nname = "fedxl2"\n')
    assert runs.table([folder])[1][0][3] == "finished (stopped early)"


def test_lines_in_a_pipe_until_the_run_ends(tmp_path, capsys):
    folder = a_run(tmp_path / "a", ROWS[:1])
    coming = [json.dumps(row) + "\n" for row in (ROWS[1], ROWS[2], FINAL)]
    halves = iter([part for line in coming for part in (line[:20], line[20:])])

    def pause() -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(next(halves))

    with RunWriter(folder, resume=True):
        follow(folder, False, pause)
    lines = capsys.readouterr().out.splitlines()
    starts = ("round 5 of 40, running", "round 10 of 40, running", "round 15 of 40, running", "round 20, finished")
    assert len(lines) == 4
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


def test_it_ends_when_nobody_works_on_the_run_any_more(tmp_path):
    folder, looks = a_run(tmp_path / "a"), []
    if being_written(folder) is None:
        pytest.skip("this system does not say who holds a lock")
    follow(folder, False, lambda: looks.append(1))
    assert len(looks) == GONE - 1


def test_of_several_seeds_the_one_at_work_is_shown(tmp_path):
    seeds = [a_run(tmp_path / f"seed-{seed}", rows) for seed, rows in ((2, [*ROWS, FINAL]), (10, ROWS))]
    assert watch.folder_of(tmp_path) == seeds[1]
    a_run(seeds[1], [*ROWS, FINAL])
    assert watch.folder_of(tmp_path) == seeds[1], "the last, once all have ended"


def test_a_run_that_has_not_begun_is_one_line_or_waited_for(tmp_path):
    folder = tmp_path / "a"
    with pytest.raises(UserError, match="there is no folder"):
        follow(folder, False, lambda: None)
    folder.mkdir()
    with pytest.raises(UserError, match="holds no run yet"):
        follow(folder, False, lambda: None)

    def begin() -> None:
        a_run(folder, [*ROWS, FINAL])

    follow(folder, True, begin)


def test_a_servers_folder_stands_for_its_run(tmp_path):
    (tmp_path / "server.toml").write_text('[server]\nout = "here"\n')
    assert watch.folder_of(tmp_path) == tmp_path / "here"
    assert watch.folder_of(tmp_path / "here") == tmp_path / "here"


def test_at_a_terminal_it_draws(tmp_path):
    import sys

    folder = a_run(tmp_path / "a", [*ROWS, FINAL])
    shown = seen_at_a_terminal([sys.executable, "-m", "fedxl", "watch", str(folder)], COLUMNS="90").decode()
    assert "a: finished" in shown
    assert "█" in shown
    assert shown.count("best round 10") == 1
