"""A run in this process: a problem, the clients' data, and the engine that runs them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedxl.algorithms import ALGORITHMS
from fedxl.algorithms.protocol import Algorithm
from fedxl.data.check import leak
from fedxl.data.examples import Digests, Examples, Holding, Splits, digests, facts_about, floats_as, numbered
from fedxl.data.participation import Plan, Trace, read_trace, shares, weigh, weigh_by
from fedxl.engine.executors import Executor, choose, executor
from fedxl.engine.simulator import Simulator
from fedxl.engine.threads import threads_for
from fedxl.errors import require
from fedxl.models import check_output, check_training, digest, operations, weights_of
from fedxl.options import flatten
from fedxl.risks.pairing import Holder, Share
from fedxl.training.evaluate import BATCH, HeldBack, check_selection, require_like
from fedxl.training.health import remark_on
from fedxl.training.privacy import require_given
from fedxl.training.problem import Problem, assemble, check_data, check_labels, check_queries, match_types
from fedxl.training.rounds import Task
from fedxl.training.run_folder import Form
from fedxl.training.run_writer import members
from fedxl.training.settings import Settings
from fedxl.tree import add_tensor


class Simulation(Task):
    """What the loop over rounds needs. `announce` gets a line on which executor was chosen and why."""

    engine: Simulator
    examiner: HeldBack

    def __init__(
        self,
        model: nn.Module,
        splits: Splits,
        algorithm: Algorithm,
        settings: Settings,
        announce: Callable[[str], None],
        sections: Mapping[str, Any] | None = None,
        processes: int = 1,
    ) -> None:
        """sections: tables of a config, which a resumed run must match. processes: how many divide the cohorts."""
        splits.train.require_valid("the training data", bool(algorithm.risk.pairing.labels))
        self.splits, self.sections = splits, sections or {}
        self.names = splits.names
        self.members = members(self.names, splits.train.holdings())
        self.data = splits.train.pooled() if algorithm.centralized else splits.train
        self.num_clients = len(self.data.parts)
        self.cohort = 0 if algorithm.centralized else settings.cohort
        self.preparation = splits.preparation
        require_given(algorithm, splits.fitted)
        self.announce, self.processes = announce, processes
        present = self._present_holdings(algorithm, settings)
        facts = facts_about(present, settings.weighting, algorithm.risk.pairing)
        self.problem = assemble(model, algorithm, settings, facts)
        self._check_data(present)
        self.data = match_types(self.problem, self.data)
        probe = self.data.fetch(torch.as_tensor(self.data.parts[0][:2]))
        self.probe = floats_as(probe.to(self.problem.device), self.problem.dtype)
        dtype, scores = str(self.probe.dtype).removeprefix("torch."), self.problem.risk.score_shape
        check_output(self.problem.model, self.probe, scores)
        check_training(model, self.problem.score, weights_of(self.problem.model), self.probe)
        remark = remark_on(self.problem.model, self.probe, self.problem.algorithm, self.problem.reading)
        for line in filter(None, (remark, leak(splits))):
            announce(line)
        columns, names = tuple(splits.columns), self.problem.label_names
        self.form = Form(tuple(self.probe.shape[1:]), dtype, scores, columns, names, splits.train.scale)
        self.engine, self.plan = _engine(self.problem, self.data, self._executor(), self.names)
        self._announce_participation()
        self.examiner = self._examiner()

    def _present_holdings(self, algorithm: Algorithm, settings: Settings) -> list[Holding]:
        """What those clients hold that take part at all."""
        held = self.data.holdings()
        if algorithm.centralized or not settings.trace:
            return held
        return [held[client] for client in np.flatnonzero(read_trace(Path(settings.trace), self.names).any(0))]

    def _check_data(self, present: Sequence[Holding]) -> None:
        """Raises UserError if data and risk do not fit each other, or some label cannot be trained."""
        check_data(self.problem, self.data.holdings())
        many, wanted = self.data.labels, self.problem.num_labels
        told = f"several(..., labels={many})" if many > 1 else f"labels [n, {wanted}]"
        require(wanted == many, f"examples have {many} label(s), and the risk is for {wanted}: give {told}")
        check_labels(self.problem, present, self.preparation.labels if self.preparation else ())
        check_queries(self.problem, {"train": self.data, **self.splits.held_back})

    def _announce_participation(self) -> None:
        if isinstance(self.plan, Trace) and len(absent := np.flatnonzero(~self.plan.available.any(0))):
            # Their risk cannot be optimised.
            some = ", ".join(self.names[number] for number in absent[:3]) + (", ..." if len(absent) > 3 else "")
            told = f"trace: {len(absent)} of {len(self.names)} clients are never available ({some})"
            self.announce(f"{told}; the run optimises the risk of the others")
        how = self.problem.settings.participation
        if self.problem.algorithm.centralized and how != "uniform":
            self.announce(f"participation = '{how}' does not apply: all data are in one place")

    def _executor(self) -> Executor:
        run, cohort = self.problem.settings, self.cohort or self.num_clients
        here = math.ceil(cohort / self.processes)
        at_once = min(here, run.clients_at_once or here)
        if run.executor == "auto":
            name, why = choose(self.problem.model, self.problem.device, at_once)
        else:
            name, why, device = run.executor, "", self.problem.device.type
            if name == "graph" and device != "cuda":
                name, why = "loop", f"graph needs a CUDA device, and this is {device}"
        if why:
            self.announce(f"executor: {name} ({why})")
        self.together = at_once if name == "vmap" else 1  # clients whose steps are one program
        return executor(name, run.compile, self.announce, strict=run.executor == "vmap")

    @property
    def batch(self) -> int:
        """Examples that a step of a client scores."""
        _, _, size1, size2, fresh, *_ = self.problem.reading
        return (size1 + size2) * (1 + fresh)

    def threads(self) -> AbstractContextManager[None]:
        """Inside, torch uses as many threads of a CPU as the steps of this run occupy."""
        if self.problem.device.type != "cpu":
            return nullcontext()
        forward = operations(self.problem.model, self.probe)
        return threads_for(forward * self.batch * self.together, self.announce)

    def _examiner(self) -> HeldBack:
        found, labels, clients = self.problem.evaluator, self.problem.num_labels, len(self.names)
        data = {}
        for name, split in self.splits.held_back.items():
            require_like(name, split, self.probe, labels, clients, bool(self.problem.label_names), self.form.scale)
            named = split if split.site is None else replace(split, sites=tuple(self.names))  # numbers get names
            data[name] = match_types(self.problem, named.to(self.problem.device))
        check_selection(self.problem.select, found, data.get("validation"))
        if self.problem.settings.select and "validation" not in data:
            self.announce(f"select = '{self.problem.select}' chooses nothing: there are no validation data")
        train = {"train": self.engine.placed} if self.problem.settings.train_metrics else {}
        return HeldBack(found, data | train)

    def digests(self) -> Digests:
        """Of the training examples as the network gets them, sorted."""
        train = self.splits.train
        blocks = torch.arange(len(train)).split(BATCH)
        return np.unique(digests(train.fetch(block).to(self.probe.dtype) for block in blocks))

    @cached_property
    def description(self) -> dict[str, Any]:  # type: ignore[override]
        """What must be the same when a run is resumed, by dotted names, as plain JSON. This reads all data."""
        weights, risk = weights_of(self.problem.model), self.problem.risk
        shapes = {name: list(tensor.shape) for name, tensor in {**weights.params, **weights.buffers}.items()}
        lams = f"lam {risk.lam}" + (f", lam_outer {risk.lam_outer}" if risk.lam_outer else "")
        parts, validation = [len(part) for part in self.data.parts], self.examiner.data.get("validation")
        examples = hashlib.sha256(self.data.fingerprint().encode())  # all that is trained on, and who holds it
        for part in self.data.parts:
            add_tensor(examples, "part", torch.as_tensor(part))
        tables = {
            **self.sections,
            "algorithm": _describe(self.problem.given),
            "run": {item.name: getattr(self.problem.settings, item.name) for item in fields(Settings)},
            "task": {
                "model": f"{len(shapes)} tensors, {_digest(shapes)}",
                "clients": f"{len(parts)} with {sum(parts)} examples, {_digest(parts)}",
                "augment": str(self.data.augment),
                "examples": examples.hexdigest()[:12],
                "validation": validation.fingerprint()[:12] if validation is not None else "",
                "risk_name": risk.name,
                "risk": f"{risk.sides}, {lams}, {risk.score_shape} {risk.inner_shape}",
            },
        }
        tables["task"] |= frozen_digest(self.problem.model)
        if isinstance(self.plan, Trace):
            tables["task"]["trace"] = _digest(self.plan.available.tolist())
        return flattened(tables)


def simulator(problem: Problem, data: Examples, run: Executor) -> Simulator:
    """The engine for a problem and all of its clients."""
    return _engine(problem, data, run, numbered(len(data.parts)))[0]


def _engine(problem: Problem, data: Examples, run: Executor, names: Sequence[str]) -> tuple[Simulator, Plan]:
    shares, plan = participants(problem, data.holdings(), names)
    engine = Simulator(
        problem.algorithm, problem.score, data, run, problem.schedule, shares, plan.chances,
        placement=problem.placement, plan=plan,
    )  # fmt: skip
    return engine, plan


def participants(problem: Problem, holders: Sequence[Holder], names: Sequence[str]) -> tuple[Share, Plan]:
    """The shares, stacked, and the plan of clients that hold so much. A centralised method has one client, always."""
    run, algorithm, reading = problem.settings, problem.algorithm, problem.reading
    pairing, sides, local = reading.pairing, (reading.first, reading.second), algorithm.local_pairs
    first, second = pairing.counts(holders, sides, local)
    size: dict[str, Any] = {"num_clients": len(holders), "size": run.cohort, "seed": run.seed}
    if run.participation == "uniform" or algorithm.centralized:
        share, chances = weigh(first, second, run.weighting, run.cohort)
        plan = Plan(**size, chances=chances)
    else:
        parts = shares(first, second, run.weighting).part.numpy() if run.weighting == "samples" else None
        plan = Trace(**size, available=read_trace(Path(run.trace), names), parts=parts)
        for name, counts in (("S1", first), ("S2", second)):
            held = np.array(counts) > 0
            some = not held.any() or bool((held & (plan.frequency > 0)).any())
            require(some, f"no client that holds examples of {name} is ever available; the trace must name one")
        share = weigh_by(first, second, run.weighting, plan.frequency)
        trained = float((plan.frequency * algorithm.counts(share).numpy()).sum()) > 0
        require(trained, "no client that trains is ever available; the trace must name one that holds both classes")
    share = pairing.spread(share, holders, sides, run.weighting == "samples", local)
    return share, plan


def _describe(algorithm: Algorithm) -> dict[str, Any]:
    """Its name and its hyper-parameters."""
    kind = type(algorithm)
    name = next((name for name, known in ALGORITHMS.items() if known is kind), f"{kind.__module__}:{kind.__name__}")
    chosen = {key: value for key, value in flatten(algorithm).items() if key != "risk"}
    return {"name": name, **chosen}


def frozen_digest(model: nn.Module) -> dict[str, str]:
    """What a run's description says of frozen weights, which its checkpoints do not hold."""
    found = digest(model)
    return {"frozen": found} if found else {}


def flattened(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Settings by dotted names, as plain JSON."""
    named = {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
    return json.loads(json.dumps(named, default=str))  # type: ignore[no-any-return]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
