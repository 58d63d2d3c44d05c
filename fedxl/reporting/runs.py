"""A run as a report sees it: what its folder holds, read with care, because others may have written it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedxl import metrics, toml
from fedxl.algorithms import ALGORITHMS
from fedxl.config.experiment import Config, build_risk, dump
from fedxl.errors import UserError, require
from fedxl.evaluation import binned, label_counts, scored
from fedxl.evaluation.binned import Binned, pooled
from fedxl.evaluation.label_counts import LabelCurves
from fedxl.evaluation.scored import LabelScores, Scored
from fedxl.files import read_bytes
from fedxl.options import call
from fedxl.training.members import Member, environment
from fedxl.training.privacy import promise
from fedxl.training.result import Result
from fedxl.training.run_files import (
    ABOUT,
    CONFIG,
    CURVES,
    LABEL_CURVES,
    LABEL_SCORES,
    LARGEST,
    SCORES,
    STOPPED_EARLY,
    is_run,
    read_metrics,
)
from fedxl.training.settings import Settings
from fedxl.training.simulation import flattened

LONGEST = 2**24  # bytes of run.json; a thousand sites take a tenth of a MB
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """One run: what it was told, who took part, what was measured, and the scores of its chosen model."""

    name: str
    settings: Mapping[str, Any]  # by dotted names
    rows: Sequence[Row]  # an evaluation each, by round
    done: Row | None = None  # the last row, of a run that has finished
    scored: Mapping[str, Scored] = field(default_factory=dict)
    members: Sequence[Member] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    begun: str = ""
    chosen_by: str = "auroc"  # a metric, with a minus if less is better
    config: str = ""  # the text of config.toml
    label: str = ""  # what it is called among runs that differ by seed only
    by_label: Mapping[str, LabelScores] = field(default_factory=dict)  # scores of several labels, by split
    label_curves: Mapping[str, LabelCurves] = field(default_factory=dict)  # or counts of them in bins
    counts: Mapping[str, Binned] = field(default_factory=dict)  # where `scored` was made from counts in bins: those

    @property
    def metric(self) -> str:
        """What the best round was chosen by, without its sign, as metrics rows call it."""
        return metrics.key(self.chosen_by)

    @property
    def best_round(self) -> int | None:
        return None if self.done is None else int(self.done.get("best_round", 0))

    @property
    def last_round(self) -> int:
        return int(self.rows[-1]["round"]) if self.rows else 0

    @property
    def shown(self) -> Row:
        """The evaluation of the chosen round; of a run under way the latest one."""
        chosen = next((row for row in self.rows if row["round"] == self.best_round), None)
        return chosen or (self.rows[-1] if self.rows else {})

    @property
    def epsilon(self) -> str:
        """What its differential privacy comes to by the latest row; empty if it promises none."""
        latest = self.done or (self.rows[-1] if self.rows else {})
        return promise(latest.get("privacy"))

    @property
    def split(self) -> str:
        """Which data its metrics are of: test, else validation, else none."""
        return "test" if (self.done or {}).get("test") else "validation" if self.shown.get("validation") else ""

    @property
    def values(self) -> Mapping[str, Any]:
        """Its metrics on that split."""
        source = self.done if self.split == "test" else self.shown
        return (source or {}).get(self.split) or {}

    @property
    def several(self) -> bool:
        """Whether it has several labels."""
        rows = [*self.rows, *([self.done] if self.done else [])]
        told = any(f"{self.split}_by_label" in row for row in rows)
        named = self.settings.get("risk.labels") or self.risk.startswith("several(")
        return bool(self.by_label or self.label_curves or named or told)

    @property
    def algorithm(self) -> str:
        return str(self.settings.get("algorithm.name", "?"))

    @property
    def risk(self) -> str:
        """The risk's name; of a run of `fit` how it was built."""
        return str(self.settings.get("risk.name") or self.settings.get("task.risk_name") or "?")

    @property
    def seed(self) -> Any:
        return self.settings.get("run.seed", 0)

    @property
    def centralized(self) -> bool:
        """Whether its algorithm wants all data in one place."""
        return is_centralized(self.algorithm)

    @property
    def state(self) -> str:
        if self.done is None:
            return f"at round {self.last_round}"
        return "finished (stopped early)" if self.done.get(STOPPED_EARLY) else "finished"


def is_centralized(algorithm: str) -> bool:
    """Whether an algorithm of this name wants all data in one place; one of a user's own is not looked up."""
    return bool(getattr(ALGORITHMS.get(algorithm), "centralized", False))


def run_dirs(paths: Iterable[Path]) -> list[Path]:
    """The runs among these folders and directly under them, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        require(path.is_dir(), f"there is no folder {path}")
        inside = [path] if is_run(path) else sorted(child for child in path.iterdir() if is_run(child))
        require(bool(inside), f"{path} holds no run: no {CONFIG} or {ABOUT} in it or directly below it")
        found |= dict.fromkeys(inside)
    return list(found)


def read_run(path: Path) -> Run:
    """A run from its folder. Raises UserError if a run has not written its files; metrics rows may be damaged."""
    about, config = _about(path / ABOUT), path / CONFIG
    tables = toml.read(config) if config.is_file() else {}
    told = {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
    records, _ = read_metrics(path)
    evaluations = {record["round"]: record for record in records if "test" not in record}
    counted = {} if (path / SCORES).exists() else binned.load(path / CURVES)
    return Run(
        name=path.resolve().name,
        settings={**about["settings"], **told},
        rows=[evaluations[round] for round in sorted(evaluations)],
        done=next((record for record in reversed(records) if "test" in record), None),
        scored=scored.load(path / SCORES) or binned.scores_of(counted),
        by_label=scored.load_labels(path / LABEL_SCORES),
        label_curves=label_counts.load(path / LABEL_CURVES),
        counts={split: pooled(found.values()) for split, found in counted.items()},
        members=about["members"],
        environment=about["environment"],
        begun=about["begun"],
        chosen_by=about["select"],
        config=read_bytes(config).decode() if config.is_file() else "",
    )


def from_result(name: str, label: str, config: Config, result: Result, members: Sequence[Member]) -> Run:
    """A run that was made in this process, and kept in memory."""
    done = {"best_round": result.best_round, "seconds": result.seconds, "test": result.metrics["test"]}
    last = result.history[-1]["round"] if result.history else 0
    return Run(
        name=name,
        settings=flattened(config.tables()),
        rows=result.history,
        done=None if result.interrupted else {"round": last, **done},
        scored=result.scored,
        by_label=result.by_label,
        label_curves=result.label_curves,
        members=members,
        environment=environment(),
        chosen_by=call(Settings, config.run, "run").selects_by(build_risk(config)),
        config=dump(config),
        label=label,
    )


def _about(path: Path) -> dict[str, Any]:
    """run.json, with what is missing as nothing."""
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        content = b"{}"
    require(len(content) <= LONGEST, f"{path} is too large to be what a run has written")
    try:
        told = json.loads(content)
        return {
            "settings": dict(told.get("settings", {})),
            "members": [_member(item) for item in told.get("members", [])],
            "environment": {str(key): str(value) for key, value in told.get("environment", {}).items()},
            "begun": str(told.get("begun", "")),
            "select": str(told.get("select", "auroc")),
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {type(error).__name__}; remove it to do without it") from None


def _member(item: Any) -> Member:
    counts = [item["positives"], item["negatives"]]
    if not all(isinstance(count, int) and 0 <= count <= LARGEST for count in counts):
        raise ValueError("counts are whole numbers")
    return Member(str(item["name"]), *counts)
