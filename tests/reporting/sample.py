"""Runs for reports, made in memory: two methods with two seeds each, three sites, and everything a report shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedxl.evaluation.scores import Scores
from fedxl.training.run_folder import Member, Run
from tests.evaluation.sets import patients

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}\x1b[2J"


def scored(seed: int, gain: float, count: int = 240, names: tuple[str, ...] = ("north", "south", "east")) -> Scores:
    """The same labels and sites for the same seed; scores whose positives are higher by `gain`."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(count) < 0.3).astype(np.int64)
    site = rng.integers(0, len(names), count)
    return Scores.of(rng.normal(0, 1, count) + gain * labels, labels, site=site, sites=names)


def run(name: str, algorithm: str, seed: int, gain: float, evil: str = "") -> Run:
    names = ("north" + evil, "south", "east")
    metric = {
        "auroc": 0.8 + gain / 20,
        "pauc@0.3": 0.7 + gain / 20,
        "ap": 0.6,
        "positives": 70,
        "negatives": 170,
        "own" + evil: 0.5,
    }
    rows = [
        {
            "round": round,
            "validation": {key: value - 0.1 / round if value < 1 else value for key, value in metric.items()},
            "traffic": {"down": 20_000, "up": 10_000, "clients": 3},
            "seconds": float(round),
        }
        for round in range(2, 21, 2)
    ]
    settings = {
        "data.name": "digits" + evil, "risk.name": evil or "pauc", "algorithm.name": algorithm + evil,
        "algorithm.lr" + evil: 0.1, "run.seed": seed, "run.rounds": 20, "run.note": "x" + evil,
    }  # fmt: skip
    splits = {"validation": scored(100 + seed, gain, names=names), "test": scored(seed, gain, names=names)}
    return Run(
        name=name + evil,
        settings=settings,
        rows=rows,
        done={"round": 20, "best_round": 18, "seconds": 20.0, "test": metric},
        members=[Member(each, 20, 60) for each in names],
        environment={"python": "3.11", "torch" + evil: "2" + evil},
        begun="2026-01-01T00:00:00+00:00" + evil,
        chosen_by="pauc@0.3" if not evil else "own" + evil,
        config=f'[risk]\nname = "pauc"\n# {evil}\n',
        in_memory=(splits, {}),
    )


def runs(evil: str = "") -> list[Run]:
    return [
        run(f"{algorithm}-{seed}", algorithm, seed, gain, evil)
        for algorithm, gain in (("fedxl2", 2.0), ("local_sgd", 1.2))
        for seed in (0, 1)
    ]


def label_scores(seed: int, names: tuple[str, ...], count: int = 300) -> Scores:
    """Labels that go together; a tenth is not known, the last but one is rare, and the last has one class."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(count, 1))
    latent = 0.6 * common + rng.normal(size=(count, len(names)))
    labels = (latent > np.linspace(0.2, 2.0, len(names))).astype(np.int64)
    labels[:, -2], labels[:, -1] = np.arange(count) % 100 == 7, 0
    scores = latent + rng.normal(size=latent.shape)
    labels[rng.random(labels.shape) < 0.1] = -1
    return Scores(scores, labels, names, rng.integers(0, 3, count), ("north", "south", "east"))


def labelled(count: int = 6, evil: str = "") -> Run:
    """A run with several labels."""
    names = tuple(f"finding {number}{evil}" for number in range(count))
    of = run("labels", "fedxl2", 0, 2.0, evil)
    each = {split: label_scores(seed, names) for seed, split in enumerate(("validation", "test"))}
    settings = {**of.settings, "risk.labels": list(names)}
    sited = {split: replace(found, sites=("north" + evil, "south", "east")) for split, found in each.items()}
    return replace(of, settings=settings, about={"labels": list(names)}, in_memory=(sited, {}))


def timed(name: str = "cox", algorithm: str = "fedxl2", seed: int = 0, noise: float = 0.0, evil: str = "") -> Run:
    """A run about time to event. Examples are the same for all; noise makes its scores worse."""
    splits, sites = {}, ("north" + evil, "south", "east")
    for number, split in enumerate(("validation", "test")):
        scores, events, times = patients(240, seed=number)
        scores = scores + noise * np.random.default_rng([seed, number]).normal(size=240)
        splits[split] = Scores.of(scores, events, time=np.ceil(300 * times), site=np.arange(240) % 3, sites=sites)
    metric = {"cindex": 0.75 - noise / 20, "risk": 3.5, "positives": 170, "negatives": 70}
    rows = [{"round": round, "validation": metric, "seconds": float(round)} for round in (5, 10)]
    of = run(name, algorithm, seed, 1.0, evil)
    return replace(
        of,
        settings={**of.settings, "risk.name": "cox", "algorithm.noise": noise},
        rows=rows,
        done={"round": 10, "best_round": 10, "seconds": 9.0, "test": metric},
        chosen_by="cindex",
        in_memory=(splits, {}),
    )
