"""What a run is made of: model, data, risk and algorithm, put together and checked before anything is begun."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedxl.algorithms import ALGORITHMS, Method
from fedxl.algorithms.protocol import Algorithm
from fedxl.data.federation import Federation, Weighting
from fedxl.data.source import fingerprint, floats_as
from fedxl.digest import add_tensor
from fedxl.engine.choose import EXECUTORS, choose, executor, possible
from fedxl.engine.simulator import Simulator
from fedxl.errors import UserError, first_line, require, unknown
from fedxl.metrics import Item
from fedxl.models import Score, check_output, scorer, weights_of
from fedxl.models.layers import check_classes
from fedxl.models.precision import PRECISIONS
from fedxl.options import call
from fedxl.risks import XRisk, check_risk
from fedxl.training.evaluate import Evaluator, HeldBack, Pair, asked_for, check_selection, held_back

DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Beyond these a setting is a slip of the hand, and would take all memory before the first step.
MOST = {
    "rounds": 10**9, "local_steps": 10**6, "batch1": 10**6, "batch2": 10**6, "eval_every": 10**9,
    "checkpoint_every": 10**9, "cohort": 10**9, "clients_at_once": 10**9,
}  # fmt: skip
MOST_READ = 10**8  # examples a client and round


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
    metrics: tuple[Item, ...] = ()  # more of them: "package.module:function"; in Python also functions or Metrics
    select: str = ""  # the validation metric by which the best model is chosen; empty: the risk's own
    train_metrics: bool = False  # evaluate on the training data, too
    executor: str = "auto"  # loop, vmap, or graph on a GPU
    compile: bool = True  # whether graph fuses the step, which takes a while before the first round
    precision: str = "fp32"  # of the network in training; tf32 or bf16 are faster on a GPU
    clients_at_once: int = 0  # how many the executor runs together; 0: the whole cohort
    device: str = "auto"  # cpu, cuda, ...
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("rounds", "local_steps", "batch1", "batch2", "eval_every", "checkpoint_every"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("cohort", "seed", "clients_at_once"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        for name, most in MOST.items():
            require(getattr(self, name) <= most, f"{name} must be at most {most:,}, got {getattr(self, name)}")
        reads = self.local_steps * (self.batch1 + self.batch2)
        require(
            reads <= MOST_READ, f"local_steps * (batch1 + batch2) must be at most {MOST_READ:,} a round, got {reads}"
        )
        require(all(0 < limit <= 1 for limit in self.fpr), f"fpr must lie in (0, 1], got {list(self.fpr)}")
        if self.executor not in ("auto", *EXECUTORS):
            raise unknown("executor", self.executor, ("auto", *EXECUTORS))
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        require(
            self.dtype == "float32" or self.precision == "fp32",
            f"precision = {self.precision} is for dtype = float32, not for {self.dtype}",
        )

    def selects_by(self, risk: XRisk) -> str:
        """The metric that the best model is chosen by."""
        return self.select or risk.metric


class Task:
    """The parts of a run. `announce` is told which executor was chosen and why."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        risk: XRisk,
        algorithm: str | Method,
        options: Mapping[str, Any],
        run: Settings,
        pairs: Mapping[str, Pair | None],
        more: Mapping[str, Any],
        announce: Callable[[str], None],
    ) -> None:
        require(isinstance(risk, XRisk), f"risk must be an XRisk such as fedxl.auroc(), not {risk!r}")
        check_risk(risk)
        method = _method(algorithm)
        self.run, self.risk, self.announce = run, risk, announce
        self.device, self.dtype = pick_device(run.device), DTYPES[run.dtype]
        self.model = copy.deepcopy(model).to(self.device, self.dtype)
        self.federation = federation.pooled() if method.centralized else federation
        self.num_clients = len(self.federation.parts)
        self.cohort = 0 if method.centralized else run.cohort
        self._check_data(method)
        self.probe = self._probe()
        check_output(self.model, self.probe, risk.score_shape)

        self.score = scorer(self.model, True, run.precision)
        self.algorithm = build_algorithm(method, self.score, risk, self.federation, options, run.weighting)
        self.engine = self._engine()
        self.select = run.selects_by(risk)
        self.examiner = self._examiner(pairs)
        self.sections = {**more, "algorithm": {"name": str(algorithm), **options}}

    def _check_data(self, method: Method) -> None:
        first, second = (self.federation.side(side) for side in self.risk.sides)
        for name, side, parts in zip(("S1", "S2"), self.risk.sides, (first, second), strict=True):
            some = any(len(part) for part in parts)
            require(some, f"the risk needs {side} examples ({name}), and no client holds any")
        if method.local_pairs:
            pairs = any(len(a) and len(b) for a, b in zip(first, second, strict=True))
            require(pairs, "no client holds both sides of a pair, so there is nothing to train on; use fedxl2")
        check_classes(self.model, all(len(a) and len(b) for a, b in zip(first, second, strict=True)))
        require(
            self.cohort <= self.num_clients,
            f"cohort is {self.cohort}, but there are only {self.num_clients} clients",
        )

    def _probe(self) -> Tensor:
        x = self.federation.source.fetch(torch.as_tensor(self.federation.parts[0][:2]))
        return floats_as(x.to(self.device), self.dtype)

    def _engine(self) -> Simulator:
        run = self.run
        return Simulator(
            algorithm=self.algorithm,
            federation=self.federation,
            executor=executor(self._choose(), run.compile, self.announce),
            local_steps=run.local_steps,
            batch1=run.batch1,
            batch2=run.batch2,
            seed=run.seed,
            weighting=run.weighting,
            clients_at_once=run.clients_at_once,
            device=self.device,
            dtype=self.dtype,
            precision=run.precision,
        )

    def _choose(self) -> str:
        cohort = self.cohort or self.num_clients
        at_once = min(cohort, self.run.clients_at_once or cohort)
        if self.run.executor == "auto":
            name, why = choose(self.model, self.score, self.probe, at_once)
        else:
            name, why = possible(self.run.executor, self.device)
        if why:
            self.announce(f"executor: {name} ({why})")
        return name

    def _examiner(self, pairs: Mapping[str, Pair | None]) -> HeldBack:
        found = evaluator(self.model, self.risk, self.run)
        sources = held_back(pairs, self.probe)
        if "validation" in sources:
            check_selection(self.select, found, sources["validation"])
        return HeldBack(found, sources | ({"train": self.engine.source} if self.run.train_metrics else {}))

    @cached_property
    def description(self) -> dict[str, Any]:
        """What must be the same when a run is resumed, by dotted names, as plain JSON. All data are read for it."""
        weights = weights_of(self.model)
        shapes = {name: list(tensor.shape) for name, tensor in {**weights.params, **weights.buffers}.items()}
        parts = [len(part) for part in self.federation.parts]
        source, validation = self.federation.source, self.examiner.sources.get("validation")
        tables = {
            **self.sections,
            "run": asdict(self.run),
            "task": {
                "model": f"{len(shapes)} tensors, {_digest(shapes)}",
                "clients": f"{len(parts)} with {sum(parts)} examples, {_digest(parts)}",
                "augment": str(getattr(source, "augment", "")),
                # A glance at the data, which runs of older versions have noted; then all of them.
                "data": _digest([source.labels.tolist(), self.probe.flatten().tolist()]),
                "examples": self._examples(),
                "validation": fingerprint(validation)[:12] if validation is not None else "",
                "risk": f"{self.risk.sides}, lam {self.risk.lam}, {self.risk.score_shape} {self.risk.inner_shape}",
            },
        }
        return flattened(tables)

    def _examples(self) -> str:
        """Of all that is trained on, and who holds it."""
        digest = hashlib.sha256(fingerprint(self.federation.source).encode())
        for part in self.federation.parts:
            add_tensor(digest, "part", torch.as_tensor(part))
        return digest.hexdigest()[:12]


def flattened(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Settings by dotted names, as plain JSON."""
    flat = {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
    plain: dict[str, Any] = json.loads(json.dumps(flat, default=str))
    return plain


def evaluator(model: nn.Module, risk: XRisk, run: Settings) -> Evaluator:
    """Of this network, by the metrics that the run asks for."""
    # Never in half precision, in which many scores would be tied.
    exact = "fp32" if run.precision == "fp32" else "tf32"
    metrics = asked_for(risk, run.selects_by(risk), run.fpr, run.metrics)
    return Evaluator(scorer(model, False), risk, metrics, DTYPES[run.dtype], exact)


class Population(Protocol):
    """Whoever knows how many of all examples are positive; a federation, or a server that was told."""

    def positive_share(self, weighting: Weighting) -> float: ...


def build_algorithm(
    method: Method,
    score: Score,
    risk: XRisk,
    population: Population,
    options: Mapping[str, Any],
    weighting: Weighting = "clients",
) -> Algorithm:
    """The algorithm with its options checked; what it needs of the task (risk, share of positives) is filled in."""
    known = {item.name for item in fields(method.build)}  # type: ignore[arg-type]
    given: dict[str, Any] = {"score": score}
    if "risk" in known:
        given["risk"] = risk
    else:
        require(not risk.score_shape, "this algorithm needs one score an example, and the risk pairs vectors")
    if "positive_share" in known and not options.get("positive_share"):
        options = {**options, "positive_share": population.positive_share(weighting)}
    algorithm: Algorithm = call(method.build, options, "algorithm", ours=given)
    return algorithm


def _method(algorithm: str | Method) -> Method:
    if isinstance(algorithm, Method):
        return algorithm
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", str(algorithm), ALGORITHMS)
    return ALGORITHMS[algorithm]


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


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
