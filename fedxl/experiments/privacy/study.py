"""FeDXL2 with differential privacy on the demo's images: AUROC and partial AUC against epsilon."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedxl.config.experiment import Config, build_algorithm, execute, load_data
from fedxl.data.participation import Plan
from fedxl.errors import require
from fedxl.experiments import demo
from fedxl.experiments.privacy import attack
from fedxl.files import plain, read_json, write_json
from fedxl.options import call
from fedxl.progress import progress
from fedxl.training.hooks import Hooks
from fedxl.training.members import Member, members, numbered
from fedxl.training.privacy import Ledger, Spent, noise_for
from fedxl.training.settings import Settings

METRIC = f"pauc@{demo.MAX_FPR:g}"
EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, math.inf)  # the last one: without differential privacy
SEEDS = demo.SEEDS[:3]
DELTA = 1e-4  # there are about 1,400 examples
COPIES = 2  # of each image, as in the demo: it is so many examples, at most sites apart
# Noise on a score against noise on a sum of gradients. The scores have a tenth of the squared mu, or about so.
SCORE_RATIO = 0.75


@dataclass(frozen=True)
class Federated:
    """The same images at other sites, and how they are trained on: docs/differential-privacy.md says how chosen."""

    data: Mapping[str, Any]
    run: Mapping[str, Any]
    private: Mapping[str, Any]  # of the algorithm, with differential privacy
    plain: Mapping[str, Any]  # without


FEDERATIONS = {
    "16 sites (the demo)": Federated(
        {},
        {"rounds": 20, "local_steps": 4, "batch1": 12, "batch2": 10},
        {"lr": 20.0, "dp_clip": 0.1, "uploads": 1, "pool_rounds": 10},
        {"lr": 1.0},
    ),
    "4 larger sites": Federated(
        {"clients": 4, "one_class": 0},
        {"rounds": 20, "local_steps": 2, "batch1": 16, "batch2": 32},
        {"lr": 50.0, "beta": 0.3, "dp_clip": 0.1, "uploads": 2, "pool_rounds": 10},
        {"lr": 1.0},
    ),
}


@dataclass(frozen=True)
class Case:
    federation: str
    epsilon: float
    seed: int


def cases(seeds: Sequence[int] = SEEDS) -> Iterator[Case]:
    return (Case(name, epsilon, seed) for seed in seeds for name in FEDERATIONS for epsilon in EPSILONS)


def config_of(case: Case, noise: float = 0.0) -> Config:
    where, private = FEDERATIONS[case.federation], math.isfinite(case.epsilon)
    promise = {"dp_noise": noise, "dp_score_noise": SCORE_RATIO * noise, "dp_delta": DELTA, **where.private}
    chosen = promise if private else where.plain
    algorithm = {"name": "fedxl2", "level": "free", "pool_u": "server", "weight_decay": 1e-3, "gamma": 0.5, **chosen}
    return Config(
        data={"name": "digits", "copies": COPIES, **where.data},
        model={"name": "linear"},
        risk={**demo.RISK, "lam": 0.5},
        algorithm=algorithm,
        run={**where.run, "eval_every": 2, "executor": "vmap", "device": "cpu", "seed": case.seed},
    )


def account(config: Config, taking_part: Sequence[Member]) -> Ledger:
    """The ledger of a config's run."""
    algorithm, settings = build_algorithm(config), call(Settings, config.run, "run")
    reading = algorithm.reading(settings.batch1, settings.batch2)
    plan = Plan(num_clients=len(taking_part), size=settings.cohort, seed=settings.seed)
    return Ledger(algorithm, reading, settings, taking_part, plan)


@lru_cache(maxsize=1024)
def noise_of(case: Case) -> float:
    """What `dp_noise` must be for a case's epsilon."""
    if math.isinf(case.epsilon):
        return 0.0
    holdings = load_data(config_of(case, 1.0)).train.holdings()
    taking_part = members(numbered(len(holdings)), holdings)

    def spent(noise: float) -> float:
        ledger = account(config_of(case, noise), taking_part)
        return ledger.after(ledger.run.rounds).epsilon

    return noise_for(case.epsilon, spent)


def run_case(case: Case) -> dict[str, Any]:
    """A run: its metrics on test data, of the round that validation data choose, and what it has spent.

    Validation data are other images. The promise is not about them.
    """
    noise = noise_of(case)
    config = config_of(case, noise)
    found = execute(config, hooks=Hooks(say=lambda line: None))
    told = {**asdict(case), "auroc": found.metrics["test"]["auroc"], METRIC: found.metrics["test"][METRIC]}
    if not noise:
        return told
    spent = Spent(**found.history[-1]["privacy"])
    settings = {"dp_noise": noise, "dp_score_noise": SCORE_RATIO * noise}
    return {**told, **settings, "spent": spent._asdict()}


def run_attack(kind: str, models: int = attack.MODELS) -> dict[str, Any]:
    """The membership attack on models with (`private`) or without privacy (`plain`)."""
    shadows, labels = attack.train(kind, models)
    found, spent = attack.attack(shadows, labels), max((each.spent for each in shadows if each.spent), default=None)
    return {
        "kind": kind,
        "likelihood": attack.interval(found.likelihood),
        "threshold": attack.interval(found.threshold),
        "epsilon": None if spent is None else spent.epsilon,
        "bound": None if spent is None else attack.most(spent),
        "auroc": sum(each.auroc for each in shadows) / len(shadows),
        "models": models,
    }


def study(path: Path, todo: Sequence[Case] | None = None) -> dict[str, Any]:
    """All cases and both attacks, those that the file holds already left out; it is written after each."""
    todo = list(cases()) if todo is None else todo
    found = _read(path)
    done = {(run["federation"], run["epsilon"], run["seed"]) for run in found["runs"]}
    with progress("differential privacy", len(todo)) as advance:
        for case in todo:
            if (case.federation, case.epsilon if math.isfinite(case.epsilon) else None, case.seed) not in done:
                found["runs"].append(plain(run_case(case)))
                write_json(path, found)
            advance(1)
    for kind in attack.STEPS:
        if kind not in {each["kind"] for each in found["attacks"]}:
            found["attacks"].append(plain(run_attack(kind)))
            write_json(path, found)
    return found


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"delta": DELTA, "runs": [], "attacks": []}
    found = read_json(path)
    require({"runs", "attacks"} <= found.keys(), f"{path} holds no results of this study; name another folder")
    return found
