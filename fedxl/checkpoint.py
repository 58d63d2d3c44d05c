"""State on disk: safetensors, written whole or not at all, and checked when read. Never pickle."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedxl.errors import first_line

BROKEN = (SafetensorError, OSError, ValueError, KeyError, TypeError)  # what reading a damaged file may raise
KEEP = 2  # checkpoints; the one before the last is there in case the last is damaged


class Checkpoint(NamedTuple):
    path: Path
    tensors: dict[str, Tensor]
    info: dict[str, Any]


def write_atomically(path: Path, content: bytes) -> None:
    """The file holds all of `content` after this and nothing of it before, whenever process or machine stop."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, content: Any) -> None:
    """For programs, and for people who look."""
    write_atomically(path, (json.dumps(plain(content), indent=1) + "\n").encode())


def plain(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON does not know.

    >>> plain({"auroc": float("nan"), "rates": (0.1, 0.3)})
    {'auroc': None, 'rates': [0.1, 0.3]}
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_checkpoint(
    folder: Path, round: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any], keep: int | None = None
) -> Path:
    """Write the state after `round`, then drop all but the last two, or all but this one and that of round `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    # Views and expanded tensors share memory, which the format does not hold.
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    described = json.dumps(dict(info))
    metadata = {"info": described, "digest": _digest(described, whole)}
    path = _path(folder, round)
    write_atomically(path, save(whole, metadata))
    files = _files(folder)
    for old in files[:-KEEP] if keep is None else set(files) - {path, _path(folder, keep)}:
        old.unlink()
    return path


def load_checkpoint(folder: Path, round: int) -> Checkpoint | None:
    """The state after `round`, or None if there is none, or none that is whole."""
    try:
        return _load(_path(folder, round))
    except BROKEN:
        return None


def load_latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a line for every newer one that is damaged."""
    complaints: list[str] = []
    for path in reversed(_files(folder)):
        try:
            return _load(path), complaints
        except BROKEN as error:
            reason = first_line(error)
            complaints.append(f"checkpoint {path.name} is damaged ({reason}); going back to the one before it")
            # Out of the way, so that it does not count among the last ones that are kept.
            path.rename(path.with_suffix(".damaged"))
    return None, complaints


def _path(folder: Path, round: int) -> Path:
    return folder / f"round-{round:08d}.safetensors"


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.safetensors"))


def _load(path: Path) -> Checkpoint:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _digest(metadata["info"], tensors) != metadata["digest"]:
        raise ValueError("its contents do not match their checksum")
    return Checkpoint(path, tensors, json.loads(metadata["info"]))


def _digest(info: str, tensors: Mapping[str, Tensor]) -> str:
    """Of all there is to know, names, types, shapes and bytes: the format itself would not notice a flipped bit."""
    digest = hashlib.sha256(info.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        # Seen as bytes, because numpy knows no bfloat16.
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
