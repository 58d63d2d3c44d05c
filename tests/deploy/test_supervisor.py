"""The supervisor: what dies is started again, with pauses, and who has made progress is forgiven."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedxl[flower]")

from fedxl import UserError
from fedxl.deploy.supervise import supervisor
from fedxl.deploy.supervise.supervisor import Child, Supervisor, environment


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(supervisor, "PAUSE", (0.01, 0.02))
    monkeypatch.setattr(supervisor, "POLL", 0.01)


def child(folder: Path, name: str, code: str, **options: object) -> Child:
    return Child(name, [sys.executable, "-c", code], folder, **options)


def run(children: list[Child], say=lambda line: None, **options: object) -> None:
    started: list = []
    try:
        Supervisor(children, dict(os.environ), say, **options).run(started)
    finally:
        for process in started:
            process.kill()
            process.wait()


COUNT = "import pathlib; f = pathlib.Path('count'); f.write_text(str(int(f.read_text() if f.exists() else 0) + 1)); "


def test_whatever_dies_is_started_again_until_the_main_process_ends_well(tmp_path):
    lines: list[str] = []
    main = child(tmp_path, "app", COUNT + "raise SystemExit(0 if f.read_text() == '4' else 7)", main=True)
    run([main], lines.append, max_crashes=10)
    assert (tmp_path / "count").read_text() == "4"
    assert lines[0] == "the app crashed (code 7); restarting it in 0.01 s"
    assert len(lines) == 3


def test_a_users_mistake_ends_it_with_the_childs_own_words(tmp_path):
    mistaken = child(tmp_path, "gateway", "print('fedxl: the port is taken', flush=True); raise SystemExit(2)")
    with pytest.raises(UserError, match=r"^the port is taken$"):
        run([mistaken, child(tmp_path, "app", "import time; time.sleep(1000)", main=True)])


def test_a_process_that_gets_nowhere_is_given_up(tmp_path):
    with pytest.raises(UserError, match=r"the app crashed 4 times without progress; see .*app.log"):
        run([child(tmp_path, "app", COUNT + "raise SystemExit(1)", main=True)], max_crashes=3)
    assert (tmp_path / "count").read_text() == "4"


def test_deaths_are_forgotten_when_there_was_progress(tmp_path):
    """Thirty deaths, with a new checkpoint before every third: the tenth used to be the last."""
    code = COUNT + "raise SystemExit(0 if f.read_text() == '30' else 1)"

    def progress() -> int:
        file = tmp_path / "count"
        return int(file.read_text() or 0) // 3 if file.exists() else 0

    run([child(tmp_path, "app", code, main=True)], progress=progress, max_crashes=4)
    assert (tmp_path / "count").read_text() == "30"


def test_who_needs_another_is_started_anew_with_it(tmp_path):
    """An app whose SuperLink has died talks to nobody: it is ended, too."""
    note = "import os, pathlib, time; pathlib.Path(f'NAME-{os.getpid()}').touch(); "
    second = "len(list(pathlib.Path().glob('app-*'))) > 1 or time.sleep(1000)"
    link = child(tmp_path, "superlink", note.replace("NAME", "link") + "time.sleep(1000)")
    app = child(tmp_path, "app", note.replace("NAME", "app") + second, needs="superlink", main=True)

    def attack() -> None:
        while not (list(tmp_path.glob("link-*")) and list(tmp_path.glob("app-*"))):
            time.sleep(0.01)
        [first] = tmp_path.glob("link-*")
        os.kill(int(first.name.partition("-")[2]), signal.SIGKILL)

    lines: list[str] = []
    thread = threading.Thread(target=attack)
    thread.start()
    run([link, app], lines.append)
    thread.join()
    assert [line.partition(" crashed")[0] for line in lines] == ["the superlink", "the app"]


def test_lines_of_a_shown_child_are_passed_on_whole(tmp_path):
    lines: list[str] = []
    (tmp_path / "app.log").write_text("of an earlier time\n")
    code = "import sys; print('one'); print('two', end='', flush=True); print(); sys.stdout.flush()"
    run([child(tmp_path, "app", code, main=True, shown=True)], lines.append)
    assert lines == ["one", "two"]


def test_reminders_are_said_at_the_beginning(tmp_path):
    lines: list[str] = []
    run([child(tmp_path, "app", "pass", main=True)], lines.append, remind=lambda: ["it expires soon"])
    assert lines == ["it expires soon"]


def test_children_have_none_of_flowers_own_settings(monkeypatch, tmp_path):
    """One of them would open a port of its own."""
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    found = environment(tmp_path, "FLWR_HOME")
    assert {name for name in found if name.startswith("FLWR_")} == {
        "FLWR_HOME", "FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"
    }  # fmt: skip
