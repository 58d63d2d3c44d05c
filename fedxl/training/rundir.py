"""A run's folder as one process writes it: settings, metrics, checkpoints, scores and the model."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fedxl.errors import UserError
from fedxl.evaluation import binned, label_counts, scored
from fedxl.files import plain, write_atomically
from fedxl.training.checkpoint import Checkpoint, load_latest, save_checkpoint
from fedxl.training.run_files import CURVES, LABEL_CURVES, LABEL_SCORES, LOCK, SCORES, read_metrics

# How the scores of splits, or counts of them in bins, are written.
SAVE: Mapping[str, Callable[[Path, Any], None]] = {
    SCORES: scored.save,
    LABEL_SCORES: scored.save,
    CURVES: binned.save,
    LABEL_CURVES: label_counts.save,
}


class RunDir:
    """Opens the folder of a new run, or of one to be resumed, and holds a lock on it."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path, self.metrics, self.checkpoints = path, path / "metrics.jsonl", path / "checkpoints"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.lock = (path / LOCK).open("w")
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

    def write(self, name: str, text: str) -> None:
        self._guard(lambda: write_atomically(self.path / name, text.encode()))

    def save(self, round: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        self._guard(lambda: save_checkpoint(self.checkpoints, round, tensors, info))

    def load(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint, and a line about each damaged one."""
        return load_latest(self.checkpoints)

    def append(self, record: Mapping[str, Any]) -> None:
        """One line of metrics, on disk when this returns; NaN is written as null, which JSON knows."""

        def write() -> None:
            with self.metrics.open("a") as file:
                file.write(json.dumps(plain(record)) + "\n")
                file.flush()
                os.fsync(file.fileno())

        self._guard(write)

    def rewind(self, round: int, regular: Callable[[int], bool]) -> tuple[list[dict[str, Any]], list[str]]:
        """Keep the regular evaluations up to `round`, for the rest will be done again: these, and any complaints."""
        records, unreadable = read_metrics(self.path)
        kept = [r for r in records if r["round"] <= round and regular(r["round"]) and "test" not in r]
        self.write(self.metrics.name, "".join(json.dumps(plain(record)) + "\n" for record in kept))
        return kept, [f"{unreadable} unreadable line(s) in {self.metrics.name} left out"] if unreadable else []

    def save_result(self, scores: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """The chosen model: its scores on held-back data by file and split, and its weights for `load_state_dict`."""
        for name, splits in scores.items():
            if splits:
                self._guard(lambda name=name, splits=splits: SAVE[name](self.path / name, splits))  # type: ignore[misc]
        whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
        self._guard(lambda: write_atomically(self.path / "model.safetensors", save(whole)))

    def _guard(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            raise UserError(
                f"cannot write to {self.path}: {error.strerror}; earlier states are intact: make room and "
                f"`fedxl resume {self.path}`"
            ) from error

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.close()
