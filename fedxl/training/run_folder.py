"""A run's folder as others read it: `read_run`. It loads no torch: those who watch a run need none.

Files may come from others, or be written at this moment: whatever is in them is checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedxl import metrics, toml
from fedxl.errors import UserError, printable, require
from fedxl.evaluation import histogram, scores
from fedxl.evaluation.histogram import Histogram, Histograms
from fedxl.evaluation.scores import Scores
from fedxl.files import read_bytes, read_json
from fedxl.metrics import COUNTS, TIME_METRICS
from fedxl.options import convert

CONFIG = "config.toml"
ABOUT = "run.json"
METRICS = "metrics.jsonl"
SCORES = "scores.npz"
CURVES = "curves.npz"  # counts of scores in bins
PREPARATION = "preparation.json"
OLDER = ("label_scores.npz", "label_curves.npz")  # what the last version wrote of several labels
WEIGHTS = "model.safetensors"
TRAINED_ON = "trained_on.npy"  # digests of the training examples
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
SEED = "seed-"  # of the names of runs that differ by their seed, in one folder
STATUS = "status.json"  # of a deployed run: which sites are connected or waited for, and what the server has refused
COLLAPSED = "collapsed"  # in a metrics row: the model gives all examples one score
STOPPED_EARLY = "stopped_early"  # in the last metrics row of a run that its patience ended
LARGEST = 2**53  # of whole numbers in a file; no run counts further
DTYPES = ("float32", "float64", "int64", "int32", "bool")  # of examples
Row = dict[str, Any]  # a line of metrics.jsonl


class Member(NamedTuple):
    """A client or site, and how many training examples it holds."""

    name: str
    positives: int
    negatives: int


class Form(NamedTuple):
    """What a network takes and gives: its model is rebuilt from this and from the settings."""

    shape: tuple[int, ...]  # of an example
    dtype: str  # of its numbers, as the network gets them
    score_shape: tuple[int, ...]  # of a score; () is one number
    columns: tuple[str, ...] = ()  # of the data frames that examples came in
    labels: tuple[str, ...] = ()  # the names of several labels, each of which has a score
    scale: str = ""  # of images: "bytes", which it gets in [0, 1], "whole" or "floats"; empty: not known

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all labels; one label is called ""."""
        return self.labels or ("",)


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """One run: what it was told, who took part, what was measured, and the scores of its chosen model."""

    name: str
    settings: Mapping[str, Any]  # by dotted names
    rows: Sequence[Row]  # one per evaluation, by round
    done: Row | None = None  # the last row, of a run that has finished
    members: Sequence[Member] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    begun: str = ""
    chosen_by: str = "auroc"  # a metric, with a minus if less is better
    config: str = ""  # the text of config.toml
    about: Mapping[str, Any] = field(default_factory=dict)  # run.json
    path: Path | None = None  # its folder; None if it was kept in memory
    label: str = ""  # what it is called among runs that differ by seed only
    in_memory: tuple[Mapping[str, Scores], Mapping[str, Histograms]] = ({}, {})  # scores and counts without a folder

    def __repr__(self) -> str:
        """One line, as "Run fedxl2-3, test auroc 0.9840, in runs/fedxl2-3"."""
        value = self.values.get(self.metric)
        judged = self.state if value is None else f"{self.split} {printable(self.metric)} {value:.4f}"
        return ", ".join([f"Run {printable(self.name)}", judged, *([f"in {self.path}"] if self.path else [])])

    @cached_property
    def scores(self) -> Mapping[str, Scores]:
        """By split: those of the chosen model, where they are known."""
        if self.path is None:
            return self.in_memory[0]
        older = next((name for name in OLDER if (self.path / name).exists()), "")
        told = f"{self.path} holds the {older} of an older version of fedxl, which this one does not read"
        require(not older, f"{told}; train it again, or remove that file to do without it")
        return scores.load(self.path / SCORES)

    @cached_property
    def histograms(self) -> Mapping[str, Histograms]:
        """By split: sites' counts of scores in bins, where these are all that is known."""
        found = self.in_memory[1] if self.path is None else histogram.load(self.path / CURVES)
        return {split: each for split, each in found.items() if split not in self.scores}

    @property
    def counts(self) -> Mapping[str, Mapping[str, Histogram]]:
        """By split and label: the counts of all sites together."""
        return {
            split: {label: histogram.pooled(sites.values()) for label, sites in each.items()}
            for split, each in self.histograms.items()
        }

    @property
    def folder(self) -> Path:
        """Of a run that has one."""
        assert self.path is not None, "the run was kept in memory"
        return self.path

    @property
    def source(self) -> Path:
        """What says how it was set up."""
        return self.folder / ABOUT

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
    def latest(self) -> Row:
        return self.done or (self.rows[-1] if self.rows else {})

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
    def timed(self) -> bool:
        """Whether it is about time to event: its scores have times, or its metrics need them."""
        scored = any(found.time is not None for found in self.scores.values())
        return scored or any(metrics.key(name).partition("@")[0] in TIME_METRICS for name in self.values)

    @property
    def sites_heard(self) -> str:
        """How many sites its metrics rest on, as "2 of 3 sites"; empty if all data were in one place."""
        source = self.done if self.split == "test" else self.shown
        return sites_heard(source or {}, self.split)

    def told(self, split: str) -> Mapping[str, Any]:
        """By site: the metrics that it told of this split at the chosen round, or a text, why it told none."""
        return ((self.done if split == "test" else self.shown) or {}).get(f"{split}_by_site") or {}

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of several labels; empty if there is one."""
        known = [found.labels for found in self.scores.values()]
        known += [tuple(found) for found in self.histograms.values()]
        known.append(tuple(map(str, self.about.get("labels") or ())))
        return next((names for names in known if names not in ((), ("",))), ())

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
    def state(self) -> str:
        if self.done is None:
            return f"at round {self.last_round}"
        return "finished (stopped early)" if self.done.get(STOPPED_EARLY) else "finished"

    @property
    def form(self) -> Form:
        """What its network takes and gives. Raises UserError if run.json does not say."""
        old = f"{self.path} holds a run of an older version, which did not record what its network takes"
        require("shape" in self.about, f"{old}; train it again")
        return read_form(self.about, self.source)


def sites_heard(row: Mapping[str, Any], split: str) -> str:
    """How many sites an evaluation rests on: "2 of 3 sites"; empty if the row has no metrics by site."""
    told = row.get(f"{split}_by_site")
    if not isinstance(told, Mapping) or not told:
        return ""
    return f"{sum(isinstance(each, Mapping) for each in told.values())} of {len(told)} sites"


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run, from the command line or from Python."""
    return (path / CONFIG).is_file() or (path / ABOUT).is_file()


def seeds_in(path: Path) -> list[Path]:
    """The runs of `train --seeds` in a folder, by seed; none if it is a run itself."""
    if is_run(path):
        return []
    found = (child for child in path.glob(f"{SEED}*") if child.name.removeprefix(SEED).isdecimal())
    return sorted(filter(is_run, found), key=lambda child: int(child.name.removeprefix(SEED)))


def run_dirs(paths: Iterable[Path]) -> list[Path]:
    """The runs among these folders and directly under them, those of several seeds a folder deeper; each once."""
    found: dict[Path, None] = {}
    for path in paths:
        require(path.is_dir(), f"there is no folder {path}")
        inside = _runs_in(path)
        require(bool(inside), f"{path} holds no run: no {CONFIG} or {ABOUT} in it or directly below it")
        found |= dict.fromkeys(inside)
    return list(found)


def _runs_in(path: Path) -> list[Path]:
    if is_run(path):
        return [path]
    each = ([child] if is_run(child) else seeds_in(child) for child in sorted(path.iterdir()))
    return [run for runs in each for run in runs]


def require_run(path: Path, otherwise: str) -> None:
    """Raises UserError if a folder is not that of a run: that it holds runs, which could be named, or `otherwise`."""
    if is_run(path):
        return
    inside = _runs_in(path) if path.is_dir() else []
    count = "a run" if len(inside) == 1 else f"{len(inside)} runs"
    raise UserError(f"{path} holds {count}: name one, {inside[0]}" if inside else otherwise)


def read_run(path: Path) -> Run:
    """A run from its folder. What a run has not written yet is missing; metrics rows may be damaged."""
    about = read_json(path / ABOUT) if (path / ABOUT).exists() else {}
    config = read_bytes(path / CONFIG).decode(errors="replace") if (path / CONFIG).is_file() else ""
    tables = toml.read(path / CONFIG) if config else {}
    told = {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
    measured = without_settings(path)
    try:
        run = replace(measured, **described(about), config=config)
        return replace(run, settings={**run.settings, **told})
    except (ValueError, TypeError, KeyError, AttributeError, UserError) as error:
        raise UserError(f"cannot read {path / ABOUT}: {type(error).__name__}; remove it to do without it") from None


def described(about: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says of a run, as fields of `Run`."""
    return {
        "settings": convert(about.get("settings", {}), dict, "settings"),
        "members": [_member(item) for item in about.get("members", [])],
        "environment": {str(key): str(value) for key, value in about.get("environment", {}).items()},
        "begun": str(about.get("begun", "")),
        "chosen_by": str(about.get("select", "auroc")),
        "about": about,
    }


def without_settings(path: Path) -> Run:
    """What a run has measured, whatever run.json and config.toml hold."""
    rows, _ = read_metrics(path)
    evaluations = {row["round"]: row for row in rows if "test" not in row}
    done = next((row for row in reversed(rows) if "test" in row), None)
    return Run(path.resolve().name, {}, [evaluations[round] for round in sorted(evaluations)], done, path=path)


def _member(item: Any) -> Member:
    counts = [item["positives"], item["negatives"]]
    if not all(isinstance(count, int) and 0 <= count <= LARGEST for count in counts):
        raise ValueError("counts are whole numbers")
    return Member(str(item["name"]), *counts)


def read_form(content: Mapping[str, Any], path: Path) -> Form:
    """What a network takes and gives, as run.json and model.json say it."""
    from fedxl.risks.several import label_names  # loads torch

    kinds: dict[str, Any] = {"shape": tuple[int, ...], "dtype": str, "score_shape": tuple[int, ...]}
    for name in kinds:
        require(name in content, f"{path} lacks '{name}'")
    form = Form(**{name: convert(content[name], kind, f"{path}: {name}") for name, kind in kinds.items()})
    sizes = (*form.shape, *form.score_shape)
    small = len(sizes) <= 8 and all(0 < size <= 10**6 for size in sizes) and len(form.shape) > 0
    require(small, f"{path}: shapes of {list(form.shape)} and {list(form.score_shape)} are invalid")
    require(form.dtype in DTYPES, f"{path}: dtype must be one of {', '.join(DTYPES)}")
    columns, labels, scale = content.get("columns", []), content.get("labels", []), content.get("scale", "")
    require(scale in ("", "bytes", "whole", "floats"), f"{path}: scale must be bytes, whole, floats or empty")
    named = isinstance(columns, list) and all(isinstance(name, str) for name in columns)
    require(named and len(columns) in (0, form.shape[0]), f"{path}: columns must name each number of an example")
    right = isinstance(labels, list) and all(isinstance(name, str) for name in labels)
    require(right and (not labels or (len(labels),) == form.score_shape), f"{path}: labels must name each score")
    return form._replace(columns=tuple(columns), labels=label_names(labels) if labels else (), scale=scale)


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
    names = (file.stem.rpartition("-")[2] for file in (path / CHECKPOINTS).glob("round-*.safetensors"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def read_metrics(path: Path) -> tuple[list[Row], int]:
    """The metrics rows of a run, and how many lines were unreadable (a crash may cut one off)."""
    rows: list[Row] = []
    unreadable = 0
    try:
        text = read_bytes(path / METRICS).decode(errors="replace")
    except FileNotFoundError:
        return rows, unreadable
    for line in text.splitlines():
        try:
            rows.append(_row(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            unreadable += 1
    return rows, unreadable


def _row(line: str) -> Row:
    """A line as a metrics row, if a run can have written it."""
    row: Row = json.loads(line)
    _require_number(row["round"], int)
    _require_number(row.get("best_round", 0), int)
    for name in ("seconds", "training_seconds", "steps"):
        _require_number(row.get(name, 0))
    for name in ("train", "validation", "test"):
        _require_metrics(row.get(name, {}))
        for told in row.get(f"{name}_by_site", {}).values():
            _require_metrics({} if isinstance(told, str) else told)  # a text is the reason why a site sent none
        for table in row.get(f"{name}_by_label", {}).values():
            _require_metrics(table)
    return row


def _require_metrics(table: dict[str, Any]) -> None:
    for name, value in table.items():
        unknown = value is None and name not in COUNTS
        _require_number(0 if unknown else value)


def _require_number(value: Any, kind: Any = int | float) -> None:
    small = not isinstance(value, int) or abs(value) <= LARGEST
    if not isinstance(value, kind) or isinstance(value, bool) or not small:
        raise ValueError("it is no metric of a run")
