"""A run's folder as one process writes it: settings, metrics, checkpoints, scores and the model.

A checkpoint that does not match its checksum is renamed. One that cannot be read may be whole: then no file is
changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedxl import __version__
from fedxl.data.examples import Holding
from fedxl.errors import UserError, first_line, require
from fedxl.evaluation import histogram, scores
from fedxl.evaluation.histogram import Histograms
from fedxl.evaluation.scores import Scores
from fedxl.files import cannot_read, plain, read_bytes, read_json, write_atomically
from fedxl.training import run_folder
from fedxl.training.rounds import Task
from fedxl.training.run_folder import Member, Row
from fedxl.tree import add_tensor


class RunWriter:
    """Opens the folder of a new run, or of one to be resumed, and holds a lock on it."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path, self.metrics, self.checkpoints = path, path / run_folder.METRICS, path / run_folder.CHECKPOINTS
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.lock = (path / run_folder.LOCK).open("w")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.close()
            raise UserError(f"another process is working on {path}; wait for it or stop it") from None
        except OSError as error:
            raise UserError(f"cannot write to {path}: {error.strerror}") from None
        if not resume and (self.checkpoints.exists() or self.metrics.exists()):
            self.lock.close()
            how = f"resume it (`fedxl resume {path}`, in Python resume=True)"
            raise UserError(f"{path} already holds a run; {how}, or choose another folder")

    def write(self, name: str, text: str | bytes) -> None:
        content = text.encode() if isinstance(text, str) else text
        self._guard(lambda: write_atomically(self.path / name, content))

    def describe(self, task: Task, described: Mapping[str, Any], resume: bool) -> None:
        """Write run.json and what it has digests of; of a run that goes on, what is missing and still the same."""
        about = self.path / run_folder.ABOUT
        if not resume or not about.exists():  # a run may have been killed before it wrote it
            kept = beside(task)
            for name, content in kept.items():
                self.write(name, content)
            # Last: where it is, the others are, whenever the disk was full or the process killed.
            self.write_json(
                about.name, {**described, **{DIGESTS[name]: _sha256(file) for name, file in kept.items()}}
            )
            return
        known = read_json(about)
        missing = [name for name, digest in DIGESTS.items() if digest in known and not (self.path / name).exists()]
        kept = beside(task) if missing else {}
        for name in missing:
            if name in kept and known[DIGESTS[name]] == _sha256(kept[name]):
                self.write(name, kept[name])

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self.write(name, json.dumps(content, indent=1) + "\n")

    def save(self, round: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        self._guard(lambda: save_checkpoint(self.checkpoints, round, tensors, info))

    def load(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint, and a line about each damaged one."""
        return load_latest(self.checkpoints)

    def append(self, row: Mapping[str, Any]) -> None:
        """One line of metrics, on disk when this returns; NaN is written as null, which JSON knows."""

        def write() -> None:
            with self.metrics.open("a") as file:
                file.write(json.dumps(plain(row)) + "\n")
                file.flush()
                os.fsync(file.fileno())

        self._guard(write)

    def rewind(self, round: int, regular: Callable[[int], bool]) -> tuple[list[Row], list[str]]:
        """Keep the regular evaluations up to `round`, for the rest will be done again: these, and any complaints."""
        rows, unreadable = run_folder.read_metrics(self.path)
        kept = [row for row in rows if row["round"] <= round and regular(row["round"]) and "test" not in row]
        self.write(self.metrics.name, "".join(json.dumps(plain(row)) + "\n" for row in kept))
        return kept, [f"{unreadable} unreadable line(s) in {self.metrics.name} left out"] if unreadable else []

    def save_result(
        self, found: Mapping[str, Scores], counts: Mapping[str, Histograms], weights: Mapping[str, Tensor]
    ) -> None:
        """The chosen model: its scores on held-back data by split, or counts of them, and its weights."""
        if found:
            self._guard(lambda: scores.save(self.path / run_folder.SCORES, found))
        if counts:
            self._guard(lambda: histogram.save(self.path / run_folder.CURVES, counts))
        self._guard(lambda: write_atomically(self.path / run_folder.WEIGHTS, sealed(weights)))

    def _guard(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            raise UserError(
                f"cannot write to {self.path}: {error.strerror}; earlier states are intact: free some space and "
                f"`fedxl resume {self.path}`"
            ) from error

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.close()


def members(names: Sequence[str], holdings: Sequence[Holding]) -> list[Member]:
    return [Member(name, held.positives, held.negatives) for name, held in zip(names, holdings, strict=True)]


# Files beside run.json, by what it calls their digests.
DIGESTS = {run_folder.PREPARATION: "preparation_digest", run_folder.TRAINED_ON: "trained_on_digest"}


def beside(task: Task) -> dict[str, bytes]:
    """The content of these files: how examples were made, and which were trained on, as far as they are here."""
    found: dict[str, bytes] = {}
    if task.preparation is not None:
        found[run_folder.PREPARATION] = task.preparation.to_text().encode()
    if (digests := task.digests()) is not None:
        buffer = io.BytesIO()
        np.save(buffer, digests, allow_pickle=False)
        found[run_folder.TRAINED_ON] = buffer.getvalue()
    return found


def describe_run(task: Task, privacy: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json holds: settings, members, and where the run began. privacy: what all rounds will have spent."""
    content = {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": dict(task.description),
        "select": task.problem.select,
        **task.form._asdict(),
        "members": [member._asdict() for member in task.members],
        "environment": environment(),
        **privacy,
    }
    if task.preparation is not None:
        content["preparation_digest"] = _sha256(task.preparation.to_text().encode())
    return plain(content)  # type: ignore[no-any-return]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def environment() -> dict[str, str]:
    """The versions that a result may depend on, and the machine."""
    return {
        "fedxl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }


# State: safetensors, written whole or not at all, and checked when read. Never pickle.

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
    path = _path(folder, round)
    write_atomically(path, sealed(tensors, info), private)
    files = _files(folder)
    for old in files[:-KEEP] if keep is None else set(files) - {path, _path(folder, keep)}:
        old.unlink()
    return path


def sealed(tensors: Mapping[str, Tensor], info: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """The content of a file with a digest of all that it holds; without info, the same bytes each time."""
    # Copies, because views and expanded tensors share memory, which the format does not hold.
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    described = json.dumps(dict(info))
    # Of two entries, the format may write either first.
    return save(whole, {"digest": _digest(described, whole)} | ({"info": described} if info else {}))


def metadata_of(content: bytes) -> dict[str, str]:
    """What a safetensors file says of itself; empty if that is nothing. Raises one of `BROKEN` if it is damaged."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return dict(header["__metadata__"]) if "__metadata__" in header else {}


def load_checkpoint(folder: Path, round: int) -> Checkpoint | None:
    """The state after `round`, or None if there is none, or none that is whole."""
    path = _path(folder, round)
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return None
    try:
        return unsealed(path, content)
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
            return unsealed(path, content), complaints
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


def unsealed(path: Path, content: bytes) -> Checkpoint:
    """What `sealed` made these bytes of, which were read: if a disk fails, a mapped file would kill the process.

    Raises one of `BROKEN` if they are damaged.
    """
    tensors, metadata = load(content), metadata_of(content)
    described = metadata.get("info", "{}")
    if _digest(described, tensors) != metadata["digest"]:
        raise ValueError("its contents do not match their checksum")
    info = json.loads(described)
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
VERSION = 5


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
