"""Inputs that nobody would write, by the hundred: each must end in a result or in one line, and before long."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import random
import resource
import signal
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedxl import UserError

WORK = 60.0  # seconds of computing, not of waiting, that a case may take: load on the machine does not count
MEMORY = 2**33  # bytes that they may ask for, besides what is there before


def complaints(cases: Sequence[Any], act: Callable[[Any], None]) -> list[str]:
    """What went wrong with which case, all of them in one process of its own, which may hang or be killed."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_each, args=(cases, act, theirs))
    process.start()
    theirs.close()
    begun, found = -1, []
    try:
        while True:
            begun, wrong = ours.recv()
            found += [f"case {begun}, {cases[begun]!r:.2000}: {wrong}"] if wrong else []
    except EOFError:
        process.join()
    if process.exitcode:
        found.append(f"case {begun}, {cases[begun]!r:.2000}: the process ended with {process.exitcode}")
    return found


def _each(cases: Sequence[Any], act: Callable[[Any], None], tell: multiprocessing.connection.Connection) -> None:
    faulthandler.disable()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = MEMORY + pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Not a handler of Python's, which a loop inside a library would not let in.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for number, case in enumerate(cases):
        tell.send((number, ""))
        signal.setitimer(signal.ITIMER_PROF, WORK)
        tell.send((number, _wrong(case, act)))
    signal.setitimer(signal.ITIMER_PROF, 0)


def _wrong(case: Any, act: Callable[[Any], None]) -> str:
    try:
        act(case)
    except UserError as error:
        line = str(error)
        return "" if line and len(line.splitlines()) == 1 else f"not one line: {line!r}"
    except BaseException:
        return traceback.format_exc()
    return ""


def mutated_bytes(content: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, lost, doubled, moved or made up."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        place = chance.randrange(len(data) + 1)
        length = chance.choice((1, 2, 4, 8, 100))
        piece = data[place : place + length]
        kind = chance.randrange(5)
        if kind == 0 and piece:
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[place : place + length]
        elif kind == 2:
            data[place:place] = piece
        elif kind == 3:
            data[place : place + length] = chance.choice((b"\0", b"\xff")) * len(piece)
        else:
            data[place:place] = chance.randbytes(length)
    return bytes(data)
