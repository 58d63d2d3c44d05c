"""Runs in several processes: `--devices N` starts them here, torchrun on one machine or on several."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Annotated, Any

import typer

from fedxl.config import experiment as configs
from fedxl.errors import UserError, require
from fedxl.training.result import Result
from fedxl.training.settings import Hooks

LIMIT = 1800.0  # seconds; compiling a deep network on one card may keep the others waiting for minutes
GRACE = 30.0  # seconds that the others have to end by themselves once a process has died
MOST = 1024  # processes on one machine; more are a typing error
LIFELINE = "FEDXL_LIFELINE"  # set for processes whose stdin closes when the one that started them dies
POLL = 0.05

Devices = Annotated[
    int, typer.Option("--devices", help="Worker processes to split clients across (one per GPU, or on the CPU).")
]
Limit = Annotated[float, typer.Option("--limit", metavar="SECONDS", help="Seconds to wait for a silent worker.")]


def follows() -> bool:
    """Whether this is one of several processes, and not the first, which alone writes and speaks."""
    return os.environ.get("RANK", "0") != "0" and one_of_several()


def execute(experiment: configs.Config, folder: Path, resume: bool, hooks: Hooks, limit: float = LIMIT) -> Result:
    """Run a config: in this process, or in those that torchrun or `start` have started."""
    require(limit > 0, f"--limit must be positive, got {limit:g}")
    if not one_of_several():
        return configs.execute(experiment, folder, resume, hooks)
    # Not before it is needed: nothing else loads torch.distributed.
    from fedxl.engine.ranks.team import LostRankError, Team, place_of, seat

    own = seat()
    if own is None:
        return configs.execute(experiment, folder, resume, hooks)
    if LIFELINE in os.environ:
        Thread(target=_end_with_parent, daemon=True).start()
    place = place_of(str(experiment.run.get("device", "auto")), own)
    try:
        with Team.joined(own, place, limit) as team:
            return configs.execute_on(team, place.device, experiment, folder, resume, hooks)
    except LostRankError as error:
        raise UserError(f"{error}; continue with: fedxl resume {folder}") from error


def follow(experiment: configs.Config, folder: Path, resume: bool, limit: float) -> None:
    """The part of a process that is not the first: it says nothing, for the first one says why a run ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the first is asked to stop, and tells the others
    try:
        execute(experiment, folder, resume, Hooks(say=lambda line: None), limit)
    except UserError as error:
        if os.environ.get("LOCAL_RANK") == "0":  # on another machine than the first process
            print(f"fedxl: {error}", file=sys.stderr)
        leave(2)
    leave()


def leave(code: int = 0) -> None:
    """End one of several processes. Threads of the network are not waited for: some abort then, and say so."""
    if one_of_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(count: int, arguments: Sequence[str], folder: Path, limit: float) -> None:
    """Start `count` processes on this machine with these arguments, and wait until all have ended."""
    require(count <= MOST, f"--devices must be at most {MOST}, got {count}")
    require(limit > 0, f"--limit must be positive, got {limit:g}")
    require(not one_of_several(), "--devices starts processes, and torchrun has started this one: leave it out")
    port, given = free_port(), [*arguments, f"--limit={limit:g}"]
    processes = [_started(rank, count, port, given) for rank in range(count)]
    leader = processes[0]

    def forward(number: int, frame: FrameType | None) -> None:
        leader.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ended = _first_to_fail(processes)
        # The others notice that one is gone, and end by themselves; whoever has not in time is killed below.
        deadline = time.monotonic() + min(limit, GRACE)
        while ended is not None and None in [p.poll() for p in processes] and time.monotonic() < deadline:
            time.sleep(POLL)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in processes:
            process.kill()
            process.wait()
    if ended is None or not leader.returncode:
        return
    if leader.returncode > 0:  # it has said what happened
        sys.exit(leader.returncode)
    code = processes[ended].returncode
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    raise UserError(f"process {ended} of the run {how}; continue with: fedxl resume {folder}")


def one_of_several() -> bool:
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _started(rank: int, count: int, port: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, LIFELINE: 1}
    threads = max(1, (os.cpu_count() or 1) // count)
    chosen = {"OMP_NUM_THREADS": threads, "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    if sys.platform == "linux":
        chosen = {"GLOO_SOCKET_IFNAME": "lo", **chosen}  # whatever this machine's name resolves to
    environment = {name: str(value) for name, value in {**chosen, **place, **here}.items()}
    # In a session of its own, so that Ctrl-C reaches the first process once, and through us.
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "start_new_session": True, "env": environment}
    if rank:
        options["stdout"] = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-m", "fedxl", *arguments], **options)


def _first_to_fail(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all; the first of them that fails, as soon as it does."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed or None not in codes:
            return failed[0] if failed else None
        time.sleep(POLL)


def _end_with_parent() -> None:
    """End this process if the one that started it is killed: otherwise it would go on, and hold the run's folder."""
    while os.read(0, 1):  # not through sys.stdin, which Python cannot close while another thread reads it
        pass
    os._exit(1)
