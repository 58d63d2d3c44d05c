"""What a tracker is, and how a run calls it: a tracker that fails costs a line, never the run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedxl.errors import UserError, first_line, printable

Row = Mapping[str, Any]  # a metrics row, as in metrics.jsonl
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
GIVE_UP = 3  # failures in a row; each may have waited for a network
MOST = 1000  # numbers of one row that are tracked; MLflow takes no more in one request


class Tracked(NamedTuple):
    """The run that is followed."""

    folder: Path
    settings: Mapping[str, Any]  # by dotted names
    metric: str  # the validation metric that the best round is chosen by
    resumed: bool
    round: int  # the last round done
    history: Sequence[Row]  # the evaluations up to it

    @property
    def name(self) -> str:
        return self.folder.resolve().name


class Tracker(Protocol):
    """Stores the metrics of one run elsewhere. `begin` comes first; all methods may raise whatever they like."""

    def begin(self, run: Tracked) -> None:
        """A new run, or one that is resumed: then what was stored after its last round is void."""

    def write(self, row: Row) -> None:
        """One more metrics row. The last one of a run has the key "test"."""

    def end(self, state: str) -> None:
        """Nothing comes any more: finished, stopped (and may be resumed) or failed."""


class Trackers:
    """All trackers of a run. What one missed while it failed is written once it works again."""

    def __init__(self, trackers: Mapping[str, Tracker], say: Callable[[str], None]) -> None:
        self.followers = [_Follower(name, tracker, say) for name, tracker in trackers.items()]

    def begin(self, run: Tracked) -> None:
        self._tell(lambda tracker: tracker.begin(run))

    def write(self, row: Row) -> None:
        self._tell(lambda tracker: tracker.write(row))

    def end(self, state: str) -> None:
        self._tell(lambda tracker: tracker.end(state))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for each in self.followers:
            each.todo.append(call)
            each.work()


class _Follower:
    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        self.name, self.tracker, self.say = name, tracker, say
        self.todo: list[Callable[[Tracker], None]] = []
        self.failures = 0

    def work(self) -> None:
        """Do all there is to do, in order, until something fails."""
        if self.failures >= GIVE_UP:
            return
        try:
            while self.todo:
                self.todo[0](self.tracker)
                self.todo.pop(0)
                self.failures = 0
        except UserError:
            raise  # a library that is not there, or settings that are wrong: said before the first round
        except Exception as error:  # of whatever library, disk or network
            self.failures += 1
            what = f"tracking with {self.name} failed ({printable(first_line(error))}); the run continues"
            if self.failures == 1:
                self.say(f"{what}, and the next evaluation tries again")
            elif self.failures == GIVE_UP:
                self.say(f"{what} without it")
                self.todo.clear()


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a metrics row by names that TensorBoard and MLflow both take.

    >>> scalars({"round": 5, "steps": 80, "validation": {"auroc": 0.9, "pauc@0.3": 0.8, "recall": None}})
    {'run/steps': 80.0, 'validation/auroc': 0.9, 'validation/pauc_at_0.3': 0.8}
    """
    tables = [(name, value) for name, value in row.items() if isinstance(value, Mapping)]
    sites = [(f"{name}/{site}", told) for name, table in tables for site, told in table.items()]
    run = {name: value for name, value in row.items() if name != "round"}
    found: dict[str, float] = {}
    # Metrics of whole splits first, then those of single sites.
    for prefix, table in [("run", run), *tables, *sites]:
        for name, value in table.items() if isinstance(table, Mapping) else ():
            if isinstance(value, (int, float)) and math.isfinite(value) and len(found) < MOST:
                key, count = _name(f"{prefix}/{name}"), 1
                while key in found:  # two sites whose names differ in characters that no key can have
                    count += 1
                    key = f"{_name(f'{prefix}/{name}')}_{count}"
                found[key] = float(value)
    return found


def _name(text: str) -> str:
    return re.sub(r"[^\w/.-]", "_", text.replace("@", "_at_"), flags=re.ASCII)[:200]
