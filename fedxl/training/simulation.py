"""A run in this process: a problem, the clients' data, and the engine that runs them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from fedxl.algorithms import ALGORITHMS
from fedxl.algorithms.protocol import Algorithm
from fedxl.data.federation import Federation, Holding, Split, facts_about
from fedxl.data.participation import Plan, Trace
from fedxl.data.preparation import Preparation
from fedxl.data.source import fingerprint, floats_as
from fedxl.engine.executors import choose, executor, not_for_vmap
from fedxl.engine.group import Executor
from fedxl.engine.simulator import Simulator
from fedxl.errors import require
from fedxl.models import check_output, weights_of
from fedxl.options import flatten
from fedxl.training.evaluate import HeldBack, Pair, check_selection, held_back, origins
from fedxl.training.members import Form, members, numbered
from fedxl.training.participants import check_label_names, check_labels, never_available, participants, present
from fedxl.training.problem import Problem, assemble, check_data, check_queries, require_algorithm, suited
from fedxl.training.settings import Settings
from fedxl.tree import add_tensor


class Simulation:
    """What the loop over rounds needs. `announce` gets a line on which executor was chosen and why."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        algorithm: Algorithm,
        settings: Settings,
        pairs: Mapping[str, Pair | Split | None],
        announce: Callable[[str], None],
        sections: Mapping[str, Any] | None = None,
        names: Sequence[str] = (),
        preparation: Preparation | None = None,
        columns: Sequence[str] = (),
        processes: int = 1,
    ) -> None:
        """pairs: validation and test data. sections: the tables of a config, which a resumed run must match.

        names: of the clients, if they have any. preparation: how the data were made of files, to keep with the model.
        columns: the names of an example's numbers, if they came in data frames. processes: among which cohorts are
        divided.
        """
        require_algorithm(algorithm)
        require(len(names) in (0, len(federation.parts)), f"{len(federation.parts)} clients have {len(names)} names")
        self.names = tuple(names) or numbered(len(federation.parts))
        self.members = members(self.names, federation.holdings())
        self.federation = federation.pooled() if algorithm.centralized else federation
        self.num_clients = len(self.federation.parts)
        self.cohort = 0 if algorithm.centralized else settings.cohort
        self.preparation, self.columns, self.sections = preparation, tuple(columns), sections or {}
        self.announce, self.processes = announce, processes
        present = self._present_holdings(algorithm, settings)
        self.problem = assemble(model, algorithm, settings, facts_about(present, settings.weighting))
        self._check_data(present, pairs)
        self.federation = Federation(suited(self.problem, self.federation.source), self.federation.parts)
        probe = self.federation.source.fetch(torch.as_tensor(self.federation.parts[0][:2]))
        self.probe = floats_as(probe.to(self.problem.device), self.problem.dtype)
        check_output(self.problem.model, self.probe, self.problem.risk.score_shape)
        self.engine, self.plan = _engine(self.problem, self.federation, self._executor(), self.names)
        self._announce_participation()
        self.examiner = self._examiner(pairs)

    def _present_holdings(self, algorithm: Algorithm, settings: Settings) -> list[Holding]:
        """What those clients hold that take part at all."""
        held = self.federation.holdings()
        return held if algorithm.centralized else [held[client] for client in present(settings, self.names)]

    def _check_data(self, present: Sequence[Holding], pairs: Mapping[str, Pair | Split | None]) -> None:
        """Raises UserError if data and risk do not fit each other, or some label cannot be trained."""
        check_data(self.problem, self.federation.holdings())
        risk, many, wanted = self.problem.risk, self.federation.labels, len(self.problem.label_names)
        told = f"several(..., labels={many})" if many else f"labels [n, {wanted}]"
        require(wanted == many, f"examples have {many or 1} label(s), and the risk is for {wanted or 1}: give {told}")
        if many:
            first, second = (np.stack([holder.by_label(side) for holder in present]) for side in risk.sides)
            check_labels(first, second, self.problem.label_names, self.problem.needs_both_sides)
            check_label_names(self.problem.label_names, self.preparation.labels if self.preparation else ())
        check_queries(self.problem, self.federation.source, pairs)

    def _announce_participation(self) -> None:
        if line := never_available(self.plan, self.names):
            self.announce(line)
        how = self.problem.settings.participation
        if self.problem.algorithm.centralized and how != "uniform":
            self.announce(f"participation = '{how}' does not apply: all data are in one place")

    @property
    def form(self) -> Form:
        dtype = str(self.probe.dtype).removeprefix("torch.")
        shape, scores = tuple(self.probe.shape[1:]), self.problem.risk.score_shape
        return Form(shape, dtype, scores, self.columns, self.problem.label_names)

    def _executor(self) -> Executor:
        run, cohort = self.problem.settings, self.cohort or self.num_clients
        here = math.ceil(cohort / self.processes)
        at_once = min(here, run.clients_at_once or here)
        if run.executor == "auto":
            name, why = choose(self.problem.model, self.problem.score, self.probe, at_once)
        else:
            name, why, device = run.executor, "", self.problem.device.type
            if name == "graph" and device != "cuda":
                name, why = "loop", f"graph needs a CUDA device, and this is {device}"
            unfit = not_for_vmap(self.problem.model, self.problem.score, self.probe) if name == "vmap" else ""
            require(not unfit, f"{unfit}; leave executor = 'vmap' out, or set executor = 'loop'")
        if why:
            self.announce(f"executor: {name} ({why})")
        return executor(name, run.compile, self.announce)

    def _examiner(self, pairs: Mapping[str, Pair | Split | None]) -> HeldBack:
        found = self.problem.evaluator
        sources = held_back(pairs, self.probe, len(self.problem.label_names))
        sources = {name: suited(self.problem, source) for name, source in sources.items()}
        if "validation" in sources:
            check_selection(self.problem.select, found, sources["validation"])
        train = {"train": self.engine.source} if self.problem.settings.train_metrics else {}
        return HeldBack(found, sources | train, origins(pairs, self.names))

    @cached_property
    def description(self) -> dict[str, Any]:
        """What must be the same when a run is resumed, by dotted names, as plain JSON. This reads all data."""
        weights, risk = weights_of(self.problem.model), self.problem.risk
        shapes = {name: list(tensor.shape) for name, tensor in {**weights.params, **weights.buffers}.items()}
        lams = f"lam {risk.lam}" + (f", lam_outer {risk.lam_outer}" if risk.lam_outer else "")
        parts = [len(part) for part in self.federation.parts]
        source, validation = self.federation.source, self.examiner.sources.get("validation")
        examples = hashlib.sha256(fingerprint(source).encode())  # all that is trained on, and who holds it
        for part in self.federation.parts:
            add_tensor(examples, "part", torch.as_tensor(part))
        tables = {
            **self.sections,
            "algorithm": _describe(self.problem.given),
            "run": {item.name: getattr(self.problem.settings, item.name) for item in fields(Settings)},
            "task": {
                "model": f"{len(shapes)} tensors, {_digest(shapes)}",
                "clients": f"{len(parts)} with {sum(parts)} examples, {_digest(parts)}",
                "augment": str(getattr(source, "augment", "")),
                # Labels and a few examples, which older versions recorded; `examples` is a digest of all data.
                "data": _digest([source.labels.tolist(), self.probe.flatten().tolist()]),
                "examples": examples.hexdigest()[:12],
                "validation": fingerprint(validation)[:12] if validation is not None else "",
                "risk_name": risk.name,
                "risk": f"{risk.sides}, {lams}, {risk.score_shape} {risk.inner_shape}",
            },
        }
        if isinstance(self.plan, Trace):
            tables["task"]["trace"] = _digest(self.plan.available.tolist())
        return flattened(tables)


def simulator(problem: Problem, federation: Federation, run: Executor) -> Simulator:
    """The engine for a problem and all of its clients."""
    return _engine(problem, federation, run, numbered(len(federation.parts)))[0]


def _engine(problem: Problem, federation: Federation, run: Executor, names: Sequence[str]) -> tuple[Simulator, Plan]:
    shares, plan = participants(problem, federation.holdings(), names)
    engine = Simulator(
        problem.algorithm, problem.score, federation, run, problem.schedule, shares, plan.chances,
        placement=problem.placement, plan=plan,
    )  # fmt: skip
    return engine, plan


def _describe(algorithm: Algorithm) -> dict[str, Any]:
    """Its name and its hyper-parameters."""
    kind = type(algorithm)
    name = next((name for name, known in ALGORITHMS.items() if known is kind), f"{kind.__module__}:{kind.__name__}")
    chosen = {key: value for key, value in flatten(algorithm).items() if key != "risk"}
    return {"name": name, **chosen}


def flattened(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Settings by dotted names, as plain JSON."""
    named = {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
    return json.loads(json.dumps(named, default=str))  # type: ignore[no-any-return]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
