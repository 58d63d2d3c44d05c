"""The demo with 0 to 4 of 16 clients hostile: every attack, every defence, several seeds. It resumes where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedxl.config import experiment
from fedxl.config.experiment import Config
from fedxl.errors import DivergedError, UserError, require
from fedxl.experiments import demo
from fedxl.experiments.hostile.attacks import ATTACKS, LABEL_FLIP, Attacked, with_flipped_labels
from fedxl.files import write_json
from fedxl.options import call
from fedxl.progress import progress
from fedxl.training.checked import Checked
from fedxl.training.hooks import Hooks
from fedxl.training.settings import Settings
from fedxl.training.simulation import Simulation
from fedxl.training.trainer import train

CLIENTS = 16
COUNTS = (0, 1, 2, 3, 4)
SEEDS = demo.SEEDS[:3]
HONEST_SEEDS = demo.SEEDS  # where nobody is hostile: what a defence costs is little, and seeds differ by more
METRIC = f"pauc@{demo.MAX_FPR:g}"
NOBODY = "nobody"  # the attack, where no client is hostile
LIMIT = 20.0  # the `influence` that a server with sites has


class Defence(NamedTuple):
    influence: float  # 0: updates are not checked
    options: Mapping[str, Any] = {}  # of the algorithm


# A server with sites always checks updates, so each defence but "none" does.
DEFENCES = {
    "none": Defence(0),
    "limits": Defence(LIMIT),
    "clipping": Defence(LIMIT, {"clip_change": 2.0}),
    "clipping, server's u": Defence(LIMIT, {"clip_change": 2.0, "pool_u": "server"}),
    "median": Defence(LIMIT, {"aggregation": "median"}),
    "trimmed mean": Defence(LIMIT, {"aggregation": "trimmed", "hostile": 0.25}),
    "multi-Krum": Defence(LIMIT, {"aggregation": "krum", "hostile": 0.25}),
}


@dataclass(frozen=True)
class Case:
    attack: str
    hostile: int
    defence: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.attack} | {self.hostile} | {self.defence} | {self.seed}"


def cases(seeds: Sequence[int] = SEEDS, honest_seeds: Sequence[int] = HONEST_SEEDS) -> Iterator[Case]:
    """All runs, seed by seed, so that a study that is stopped early has whole tables of fewer seeds."""
    for seed in (*seeds, *(seed for seed in honest_seeds if seed not in seeds)):
        for defence in DEFENCES:
            yield Case(NOBODY, 0, defence, seed)
        if seed in seeds:
            attacked = product(ATTACKS, COUNTS[1:], DEFENCES)
            yield from (Case(attack, count, defence, seed) for attack, count, defence in attacked)


def liars(seed: int, count: int, clients: int = CLIENTS) -> list[int]:
    """The hostile clients of a seed. Those of a smaller count are among those of a larger one."""
    order = np.random.default_rng(seed).permutation(clients)
    return sorted(int(client) for client in order[:count])


def config_of(case: Case) -> Config:
    entry = demo.ENTRIES[0]
    return demo.experiment(entry._replace(algorithm={**entry.algorithm, **DEFENCES[case.defence].options}), case.seed)


def run_case(case: Case, config: Config | None = None) -> dict[str, Any]:
    """A run, and its metrics on test data: of the chosen round, and of the last one.

    The best round is chosen on honest validation data. A server without any takes the last one.
    """
    config, hostile = config or config_of(case), liars(case.seed, case.hostile)
    simulation = _simulation(config, hostile if case.attack == LABEL_FLIP else [])
    problem, shares = simulation.problem, simulation.engine.shares
    engine: Any = simulation.engine
    if hostile:
        engine = Attacked(engine, ATTACKS[case.attack], problem.risk, hostile)
    influence = DEFENCES[case.defence].influence
    task: Any = simulation
    task.engine = Checked(engine, problem, shares, influence) if influence else engine
    try:
        found = train(simulation, Hooks(say=lambda line: None), None)
    except DivergedError as error:
        return {"chosen": None, "last": None, "refused": None, "diverged": str(error)}
    assert found.server is not None
    last = simulation.examiner.examine(found.server.weights, "test").metrics[METRIC]
    refused = [entry["client"] for row in found.history for entry in row.get("dropped", [])]
    return {
        "chosen": found.metrics["test"][METRIC],
        "last": last,
        "refused": {"hostile": sum(c in hostile for c in refused), "honest": sum(c not in hostile for c in refused)},
    }


def _simulation(config: Config, flipped: Sequence[int]) -> Simulation:
    """The simulation of a config, in which these clients hold wrong labels."""
    settings, algorithm = call(Settings, config.run, "run"), experiment.build_algorithm(config)
    splits = experiment.load_data(config)
    model = experiment.build_model(config, splits.train.example_shape, algorithm.risk)
    train_on = with_flipped_labels(splits.train, flipped) if flipped else splits.train
    held_back = {"validation": splits.validation, "test": splits.test}
    return Simulation(model, train_on, algorithm, settings, held_back, lambda line: None)


def study(path: Path, todo: Sequence[Case], run: Callable[[Case], dict[str, Any]] = run_case) -> list[dict[str, Any]]:
    """All cases, those that the file holds already left out; it is written after each."""
    done = _read(path)
    with progress("hostile clients", len(todo)) as advance:
        for case in todo:
            if case.key not in done:
                done[case.key] = {**asdict(case), **run(case)}
                write_json(path, {"metric": METRIC, "runs": list(done.values())})
            advance(1)
    return [done[case.key] for case in todo]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    try:
        runs = json.loads(path.read_text())["runs"]
        found = {Case(*(run[name] for name in Case.__dataclass_fields__)).key: run for run in runs}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} holds no results of this study; name another folder") from None
    require(all("last" in run for run in runs), f"{path} holds no results of this study; name another folder")
    return found
