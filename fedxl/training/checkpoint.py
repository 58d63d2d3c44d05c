"""State on disk: safetensors, written whole or not at all, and checked when read. Never pickle.

A file that does not match its checksum is renamed. One that cannot be read may be whole: then no file is changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedxl.errors import UserError, first_line, require
from fedxl.files import cannot_read, read_bytes, write_atomically
from fedxl.tree import add_tensor

# What the content of a damaged file may raise, once it is in memory.
BROKEN = (SafetensorError, ValueError, KeyError, TypeError, AssertionError, RuntimeError)
KEEP = 2  # checkpoints; the one before the last is there in case the last is damaged


class Checkpoint(NamedTuple):
    path: Path
    tensors: dict[str, Tensor]
    info: dict[str, Any]


def save_checkpoint(
    folder: Path,
    round: int,
    tensors: Mapping[str, Tensor],
    info: Mapping[str, Any],
    keep: int | None = None,
    private: bool = False,
) -> Path:
    """Write the state after `round`, then drop all but the last two, or all but this one and that of round `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    # Views and expanded tensors share memory, which the format does not hold.
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    described = json.dumps(dict(info))
    metadata = {"info": described, "digest": _digest(described, whole)}
    path = _path(folder, round)
    write_atomically(path, save(whole, metadata), private)
    files = _files(folder)
    for old in files[:-KEEP] if keep is None else set(files) - {path, _path(folder, keep)}:
        old.unlink()
    return path


def load_checkpoint(folder: Path, round: int) -> Checkpoint | None:
    """The state after `round`, or None if there is none, or none that is whole."""
    path = _path(folder, round)
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return None
    try:
        return _parsed(path, content)
    except BROKEN:
        return None


def load_latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a line for every newer one that is damaged."""
    complaints: list[str] = []
    try:
        files = _files(folder)
    except FileNotFoundError:
        return None, complaints
    except OSError as error:
        raise cannot_read(folder, error) from error
    for path in reversed(files):
        content = read_bytes(path)
        try:
            return _parsed(path, content), complaints
        except BROKEN as error:
            reason = first_line(error)
            complaints.append(f"checkpoint {path.name} is damaged ({reason}); going back to the one before it")
            try:  # so that it does not count among the last ones that are kept
                path.rename(path.with_suffix(".damaged"))
            except OSError as error:
                raise UserError(f"cannot set the damaged {path} aside: {error.strerror or error}") from error
    return None, complaints


def _path(folder: Path, round: int) -> Path:
    return folder / f"round-{round:08d}.safetensors"


def _files(folder: Path) -> list[Path]:
    # Not by glob, which takes a folder that cannot be read for an empty one.
    names = os.listdir(folder)
    return sorted(folder / name for name in names if name.startswith("round-") and name.endswith(".safetensors"))


def _parsed(path: Path, content: bytes) -> Checkpoint:
    """The checkpoint in these bytes, which were read: if a disk fails, a mapped file would kill the process."""
    tensors = load(content)
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    if _digest(metadata["info"], tensors) != metadata["digest"]:
        raise ValueError("its contents do not match their checksum")
    info = json.loads(metadata["info"])
    if not isinstance(info, dict):
        raise ValueError("it does not say what it is")
    return Checkpoint(path, tensors, info)


def _digest(info: str, tensors: Mapping[str, Tensor]) -> str:
    """Of all there is to know, names, types, shapes and bytes: the format itself would not notice a flipped bit."""
    digest = hashlib.sha256(info.encode())
    for name in sorted(tensors):
        add_tensor(digest, name, tensors[name])
    return digest.hexdigest()


# What may change between the beginning of a run and its resumption without changing its results so far.
FREE = {
    f"run.{name}"
    for name in (
        *("rounds", "patience", "checkpoint_every", "metrics", "track", "tracking_uri"),
        *("executor", "compile", "device", "clients_at_once"),
    )
}
STATES = "task.states"  # which states checkpoints hold; another number is another version's
VERSION = 4


def require_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UserError unless the settings that a run began with are those that it is resumed with."""
    other = "this run began with another version of fedxl, whose states differ"
    same = before.get(STATES) == now.get(STATES)
    require(same, f"{other}: finish it with that version, or begin a new run")
    changed = [
        f"{key} was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if key not in FREE and before.get(key) != now.get(key)
    ]
    advice = "; write what it was into its config, or begin a new run"
    require(not changed, f"this run began with other settings: {'; '.join(changed)}{advice}")
