"""`fit`: cohort -> engine round -> aggregate -> evaluate -> checkpoint, until the rounds are done."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedxl import sampling, tree
from fedxl.algorithm import Algorithm
from fedxl.algorithms import ALGORITHMS, Method
from fedxl.checkpoint import Checkpoint
from fedxl.data.federation import Federation, Weighting, from_arrays
from fedxl.data.source import Source, checked
from fedxl.engine.executors import EXECUTORS, choose
from fedxl.engine.simulator import Simulator
from fedxl.errors import UserError, require, unknown
from fedxl.evaluate import Evaluator
from fedxl.models import Score, Weights, check_output, load, scorer, weights_of
from fedxl.options import call
from fedxl.risk import XRisk
from fedxl.rundir import RunDir

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to run; what to optimise and by which steps are the risk's and the algorithm's settings."""

    rounds: int = 100
    local_steps: int = 32  # K: steps between two communications
    batch1: int = 32  # examples of S1 a step, and of S2; methods without pairs read batch1 + batch2 of any label
    batch2: int = 32
    cohort: int = 0  # clients a round, drawn anew each time; 0: all
    weighting: Weighting = "clients"  # every client counts the same, or "samples": by its examples
    seed: int = 0
    eval_every: int = 10  # rounds
    checkpoint_every: int = 10
    fpr: tuple[float, ...] = (0.1, 0.3, 0.5)  # limits at which partial AUC is reported
    select: str = ""  # the validation figure by which the best model is chosen; empty: the risk's own
    train_metrics: bool = False  # evaluate on the training data, too
    executor: str = "auto"  # loop, vmap
    clients_at_once: int = 0  # how many the executor runs together; 0: the whole cohort
    device: str = "auto"  # cpu, cuda, ...
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("rounds", "local_steps", "batch1", "batch2", "eval_every", "checkpoint_every"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("cohort", "seed", "clients_at_once"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        require(all(0 < limit <= 1 for limit in self.fpr), f"fpr must lie in (0, 1], got {list(self.fpr)}")
        if self.executor not in ("auto", *EXECUTORS):
            raise unknown("executor", self.executor, ("auto", *EXECUTORS))
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)


# What may change between the beginning of a run and its resumption without changing its results so far.
FREE = {"rounds", "checkpoint_every", "executor", "device", "clients_at_once"}


@dataclass
class Result:
    """What a run came to: the chosen model, its figures, and how it got there."""

    model: nn.Module
    weights: Weights
    best_round: int
    validation: dict[str, float]
    test: dict[str, float]
    history: list[dict[str, Any]]
    seconds: float
    interrupted: bool = False
    server: Any = field(default=None, repr=False)


class Progress(NamedTuple):
    """Told to `on_progress` after every round."""

    round: int
    rounds: int
    seconds: float
    record: dict[str, Any] | None  # the latest evaluation


@dataclass(frozen=True)
class Hooks:
    """How a run talks to whoever started it."""

    on_progress: Callable[[Progress], None] = lambda progress: None
    say: Callable[[str], None] = lambda line: None
    should_stop: Callable[[], bool] = lambda: False


def fit(
    model: nn.Module,
    clients: Federation | Iterable[tuple[Tensor, Tensor]],
    risk: XRisk,
    algorithm: str | Method = "fedxl2",
    *,
    validation: tuple[Tensor, Tensor] | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    hooks: Hooks | None = None,
    **settings: Any,
) -> Result:
    """Train `model` on the clients' data for an X-risk, and choose the best round on validation data.

    clients: (x, y) for each, labels 0/1; algorithm: a name, or a `Method` of your own; out: a folder for metrics and
    checkpoints (`resume` goes on from the last one). The model itself is left as it is: `Result.model` is a trained
    copy. All other keywords are fields of `Settings` or of the algorithm.
    """
    names = {item.name for item in fields(Settings)}
    run = call(Settings, {name: value for name, value in settings.items() if name in names}, "run")
    options = {name: value for name, value in settings.items() if name not in names}
    federation = clients if isinstance(clients, Federation) else from_arrays(clients)
    hooks = hooks or Hooks()
    trainer = Trainer(model, federation, risk, algorithm, options, run, validation, test, hooks)
    return trainer.train(None if out is None else Path(out), resume)


class Trainer:
    """One run: its parts put together and checked, then the loop over rounds."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        risk: XRisk,
        algorithm: str | Method,
        options: Mapping[str, Any],
        run: Settings,
        validation: tuple[Tensor, Tensor] | None,
        test: tuple[Tensor, Tensor] | None,
        hooks: Hooks,
    ) -> None:
        if isinstance(algorithm, str) and algorithm not in ALGORITHMS:
            raise unknown("algorithm", algorithm, ALGORITHMS)
        method = ALGORITHMS[algorithm] if isinstance(algorithm, str) else algorithm
        self.run, self.risk, self.hooks = run, risk, hooks
        self.device, self.dtype = _device(run.device), DTYPES[run.dtype]
        self.model = copy.deepcopy(model).to(self.device, self.dtype)
        self.settings = {"algorithm": str(algorithm), **options, **asdict(run)}
        federation = federation.pooled() if method.centralized else federation
        for name, side in zip(("S1", "S2"), risk.sides, strict=True):
            some = any(len(part) for part in federation.side(side))
            require(some, f"the risk needs {side} examples ({name}), and no client holds any")
        probe = federation.source.fetch(torch.as_tensor(federation.parts[0][:2]))
        check_output(self.model, self._cast(probe).to(self.device), risk.score_shape)

        self.algorithm = build_algorithm(method, scorer(self.model, True), risk, federation, options, run.weighting)
        num_clients = len(federation.parts)
        cohort = run.cohort or num_clients
        require(cohort <= num_clients, f"cohort is {cohort}, but there are only {num_clients} clients")
        self.num_clients = num_clients
        self.engine = Simulator(
            algorithm=self.algorithm,
            federation=federation,
            executor=EXECUTORS[self._executor(cohort)],
            local_steps=run.local_steps,
            batch1=run.batch1,
            batch2=run.batch2,
            seed=run.seed,
            weighting=run.weighting,
            clients_at_once=run.clients_at_once,
            device=self.device,
            dtype=self.dtype,
        )
        self.evaluator = Evaluator(scorer(self.model, False), risk, run.fpr, self.dtype)
        self.sources = self._sources({"validation": validation, "test": test})
        self.select = run.select or risk.metric
        self._check_selection()

    def train(self, out: Path | None, resume: bool = False, files: Mapping[str, str] | None = None) -> Result:
        """Run all rounds that are still to do. `files` go into the folder of a new run before its first round."""
        if out is None:
            self._begin(None, resume)
            return self._train()
        with RunDir(out, resume) as folder:
            for name, text in (files or {}).items():
                folder.write(name, text)
            self._begin(folder, resume)
            return self._train()

    def _begin(self, folder: RunDir | None, resume: bool) -> None:
        """The state before the first round, or the one that the folder's newest whole checkpoint holds."""
        self.folder = folder
        self.server = self.algorithm.init(weights_of(self.model))
        self.round = -1 if self.algorithm.prelude else 0  # the last round done
        self.best, self.best_round, self.best_value = self.server.weights, -1, -math.inf
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        if folder and resume:
            checkpoint, complaints = folder.load()
            for line in complaints:
                self.hooks.say(line)
            if checkpoint:
                self._restore(checkpoint)
            elif complaints:
                self.hooks.say("no whole checkpoint is left; starting from the beginning")
            self.history = folder.rewind(self.round)

    def _train(self) -> Result:
        run, began, interrupted = self.run, time.monotonic() - self.seconds, False
        while self.round < run.rounds and not interrupted:
            self.round += 1
            self._round()
            interrupted = self.hooks.should_stop()
            last = self.round == run.rounds
            self.seconds = time.monotonic() - began
            if last or (self.round > 0 and self.round % run.eval_every == 0):
                self._evaluate()
            if self.folder and (last or interrupted or self.round % run.checkpoint_every == 0):
                self._checkpoint(self.folder)
            latest = self.history[-1] if self.history else None
            self.hooks.on_progress(Progress(self.round, run.rounds, self.seconds, latest))
        return self._result(interrupted and self.round < run.rounds)

    def _round(self) -> None:
        algorithm: Algorithm = self.algorithm
        if self.round == 0 and algorithm.prelude:
            algorithm = algorithm.prelude
        cohort = sampling.cohort(self.run.seed, self.round, self.num_clients, self.run.cohort)
        updates = self.engine.run_round(algorithm, self.server, self.round, cohort)
        self.server = algorithm.aggregate(self.server, updates)

    def _evaluate(self) -> None:
        self._require_finite()
        weights = self.server.weights
        record: dict[str, Any] = {
            "round": self.round,
            "steps": int(self.server.step),
            "seconds": self.seconds,
        }
        for name in ("train", "validation"):
            if name in self.sources:
                record[name] = self.evaluator.figures(weights, self.sources[name])
        if "validation" in self.sources:
            value = _selected(record["validation"], self.select)
            if value > self.best_value:
                self.best, self.best_round, self.best_value = weights, self.round, value
        else:
            self.best, self.best_round = weights, self.round
        self.history.append(record)
        if self.folder:
            self.folder.append(record)

    def _require_finite(self) -> None:
        require(
            tree.finite(self.server.weights.params),
            f"the weights were no longer finite by round {self.round}; a smaller lr or sigmoid scores would help",
        )

    def _checkpoint(self, folder: RunDir) -> None:
        self._require_finite()
        state = {"server": self.server, "population": self.engine.population, "best": self.best}
        info = {
            "round": self.round,
            "best_round": self.best_round,
            "best_value": self.best_value,
            "seconds": self.seconds,
            "settings": self.settings,
        }
        folder.save(self.round, tree.pack(state), info)

    def _restore(self, checkpoint: Checkpoint) -> None:
        tensors, info = checkpoint.tensors, checkpoint.info
        _require_same(info["settings"], self.settings)
        done, wanted = info["round"], self.run.rounds
        require(done <= wanted, f"this run is at round {done} already, beyond rounds = {wanted}")
        state = tree.unpack({"server": self.server, "best": self.best}, tensors)
        self.server, self.best = tree.to(state["server"], self.device), tree.to(state["best"], self.device)
        prefix = "population.rounds."
        members = sorted(int(name.removeprefix(prefix)) for name in tensors if name.startswith(prefix))
        cut = {name.removeprefix("population."): t for name, t in tensors.items() if name.startswith("population.")}
        self.engine.restore(self.server, members, cut)
        self.round, self.best_round, self.best_value = info["round"], info["best_round"], info["best_value"]
        self.seconds = info["seconds"]

    def _result(self, interrupted: bool) -> Result:
        best = {} if not self.history else next((r for r in self.history if r["round"] == self.best_round), {})
        test: dict[str, float] = {}
        if not interrupted:
            if "test" in self.sources:
                test = self.evaluator.figures(self.best, self.sources["test"])
            if self.folder:
                final = {"round": self.round, "best_round": self.best_round, "seconds": self.seconds}
                self.folder.append({**final, "test": test})
                self.folder.save_model({**self.best.params, **self.best.buffers})
        return Result(
            model=load(self.model, self.best),
            weights=self.best,
            best_round=self.best_round,
            validation=best.get("validation", {}),
            test=test,
            history=self.history,
            seconds=self.seconds,
            interrupted=interrupted,
            server=self.server,
        )

    def _executor(self, cohort: int) -> str:
        if self.run.executor != "auto":
            return self.run.executor
        name, why = choose(self.model, self.device, min(cohort, self.run.clients_at_once or cohort))
        self.hooks.say(f"executor: {name} ({why})")
        return name

    def _sources(self, given: Mapping[str, tuple[Tensor, Tensor] | None]) -> dict[str, Source]:
        sources: dict[str, Source] = {
            name: checked(split[0], split[1], name).to(self.device)
            for name, split in given.items()
            if split is not None
        }
        return sources | ({"train": self.engine.source} if self.run.train_metrics else {})

    def _check_selection(self) -> None:
        if "validation" not in self.sources:
            return
        labels = self.sources["validation"].labels
        ranked = not self.risk.score_shape
        require(
            not ranked or 0 < int(labels.sum()) < len(labels),
            "validation must hold both classes, or the best model cannot be chosen on it",
        )
        known = {"-risk"} | ({"auroc", "ap"} | {f"pauc@{limit:g}" for limit in self.run.fpr} if ranked else set())
        if self.select not in known:
            raise unknown("figure to select by", self.select, known)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x


def build_algorithm(
    method: Method,
    score: Score,
    risk: XRisk,
    federation: Federation,
    options: Mapping[str, Any],
    weighting: Weighting = "clients",
) -> Algorithm:
    """The algorithm with its options checked; what it needs of the task (risk, share of positives) is filled in."""
    known = {item.name for item in fields(method.build)}  # type: ignore[arg-type]
    given: dict[str, Any] = {"score": score}
    if "risk" in known:
        given["risk"] = risk
    if "positive_share" in known and not options.get("positive_share"):
        given["positive_share"] = federation.positive_share(weighting)
    algorithm: Algorithm = call(method.build, {**options, **given}, "algorithm", trusted=set(given))
    return algorithm


def _selected(figures: Mapping[str, float], select: str) -> float:
    return -figures["risk"] if select == "-risk" else figures[select]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"cannot use device '{name}': {str(error).splitlines()[0]}") from None
    return device


def _require_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    changed = [
        f"{key} was {before.get(key)!r} and is now {plain(now.get(key))!r}"
        for key in sorted(before.keys() | now.keys())
        if key not in FREE and before.get(key) != plain(now.get(key))
    ]
    require(not changed, f"this run began with other settings: {'; '.join(changed)}")
