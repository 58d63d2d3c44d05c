"""Several ranks in a test: real processes that talk by gloo, forked so that none has to load torch again."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from fedxl.cli.processes import free_port
from fedxl.engine.ranks.team import Place, Seat, Team
from tests.conftest import PATIENCE


def on_ranks(size: int, work: Callable[[Team], Any]) -> list[int]:
    """Run `work` on so many ranks and wait for them; their exit codes. What it finds out goes into files."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        ranks = [context.Process(target=_rank, args=(rank, size, port, work)) for rank in range(size)]
        for rank in ranks:
            rank.start()
    for rank in ranks:
        rank.join(PATIENCE)
    return [rank.exitcode for rank in ranks]


def _rank(rank: int, size: int, port: int, work: Callable[[Team], Any]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    code = 1
    try:
        with Team.joined(Seat(rank, size, rank, size), Place("cpu"), PATIENCE) as team:
            work(team)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
