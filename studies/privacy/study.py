"""FeDXL2 with differential privacy on the demo's images: AUROC and partial AUC against epsilon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import typer

from fedxl.config.experiment import Config, execute, simulate
from fedxl.errors import require
from fedxl.experiments import demo
from fedxl.reporting.text import as_markdown, mean_and_spread
from fedxl.training.privacy import Spent, ledger
from fedxl.training.settings import Hooks
from studies import pictures
from studies.harness import Harness, Outcome, Planned, Row, cell, group, machine, machines
from studies.options import OUT, Folder, Jobs, Seeds, check, finish
from studies.privacy import attack

METRIC = f"pauc@{demo.MAX_FPR:g}"
METRICS = {"auroc": "AUROC", METRIC: "partial AUC (FPR ≤ 0.3)"}
EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, None)  # None: without differential privacy
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


def cases(
    seeds: Sequence[int], epsilons: Sequence[float | None] = EPSILONS, models: int = attack.MODELS
) -> list[dict[str, Any]]:
    """Runs of every federation and epsilon, and the attack on models with and without privacy."""
    runs = [{"federation": f, "epsilon": e, "seed": s} for s in seeds for f in FEDERATIONS for e in epsilons]
    return [*runs, *({"attack": kind, "models": models} for kind in attack.STEPS)]


def config_of(federation: str, noise: float, seed: int) -> Config:
    """A run with this `dp_noise`; 0: without differential privacy."""
    where = FEDERATIONS[federation]
    promise = {"dp_noise": noise, "dp_score_noise": SCORE_RATIO * noise, "dp_delta": DELTA, **where.private}
    chosen = promise if noise else where.plain
    usual = {"name": "fedxl2", "level": "free", "pool_u": "server", "weight_decay": 1e-3, "gamma": 0.5}
    return Config(
        data={"name": "digits", "copies": COPIES, **where.data},
        model={"name": "linear"},
        risk={**demo.RISK, "lam": 0.5},
        algorithm={**usual, **chosen},
        run={**where.run, "eval_every": 2, "executor": "vmap", "device": "cpu", "seed": seed},
    )


@lru_cache(maxsize=1024)
def find_noise(federation: str, epsilon: float | None, seed: int) -> float:
    """What `dp_noise` must be to spend this epsilon."""
    if epsilon is None:
        return 0.0

    def spent(noise: float) -> float:
        config = config_of(federation, noise, seed)
        account = ledger(simulate(config, lambda line: None))
        assert account is not None, "the config is of a private run"
        return account.after(config.run["rounds"]).epsilon

    return noise_for(epsilon, spent)


def noise_for(target: float, spent: Callable[[float], float]) -> float:
    """The least noise, to a thousandth, that spends no more than the target. spent: epsilon by the noise, falling.

    >>> round(noise_for(2.0, lambda noise: 10 / noise), 2)
    5.0
    """
    require(target > 0, f"epsilon must be positive, got {target}")
    low, high = 0.0, 1.0
    while spent(high) > target:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if spent(middle) > target else (low, middle)
    return high


def run_case(planned: Planned) -> Outcome:
    """An attack or a run: its metrics on test data, of the round that validation data choose, and what it has spent.

    Validation data are other images. The promise is not about them.
    """
    case = planned.case
    if "attack" in case:
        return run_attack(case["attack"], case["models"]), {}
    noise = find_noise(case["federation"], case["epsilon"], case["seed"])
    result = execute(config_of(case["federation"], noise, case["seed"]), hooks=Hooks(say=lambda line: None))
    found: dict[str, Any] = {"test": {name: round(result.metrics["test"][name], 8) for name in METRICS}}
    if noise:
        found |= {"dp_noise": noise, "replaced": Spent(**result.history[-1]["privacy"]).epsilon_replaced}
    return {**found, "on": machine()}, {}


def run_attack(kind: str, models: int) -> dict[str, Any]:
    """The membership attack on models with (`private`) or without privacy (`plain`)."""
    shadows, labels = attack.train(kind, models)
    found, spent = attack.attack(shadows, labels), max((each.spent for each in shadows if each.spent), default=None)
    return {
        "likelihood": attack.interval(found.likelihood),
        "threshold": attack.interval(found.threshold),
        "epsilon": None if spent is None else spent.epsilon,
        "bound": None if spent is None else attack.most(spent),
        "auroc": sum(each.auroc for each in shadows) / len(shadows),
        "on": machine(),
    }


def markdown(rows: Sequence[Row]) -> str:
    runs = [row for row in rows if "attack" not in row.case]
    parts = [
        "# Differential privacy",
        "FeDXL2 with a linear network on the demo's images, test data, round chosen on validation data: mean ± "
        f"standard deviation over {len(group(runs, 'seed'))} seeds. Epsilon is at delta = {DELTA:g}, for one "
        f"example; each image is {COPIES} examples. The second column is for an example that is replaced by "
        f"another, and holds for both copies of an image, too: either moves sums by twice as much. On "
        f"{machines(rows)}.",
    ]
    for federation, own in group(runs, "federation").items():
        parts += [f"## {federation}", table(own)]
    parts += [
        "## A membership attack",
        "Which examples of a random half was the model trained on? AUROC of the likelihood-ratio attack and of the "
        "threshold on how right the model is, mean over models with an interval of 95%; 0.5 is chance. The bound is "
        "what no attack exceeds.",
        attack_table([row for row in rows if "attack" in row.case]),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def table(rows: Sequence[Row]) -> str:
    """Metrics against epsilon, in one federation."""
    body = []
    for epsilon, own in group(rows, "epsilon").items():
        metrics, found = [cell(own, name) for name in METRICS], own[0].found
        if epsilon is None:
            body.append(["none", "", "", "", *metrics])
            continue
        noise = [f"{found['dp_noise']:.2f}", f"{SCORE_RATIO * found['dp_noise']:.2f}"]
        body.append([f"{epsilon:g}", f"{found['replaced']:.1f}", *noise, *metrics])
    return as_markdown(body, ["epsilon", "replaced", "dp_noise", "dp_score_noise", *METRICS.values()])


def attack_table(attacks: Sequence[Row]) -> str:
    body = []
    for row in attacks:
        found = row.found
        cells = [f"{found[name][0]:.3f} ± {found[name][1]:.3f}" for name in ("likelihood", "threshold")]
        private = found["epsilon"] is not None
        epsilon, bound = (f"{found['epsilon']:.1f}", f"{found['bound']:.3f}") if private else ("none", "1")
        body.append([epsilon, *cells, bound, f"{found['auroc']:.3f}", str(row.case["models"])])
    columns = ["epsilon", "likelihood ratio", "threshold", "bound", "the model's AUROC on test data", "models"]
    return as_markdown(body, columns)


def draw(path: Path, rows: Sequence[Row]) -> None:
    """A panel per metric, a line per federation against epsilon; and the attack."""
    runs = [row for row in rows if "attack" not in row.case]
    finite = [epsilon for epsilon in group(runs, "epsilon") if epsilon is not None]
    panels = []
    for metric, shown in METRICS.items():
        lines, reference = {}, {}
        for federation, own in group(runs, "federation").items():
            cells = {e: [row.test(metric) for row in found] for e, found in group(own, "epsilon").items()}
            lines[federation] = [pictures.Point(at, *mean_and_spread(cells[e])) for at, e in enumerate(finite)]
            reference[f"{federation}, without privacy"] = mean_and_spread(cells[None])[0]
        along, ticks = f"epsilon of an example, at delta = {DELTA:g}", [f"{epsilon:g}" for epsilon in finite]
        panels.append(pictures.Panel(shown, along, f"{shown}, test data", lines, ticks, reference))
    panels.append(_attack_panel([row.found for row in rows if "attack" in row.case]))
    pictures.lines(path, "What differential privacy costs, and what an attack still learns", panels, across=3)


def _attack_panel(attacks: Sequence[Mapping[str, Any]]) -> pictures.Panel:
    """The attack with and without privacy, beside the bound."""
    points = [pictures.Point(at, *found["likelihood"]) for at, found in enumerate(attacks)]
    lines = {"membership attack": points}
    bounds = [pictures.Point(at, found["bound"]) for at, found in enumerate(attacks) if found["bound"] is not None]
    lines |= {"bound of any attack": bounds} if bounds else {}
    names = ["none" if found["epsilon"] is None else f"{found['epsilon']:.1f}" for found in attacks]
    return pictures.Panel("A membership attack", "epsilon", "AUROC of the attack", lines, names, {"chance": 0.5})


def command(
    seeds: Seeds = 3,
    epsilons: Annotated[str, typer.Option(metavar="EPSILON,...", help="Some only; empty: 1 to 32.")] = "",
    models: Annotated[int, typer.Option(help="Models of the membership attack, an even number.")] = attack.MODELS,
    jobs: Jobs = 1,
    folder: Folder = OUT,
) -> None:
    """AUROC against epsilon, and a membership attack.

    FeDXL2 with differential privacy on the demo's images. Four minutes on one core.
    """
    check(folder, seeds, jobs)
    tried = (*map(float, epsilons.split(",")), None) if epsilons else EPSILONS
    with Harness(folder / "privacy.jsonl", run_case, jobs) as do:
        rows = do([Planned(case) for case in cases(demo.SEEDS[:seeds], tried, models)])
    draw(folder / "privacy.png", rows)
    finish("privacy", folder, markdown(rows))
