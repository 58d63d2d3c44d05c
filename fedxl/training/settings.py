"""How a run goes: every setting with its default, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch

from fedxl import progress, registry
from fedxl.data.examples import Weighting
from fedxl.data.participation import Participation
from fedxl.engine.executors import EXECUTORS
from fedxl.errors import UserError, first_line, printable, require, unknown
from fedxl.metrics import Item, key
from fedxl.models.functional import PRECISIONS
from fedxl.risks import XRisk
from fedxl.tracking import TRACKERS

DTYPES = {"float32": torch.float32, "float64": torch.float64}
# A larger value is a typing error, and would use up all memory before the first step.
MOST = {
    "rounds": 10**9, "local_steps": 10**6, "batch1": 10**6, "batch2": 10**6, "eval_every": 10**9,
    "checkpoint_every": 10**9, "patience": 10**9, "cohort": 10**9, "clients_at_once": 10**9,
}  # fmt: skip
MOST_READ = 10**8  # examples per client and round


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to run; what to optimise and by which steps are the risk's and the algorithm's settings."""

    rounds: int = 100  # a round ends with a communication between clients and server
    local_steps: int = 32  # K: steps of a client in a round
    batch1: int = 32  # examples of S1 per step; methods without pairs read batch1 + batch2 examples of any label
    batch2: int = 32  # examples of S2 per step
    cohort: int = 0  # clients per round, drawn anew each time (by size if they count by samples); 0: all
    participation: Participation = "uniform"  # who takes part: uniform cohorts, or those available by a trace
    trace: str = ""  # a JSON file of who is available when, for participation = "trace"
    weighting: Weighting = "clients"  # every client counts the same, or "samples": by its examples
    seed: int = 0  # of all random draws
    eval_every: int = 10  # rounds between two evaluations
    checkpoint_every: int = 10  # rounds between two checkpoints
    fpr: tuple[float, ...] = (0.1, 0.3, 0.5)  # false positive rates up to which partial AUC is reported
    metrics: tuple[Item, ...] = ()  # more metrics: "package.module:function"; in Python also functions or Metrics
    select: str = ""  # the validation metric that chooses the best round ("-name": less is better); empty: the risk's
    patience: int = 0  # evaluations without a better validation metric after which the run ends; 0: it never does
    train_metrics: bool = False  # evaluate on the training data, too
    track: tuple[str, ...] = ()  # where metrics go, too: "tensorboard", "mlflow", or your "package.module:Class"
    tracking_uri: str = ""  # MLflow's store; empty: MLFLOW_TRACKING_URI, else mlflow.db beside the run's folder
    executor: str = "auto"  # loop, vmap, graph (on a GPU); auto: what is fastest for model and device
    compile: bool = True  # whether graph compiles the step, which takes a while before the first round
    precision: str = "fp32"  # of the network in training: fp32, or tf32 and bf16, which are faster on a GPU
    clients_at_once: int = 0  # clients that the executor runs together; 0: the whole cohort
    device: str = "auto"  # cpu, cuda, ...; auto: a GPU if there is one
    dtype: str = "float32"  # of weights and scores: float32 or float64

    def __post_init__(self) -> None:
        for name in ("rounds", "local_steps", "batch1", "batch2", "eval_every", "checkpoint_every"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("cohort", "seed", "patience", "clients_at_once"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        for name, most in MOST.items():
            require(getattr(self, name) <= most, f"{name} must be at most {most:,}, got {getattr(self, name)}")
        reads = self.local_steps * (self.batch1 + self.batch2)
        few = reads <= MOST_READ
        require(few, f"local_steps * (batch1 + batch2) must be at most {MOST_READ:,} per round, got {reads}")
        traced = self.participation == "trace"
        needed = "participation = 'trace' needs trace, a JSON file of who is available"
        require(bool(self.trace) or not traced, needed)
        require(traced or not self.trace, f"trace is for participation = 'trace', not for '{self.participation}'")
        require(all(0 < limit <= 1 for limit in self.fpr), f"fpr must lie in (0, 1], got {list(self.fpr)}")
        choices = {"executor": ("auto", *EXECUTORS), "dtype": DTYPES, "precision": PRECISIONS}
        for name, known in {**choices, "participation": get_args(Participation)}.items():
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        for name in self.track:
            if name not in TRACKERS and not registry.own(name):
                raise unknown("tracker", name, TRACKERS)
        fits = self.dtype == "float32" or self.precision == "fp32"
        require(fits, f"precision = {self.precision} is for dtype = float32, not for {self.dtype}")

    def selects_by(self, risk: XRisk) -> str:
        """The metric that the best model is chosen by."""
        return self.select or risk.metric


def pick_device(name: str) -> torch.device:
    """The device of this name; auto: a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        require(device.type != "meta", "the device 'meta' holds no numbers; use cpu or cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"cannot use device '{name}': {first_line(error)}") from None
    return device


class Progress(NamedTuple):
    """What `on_progress` receives after every round."""

    round: int
    rounds: int
    seconds: float
    record: dict[str, Any] | None  # the latest evaluation
    remarks: Mapping[str, list[Any]] = {}  # what the engine remarked on this round
    select: str = ""  # the metric that chooses the best round

    @property
    def latest(self) -> str:
        """That metric of the latest evaluation, as "validation auroc 0.9312"; empty if there is none."""
        name = key(self.select)
        value = ((self.record or {}).get("validation") or {}).get(name)
        return "" if value is None else f"validation {printable(name)} {value:.4f}"


@dataclass(frozen=True)
class Hooks:
    """Functions that a run calls, and when it stops."""

    on_progress: Callable[[Progress], None] = lambda progress: None  # after every round
    say: Callable[[str], None] = progress.say  # one line, as on the executor chosen
    should_stop: Callable[[], bool] = lambda: False  # after every round; if true, the run saves and stops
    stop_collapsed: bool = False  # whether a run stops, too, at an evaluation that finds its scores collapsed
