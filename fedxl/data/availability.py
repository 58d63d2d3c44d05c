"""Traces of availability: a file that says which clients can take part in which round.

    {"rounds": [["north", "south"], ["south"], ["north", "west"]]}

Each list is one round, the first one round 0, and after the last one the trace begins again. Clients are given by
name, or by number where they have no names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedxl.errors import UserError, kind_of, printable, require, unknown
from fedxl.files import read_json

Available = npt.NDArray[np.bool_]  # [rounds of the trace, clients]
ROUNDS = "rounds"
# Larger traces are mistakes, and would take long before the first round.
MOST_ROUNDS = 10**5
MOST_ENTRIES = 10**7


def read_trace(path: Path, names: Sequence[str]) -> Available:
    """Who of these clients is available in which round; one line for a file that does not say so."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}, which run.trace names") from None
    for key in content:
        if key != ROUNDS:
            raise unknown("key", printable(key, 60), [ROUNDS])
    rounds = content.get(ROUNDS)
    require(isinstance(rounds, list) and bool(rounds), f'{path} must read {{"rounds": [[...], ...]}}, not be empty')
    assert isinstance(rounds, list)
    many = len(rounds)
    within = many <= MOST_ROUNDS and many * len(names) <= MOST_ENTRIES
    limits = f"at most {MOST_ROUNDS:,} rounds and {MOST_ENTRIES:,} of rounds times clients"
    require(within, f"{path} has {many:,} rounds of {len(names):,} clients; {limits} are read")
    numbers = {name: number for number, name in enumerate(names)}
    found = np.zeros((many, len(names)), np.bool_)
    for round, row in enumerate(rounds):
        found[round, _row(row, numbers, f"round {round} of {path}")] = True
    return found


def _row(row: Any, numbers: dict[str, int], where: str) -> list[int]:
    """The numbers of the clients in one list."""
    require(isinstance(row, list), f"{where} must be a list of clients, not {kind_of(row)}")
    require(bool(row), f"{where} names nobody; leave such rounds out: without clients there is no round")
    found = [_number(client, numbers, where) for client in row]
    require(len(set(found)) == len(found), f"{where} names a client twice")
    return found


def _number(client: Any, numbers: dict[str, int], where: str) -> int:
    if isinstance(client, str) and client in numbers:
        return numbers[client]
    if isinstance(client, int) and not isinstance(client, bool):
        require(0 <= client < len(numbers), f"{where} names client {client}, but they are 0 to {len(numbers) - 1}")
        return client
    known = ", ".join([*numbers][:3])
    given = printable(repr(client), 60)
    raise UserError(f"{where} names {given}, which is no client; clients are {printable(known)}, ... or numbers")
