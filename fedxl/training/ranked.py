"""A run in several processes: a simulation whose rounds and evaluations are split, and whose files rank 0 writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fedxl.engine.ranks.ranked import Ranked, as_bytes, costs, row_bytes
from fedxl.engine.ranks.team import Team
from fedxl.models import Weights, operations
from fedxl.training.evaluate import Findings, HeldBack
from fedxl.training.rounds import Task
from fedxl.training.run_writer import Checkpoint, RunWriter
from fedxl.training.settings import Hooks
from fedxl.training.simulation import Simulation


def split_up(simulation: Simulation, team: Team, say: Callable[[str], None]) -> Task:
    """What the loop over rounds needs, in each of several processes."""
    idle = team.size - (simulation.cohort or simulation.num_clients)
    if idle > 0:
        say(f"{idle} of {team.size} processes have no client to run: {team.size - idle} take part in a round")
    task: Task = copy.copy(simulation)
    task.engine, task.examiner = ranked(simulation, team), SplitUp(**vars(simulation.examiner), team=team)
    return task


def ranked(simulation: Simulation, team: Team) -> Ranked:
    """The engine of all ranks together, with what each client costs."""
    engine, problem = simulation.engine, simulation.problem
    rows = [len(held.first) for held in engine.drawing.held]
    graph = engine.placement.device.type == "cuda"  # all clients have the longest one's memory there
    forward = operations(problem.model, simulation.probe)
    return Ranked(engine, team, costs(forward, simulation.batch, problem.settings.local_steps, rows, padded=graph))


@dataclass(frozen=True)
class SplitUp(HeldBack):
    """An examiner of which every rank scores a part of the examples; rank 0 computes the metrics of all."""

    team: Team

    def examine(self, weights: Weights, split: str) -> Findings:
        data, team, evaluator = self.data[split], self.team, self.evaluator
        count, piece = len(data), -(-len(data) // team.size)
        ends = [min(count, piece * rank) for rank in range(team.size + 1)]
        own = evaluator.outputs(weights, data, slice(ends[team.rank], ends[team.rank + 1]))
        parts = team.gather(as_bytes(own), [row_bytes(own) * (end - begin) for begin, end in pairwise(ends)])
        h = torch.cat(parts).view(own.dtype).view(count, *own.shape[1:])
        # A metric may be the user's own, and another machine may round it in another way: one rank decides for all.
        if team.leads:
            found = evaluator.findings(h, data, split)
            team.tell((found.metrics, found.remarks))
            return found
        metrics, remarks = team.tell(None)
        known = evaluator.scores_of(h, data) if evaluator.risk.single_score else None
        targets = evaluator.risk.pairing.targets(data.y)
        return Findings(metrics, known, remarks=remarks, outputs=(h, targets))


def hooks_on(team: Team, hooks: Hooks) -> Hooks:
    """Rank 0's hooks; the others stop when it does, and are silent."""
    if not team.leads:
        hooks = Hooks(say=lambda line: None, stop_collapsed=hooks.stop_collapsed)
    asked = hooks.should_stop
    return replace(hooks, should_stop=lambda: bool(team.tell(asked())))


def opening(team: Team) -> Callable[[Path, bool], RunWriter]:
    """How a run's folder is opened: rank 0 has it, and what it reads there is told to the others."""

    def opened(path: Path, resume: bool) -> RunWriter:
        folder = team.together(lambda: Leading(path, resume, team) if team.leads else None)
        return folder or Following(path, team)

    return opened


class Leading(RunWriter):
    """Rank 0's folder."""

    def __init__(self, path: Path, resume: bool, team: Team) -> None:
        super().__init__(path, resume)
        self.team = team

    def load(self) -> tuple[Checkpoint | None, list[str]]:
        checkpoint, complaints = super().load()
        if checkpoint is None:
            self.team.tell(None)
        else:
            forms = {
                name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in checkpoint.tensors.items()
            }
            self.team.tell({"path": str(checkpoint.path), "info": checkpoint.info, "forms": forms})
            self.team.told(torch.cat([as_bytes(tensor) for tensor in checkpoint.tensors.values()]))
        return checkpoint, complaints

    def rewind(self, round: int, regular: Callable[[int], bool]) -> tuple[list[dict[str, Any]], list[str]]:
        history, complaints = super().rewind(round, regular)
        return self.team.tell(history), complaints


class Following(RunWriter):
    """The folder as the other ranks see it, who may be on other machines: it tells, and writes nothing."""

    def __init__(self, path: Path, team: Team) -> None:
        self.path, self.team = path, team

    def load(self) -> tuple[Checkpoint | None, list[str]]:
        found = self.team.tell(None)
        if found is None:
            return None, []
        forms = {name: (getattr(torch, kind), shape) for name, (kind, shape) in found["forms"].items()}
        likes = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in forms.items()}
        sizes = [like.nbytes for like in likes.values()]
        flat = self.team.told(torch.empty(sum(sizes), dtype=torch.uint8))
        pieces = zip(likes.items(), flat.split(sizes), strict=True)
        tensors = {name: piece.clone().view(like.dtype).view(like.shape) for (name, like), piece in pieces}
        return Checkpoint(Path(found["path"]), tensors, found["info"]), []

    def rewind(self, round: int, regular: Callable[[int], bool]) -> tuple[list[dict[str, Any]], list[str]]:
        return self.team.tell(None), []

    def _guard(self, write: Callable[[], object]) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass
