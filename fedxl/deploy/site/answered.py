"""What a site has been asked under the same noise: a private round has one answer.

A site's noise follows from its private seed, the round and its number, so that a round that is requested again,
after a crash, gives the same bits. A server that requests it again with other weights would get two answers under one
noise, and by subtracting them what the noise hides. So the site keeps a digest of each round's request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedxl.errors import UserError, require
from fedxl.files import read_json, write_atomically
from fedxl.tree import add_tensor

FILE = "answered.json"
MOST = 2**30  # bytes: more rounds than any run has
ASKED = ("round", "number", "base", "visits", "config", "facts_of_all", "preparation")  # what an answer depends on


def question(facts: Mapping[str, Any], tensors: Mapping[str, Tensor], data: str) -> str:
    """A digest of all that an answer depends on; tensors: those of the request, and of the state it starts from."""
    content = hashlib.sha256(json.dumps([data, *(str(facts.get(name, "")) for name in ASKED)]).encode())
    for name in sorted(tensors):
        add_tensor(content, name, tensors[name])
    return content.hexdigest()


def answers_before(folder: Path, round: int) -> int:
    """In how many rounds before this one the site has given an answer, whether the server took it or not."""
    return sum(int(known) < round for known in _read(folder / FILE))


def require_same_question(folder: Path, round: int, asked: str) -> None:
    """Note what is asked in this round, before it is answered; refuse another question in the same round."""
    path = folder / FILE
    known = _read(path)
    before = known.setdefault(str(round), asked)
    require(
        before == asked,
        f"round {round} has been answered to another request; the noise of one answer must not serve for two",
    )
    try:
        write_atomically(path, json.dumps(known).encode(), private=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; nothing is answered") from None


def _read(path: Path) -> dict[str, str]:
    try:
        return {str(round): str(asked) for round, asked in read_json(path, MOST).items()}
    except FileNotFoundError:
        return {}
