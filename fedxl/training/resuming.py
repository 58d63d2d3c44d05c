"""What must be the same when a run is resumed, and what may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from fedxl.algorithms.protocol import AnyAlgorithm
from fedxl.errors import require
from fedxl.training.simulation import plain

# What may change between the beginning of a run and its resumption without changing its results so far.
FREE = {
    f"run.{name}"
    for name in (
        *("rounds", "patience", "checkpoint_every", "metrics", "track", "tracking_uri"),
        *("executor", "compile", "device", "clients_at_once"),
    )
}
SINCE = {"task.examples", "task.validation", "task.risk_name"}  # absent from checkpoints of older versions
# What a run of an older version had that did not record it.
OLDER = {
    "algorithm.level": "free",
    "run.participation": "uniform",
    "run.trace": "",
    "run.cohort_weights": "unbiased",
}
BY_SIZE = "run.cohorts_by_size"  # whether clients are drawn by size; up to version 0.3 they never were


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], algorithm: AnyAlgorithm) -> None:
    """One line unless the settings that a run began with are those that it is resumed with."""
    now = with_defaults(now, algorithm)
    before = with_defaults({**{key: value for key, value in OLDER.items() if key in now}, **before}, algorithm)
    alike = (before.get(name) == now.get(name) for name in ("run.weighting", "run.cohort", "run.participation"))
    require(
        not (all(alike) and BY_SIZE in now and BY_SIZE not in before),
        "this run began with fedxl 0.3 or older, which drew cohorts uniformly; with weighting = 'samples' they are "
        "drawn by size now: begin a new run, or finish this one with that version",
    )
    changed = [
        f"{key} was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if key not in FREE and before.get(key) != now.get(key) and not (key in SINCE and key not in before)
    ]
    advice = "; write what it was into its config, or begin a new run"
    require(not changed, f"this run began with other settings: {'; '.join(changed)}{advice}")


def with_defaults(settings: Mapping[str, Any], algorithm: AnyAlgorithm) -> dict[str, Any]:
    """Whether a hyper-parameter at its default was given or left out makes no difference."""
    known: tuple[Field[Any], ...] = fields(algorithm) if is_dataclass(algorithm) else ()
    defaults = plain({f"algorithm.{item.name}": item.default for item in known if item.default is not MISSING})
    return {**defaults, **settings}
