"""Watching over processes: who is alive, and that nobody stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fedxl.deploy.storage import offer_turns, turn
from fedxl.deploy.supervise import children, status
from fedxl.deploy.supervise.status import Status
from tests.conftest import PATIENCE, until


def test_a_process_that_was_killed_is_not_alive_even_if_nobody_has_noticed():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    assert Status(status.RUNNING, child.pid, "").alive
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has taken notice
    assert not Status(status.RUNNING, child.pid, "").alive, "a zombie"
    child.wait()
    assert not Status(status.RUNNING, child.pid, "").alive


def test_a_status_is_read_as_it_was_written_or_not_at_all(tmp_path):
    assert status.read(tmp_path) is None
    status.write(tmp_path, status.FAILED, "why")
    assert status.read(tmp_path) == (status.FAILED, os.getpid(), "why")
    (tmp_path / status.FILE).write_text("[")
    assert status.read(tmp_path) is None


PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
time.sleep(3600)
"""


def test_whatever_happens_children_and_their_children_are_stopped():
    relatives: list[int] = []

    def go_wrong() -> None:
        with children.stopping_all() as started:
            started.append(subprocess.Popen([sys.executable, "-c", PARENT]))
            until(lambda: bool(children.descendants(started[0].pid)), lambda: started[0].poll() is None)
            relatives.extend([started[0].pid, *children.descendants(started[0].pid)])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        go_wrong()
    assert len(relatives) == 2
    assert until(lambda: not any(Status(status.RUNNING, pid, "").alive for pid in relatives))


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
def test_asking_twice_does_not_stop_the_stopping(again):
    with Stubborn(again) as child, children.stopping_all() as started:
        started.append(child)
    assert child.returncode == -signal.SIGKILL


def test_an_orphan_of_a_party_is_found_by_its_environment(tmp_path):
    """Its parent is gone, it ignores SIGINT, and nobody knows of it."""
    orphan = (
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'], stdout=-3, stderr=-3).pid)"
    )
    homes = {name: {**os.environ, "FLWR_HOME": str(tmp_path / name / "flower")} for name in ("a", "b")}
    mine, other = (
        int(subprocess.run([sys.executable, "-c", orphan], env=home, capture_output=True, check=True).stdout)
        for home in homes.values()
    )
    try:
        with children.stopping_all([tmp_path / "a" / "flower"]):
            assert Status(status.RUNNING, mine, "").alive
        assert not Status(status.RUNNING, mine, "").alive
        assert Status(status.RUNNING, other, "").alive, "another party's is left alone"
    finally:
        os.kill(other, signal.SIGKILL)


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
