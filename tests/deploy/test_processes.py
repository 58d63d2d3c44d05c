"""`fedxl deploy local`: who is restarted, who is given up, and that nobody stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedxl.deploy import processes
from fedxl.deploy.processes import MAX_CRASHES, USER_ERROR, Party, stop, stopping
from fedxl.deploy.storage import offer_turns, turn
from fedxl.errors import UserError
from tests.conftest import PATIENCE, until


def party(folder: Path, code: str) -> Party:
    return Party("site a", folder, [sys.executable, "-c", code])


def going(one: Party, lines: list[str]) -> bool:
    return one.keep_running(dict(os.environ), lines.append)


def test_a_party_that_crashes_is_restarted_with_growing_pauses_until_there_is_no_hope(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PAUSE", (0.001, 0.002))
    one, lines = party(tmp_path, "raise RuntimeError('no table')"), list[str]()
    told = f"site a crashed {MAX_CRASHES + 1} times, the last time with code 1: RuntimeError: no table; see "
    with pytest.raises(UserError, match=told):
        until(lambda: going(one, lines))
    assert len(lines) == MAX_CRASHES
    assert lines[0] == "site a crashed (code 1); restarting it in 0.001 s"
    assert lines[-1] == "site a crashed (code 1); restarting it in 0.002 s"


def test_a_party_that_has_said_what_its_user_must_do_ends_everything_with_that(tmp_path):
    one = party(tmp_path, f"import sys; print('fedxl: there is no file x.csv'); sys.exit({USER_ERROR})")
    with pytest.raises(UserError, match=r"^site a stopped: there is no file x\.csv$"):
        until(lambda: going(one, []))


@pytest.mark.parametrize(
    ("code", "why"),
    [("raise MemoryError('8 GB')", r"\(code 1\): MemoryError: 8 GB$"),
     ("import os; os.kill(os.getpid(), 9)", r"\(code -9\): it said nothing; is there enough memory\?$")],
)  # fmt: skip
def test_why_data_were_not_prepared_is_in_the_last_line(tmp_path, monkeypatch, capfd, code, why):
    """For a federation on one machine shows this line, and the others stand in a site's log."""
    run = subprocess.run
    monkeypatch.setattr(
        processes.subprocess, "run", lambda command, **more: run([sys.executable, "-c", code], **more)
    )
    with pytest.raises(UserError, match=why):
        processes.prepare(tmp_path)
    assert ("Traceback" in capfd.readouterr().err) == ("raise" in code), "the rest is not lost"


def test_a_party_that_was_killed_is_restarted_and_one_that_has_finished_is_not(tmp_path):
    mark = tmp_path / "mark"
    one = party(tmp_path, f"import pathlib, time; p = pathlib.Path({str(mark)!r})\n"
                          "if not p.exists(): p.touch(); time.sleep(3600)")  # fmt: skip
    lines: list[str] = []
    assert until(lambda: not going(one, lines) and mark.exists())
    one.process.kill()
    assert until(lambda: going(one, lines))
    assert lines == ["site a crashed (code -9); restarting it in 0.5 s"]


def sleeper(code: str = "import time; time.sleep(3600)", **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], **options)


def test_whatever_happens_all_processes_are_stopped(tmp_path):
    one = party(tmp_path, "")
    one.process = sleeper()

    def go_wrong() -> None:
        with stopping([one]):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        go_wrong()
    assert one.process.returncode == -signal.SIGTERM


STUBBORN = """
import os, signal, sys
def ask(number, frame):
    os.kill(os.getppid(), int(sys.argv[1]))
    print("asked", flush=True)
signal.signal(signal.SIGTERM, ask)
print("ready", flush=True)
while True:
    signal.pause()
"""


class Stubborn(subprocess.Popen):
    """Asked to stop, it asks its parent to stop, and stays. Whoever waits for it then runs out of patience."""

    def __init__(self, again: signal.Signals) -> None:
        super().__init__([sys.executable, "-c", STUBBORN, str(again.value)], stdout=subprocess.PIPE)
        assert self.stdout.readline() == b"ready\n"

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            return super().wait()
        assert self.stdout.readline() == b"asked\n"
        raise subprocess.TimeoutExpired(self.args, timeout)


@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM])
def test_asking_twice_does_not_stop_the_stopping(tmp_path, again):
    one = party(tmp_path, "")
    with Stubborn(again) as child, stopping([one]):
        one.process = child
    assert child.returncode == -signal.SIGKILL


PARENT = """
import subprocess, sys, time
from fedxl.deploy.processes import die_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], preexec_fn=die_with_parent)
print(child.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a service of Linux")
def test_a_party_ends_when_whoever_started_it_is_killed():
    parent = sleeper(PARENT, stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    with parent:
        parent.kill()
    assert until(lambda: not alive(child))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_stop_asks_first_and_then_kills(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.1)
    deaf = sleeper("import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True); time.sleep(3600)",
                   stdout=subprocess.PIPE)  # fmt: skip
    with deaf:
        assert deaf.stdout.readline() == b"x\n"
        stop([deaf])
    assert deaf.returncode == -signal.SIGKILL


def test_sites_on_one_machine_take_turns(tmp_path, monkeypatch):
    monkeypatch.setenv(*next(iter(offer_turns(tmp_path / "turns", 2).items())))
    lock, pair, working, most, done = threading.Lock(), threading.Barrier(2), 0, 0, 0

    def work() -> None:
        nonlocal working, most, done
        with turn():
            with lock:
                working += 1
                most = max(most, working)
            pair.wait()  # two at a time, or this never ends
            time.sleep(0.1)  # in which a third would come in, if it could
            with lock:
                working -= 1
                done += 1

    threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert (most, done) == (2, 6)


def test_a_turn_is_given_back_by_dying(tmp_path, monkeypatch):
    environment = offer_turns(tmp_path / "turns", 1)
    code = "from fedxl.deploy.storage import turn; t = turn(); t.__enter__(); print('mine', flush=True); input()"
    command, environ = [sys.executable, "-c", code], {**os.environ, **environment}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"mine\n"
        child.kill()
    monkeypatch.setenv(*next(iter(environment.items())))
    with turn():
        pass
