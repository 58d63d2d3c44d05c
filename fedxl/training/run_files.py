"""What the files of a run's folder tell. It loads no torch: those who watch a run need none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedxl.files import read_bytes
from fedxl.metrics import COUNTS

CONFIG = "config.toml"
ABOUT = "run.json"
SCORES = "scores.npz"
LABEL_SCORES = "label_scores.npz"
CURVES = "curves.npz"
LABEL_CURVES = "label_curves.npz"
LOCK = ".lock"
COLLAPSED = "collapsed"  # in a metrics row: the model gives all examples one score
STOPPED_EARLY = "stopped_early"  # in the last metrics row of a run that its patience ended
LARGEST = 2**53  # of whole numbers in a metrics row; no run counts further


def being_written(path: Path) -> bool | None:
    """Whether a process of this machine works on a run's folder; None where the system does not say."""
    try:  # not the lock itself: a run that begins at that moment would find it taken
        held = Path("/proc/locks").read_text()
        number = (path / LOCK).stat().st_ino
    except FileNotFoundError as error:
        return None if error.filename == "/proc/locks" else False
    except OSError:
        return None
    # Lines as "1: FLOCK ADVISORY WRITE 1234 fd:01:5678 0 EOF"; devices are left out, which some file systems misname.
    return any(field.endswith(f":{number}") for line in held.splitlines() for field in line.split())


def checkpointed(path: Path) -> int:
    """The round of a run's newest checkpoint; 0 if there is none."""
    names = (file.stem.rpartition("-")[2] for file in (path / "checkpoints").glob("round-*.safetensors"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run, from the command line or from Python."""
    return (path / CONFIG).is_file() or (path / ABOUT).is_file()


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The metrics rows of a run, and how many lines were unreadable (a crash may cut one off)."""
    records: list[dict[str, Any]] = []
    unreadable = 0
    try:
        text = read_bytes(path / "metrics.jsonl").decode(errors="replace")
    except FileNotFoundError:
        return records, unreadable
    for line in text.splitlines():
        try:
            records.append(_record(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            unreadable += 1
    return records, unreadable


def _record(line: str) -> dict[str, Any]:
    """A line as a metrics row, if a run can have written it."""
    record: dict[str, Any] = json.loads(line)
    _require_number(record["round"], int)
    _require_number(record.get("best_round", 0), int)
    for name in ("seconds", "training_seconds", "steps"):
        _require_number(record.get(name, 0))
    for name in ("train", "validation", "test"):
        _require_metrics(record.get(name, {}))
        for told in record.get(f"{name}_by_site", {}).values():
            _require_metrics({} if isinstance(told, str) else told)  # a text is the reason why a site sent none
        for table in record.get(f"{name}_by_label", {}).values():
            _require_metrics(table)
    return record


def _require_metrics(table: dict[str, Any]) -> None:
    for name, value in table.items():
        unknown = value is None and name not in COUNTS
        _require_number(0 if unknown else value)


def _require_number(value: Any, kind: Any = int | float) -> None:
    small = not isinstance(value, int) or abs(value) <= LARGEST
    if not isinstance(value, kind) or isinstance(value, bool) or not small:
        raise ValueError("it is no metric of a run")
