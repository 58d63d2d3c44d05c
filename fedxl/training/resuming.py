"""What must be the same when a run is resumed, and what may change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedxl.errors import require

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
    require(
        before.get(STATES) == now.get(STATES),
        "this run began with another version of fedxl, whose states differ: finish it with that version, or begin a "
        "new run",
    )
    changed = [
        f"{key} was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if key not in FREE and before.get(key) != now.get(key)
    ]
    advice = "; write what it was into its config, or begin a new run"
    require(not changed, f"this run began with other settings: {'; '.join(changed)}{advice}")
