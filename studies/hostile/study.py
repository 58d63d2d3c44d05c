"""The demo with 0 to 4 of 16 clients hostile: every attack, every defence, several seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from fedxl.config import experiment
from fedxl.config.experiment import Config
from fedxl.errors import DivergedError
from fedxl.experiments import demo
from fedxl.options import call
from fedxl.reporting.text import as_markdown, mean_and_spread, mean_with_spread
from fedxl.training.settings import Hooks, Settings
from fedxl.training.simulation import Simulation
from fedxl.training.trainer import train
from studies import pictures, recorded
from studies.checked import Checked
from studies.harness import Harness, Outcome, Planned, Row, difference, group, machine, machines
from studies.hostile.attacks import ATTACKS, LABEL_FLIP, Attacked, with_flipped_labels
from studies.options import OUT, Folder, Jobs, Rounds, check, finish, length, shorten

CLIENTS = 16
COUNTS = (0, 1, 2, 3, 4)
SEEDS = demo.SEEDS[:3]
HONEST_SEEDS = demo.SEEDS  # where nobody is hostile: what a defence costs is little, and seeds differ by more
METRIC = f"pauc@{demo.MAX_FPR:g}"
NOBODY = "nobody"  # the attack, where no client is hostile
LIMIT = 20.0  # the `influence` that a server with sites has
WHAT = {"last": "after the last round", "chosen": "of the round that honest validation data choose"}
ABOUT = (
    f"The demo's FeDXL2 (digits, {CLIENTS} clients, six of one class), partial AUC (FPR <= 0.3) on test data: mean ± "
    'standard deviation over seeds. Every defence but "none" has the server\'s limits (`influence = 20`).'
)


class Defence(NamedTuple):
    influence: float  # 0: updates are not checked
    options: Mapping[str, Any] = {}  # of the algorithm


# A server with sites always checks updates, so each defence but "none" does.
DEFENCES = {
    "none": Defence(0),
    "limits": Defence(LIMIT),
    "clipping": Defence(LIMIT, {"clip_change": 2.0}),
    "clipping, server's u": Defence(LIMIT, {"clip_change": 2.0, "pool_u": "server"}),
    "trimmed mean": Defence(LIMIT, {"aggregation": "trimmed", "hostile": 0.25}),
    "multi-Krum": Defence(LIMIT, {"aggregation": "krum", "hostile": 0.25}),
}


def cases(seeds: Sequence[int] = SEEDS, honest_seeds: Sequence[int] = HONEST_SEEDS) -> Iterator[dict[str, Any]]:
    """All runs, seed by seed, so that a study that is stopped early has whole tables of fewer seeds."""
    for seed in (*seeds, *(seed for seed in honest_seeds if seed not in seeds)):
        attacked = list(product(ATTACKS, COUNTS[1:])) if seed in seeds else []
        for attack, count in [(NOBODY, 0), *attacked]:
            for defence in DEFENCES:
                yield {"attack": attack, "hostile": count, "defence": defence, "seed": seed}


def choose_liars(seed: int, count: int, clients: int = CLIENTS) -> list[int]:
    """The hostile clients of a seed. Those of a smaller count are among those of a larger one."""
    order = np.random.default_rng(seed).permutation(clients)
    return sorted(int(client) for client in order[:count])


def config_of(case: Mapping[str, Any]) -> Config:
    entry = recorded.FEDXL2
    defended = {**entry.algorithm, **DEFENCES[case["defence"]].options}
    return shorten(recorded.experiment(entry._replace(algorithm=defended), case["seed"]), case)


def run_case(planned: Planned) -> Outcome:
    """A run, and its metrics on test data: of the chosen round, and of the last one.

    The best round is chosen on honest validation data. A server without any takes the last one.
    """
    case = planned.case
    hostile = choose_liars(case["seed"], case["hostile"])
    simulation = simulate(config_of(case), hostile if case["attack"] == LABEL_FLIP else [])
    problem, shares = simulation.problem, simulation.engine.shares
    engine: Any = simulation.engine
    if hostile:
        engine = Attacked(engine, ATTACKS[case["attack"]], problem.risk, hostile)
    influence = DEFENCES[case["defence"]].influence
    task: Any = simulation
    task.engine = Checked(engine, problem, shares, influence) if influence else engine
    try:
        found = train(simulation, Hooks(say=lambda line: None), None)
    except DivergedError as error:
        return {"diverged": str(error), "on": machine()}, {}
    assert found.server is not None
    last = simulation.examiner.examine(found.server.weights, "test").metrics[METRIC]
    refused = [entry["client"] for row in found.history for entry in row.get("dropped", [])]
    lied = sum(client in hostile for client in refused)
    metrics = {"chosen": round(found.metrics["test"][METRIC], 8), "last": round(last, 8)}
    return {"test": metrics, "refused": {"hostile": lied, "honest": len(refused) - lied}, "on": machine()}, {}


def simulate(config: Config, flipped: Sequence[int]) -> Simulation:
    """The simulation of a config, in which these clients hold wrong labels."""
    settings, algorithm = call(Settings, config.run, "run"), experiment.build_algorithm(config)
    splits = experiment.load_data(config)
    model = experiment.build_model(config, splits.train.shape, algorithm.risk)
    train_on = with_flipped_labels(splits.train, flipped) if flipped else splits.train
    return Simulation(model, splits._replace(train=train_on), algorithm, settings, lambda line: None)


def values(rows: Sequence[Row], attack: str, count: int, defence: str, what: str) -> list[float]:
    """The metrics of a cell; 0.5, as good as chance, for a run that diverged."""
    cells = group(rows, "attack", "hostile", "defence")
    found = cells.get((attack if count else NOBODY, count, defence), [])
    if count == 0:  # in a line with the other counts: the same seeds
        seeds = {row.case["seed"] for row in rows if row.case["attack"] == attack}
        found = [row for row in found if not seeds or row.case["seed"] in seeds]
    return [0.5 if row.diverged else row.test(what) for row in found]


def markdown(rows: Sequence[Row]) -> str:
    parts = [
        "# Hostile clients",
        ABOUT,
        f"On {machines(rows)}.",
        "## What a defence costs if nobody is hostile",
        costs(rows),
    ]
    attacks = [attack for attack in ATTACKS if attack in group(rows, "attack")]
    for what, words in WHAT.items():
        parts += [f"## Hostile clients: the model {words}"] if attacks else []
        for attack in attacks:
            parts += [f"### {attack[0].upper()}{attack[1:]}", table(rows, attack, what)]
    parts += ["## Refused updates", refusals(rows)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def table(rows: Sequence[Row], attack: str, what: str) -> str:
    body = [
        [defence, *(mean_with_spread(values(rows, attack, count, defence, what)) for count in COUNTS)]
        for defence in DEFENCES
    ]
    return as_markdown(body, ["defence", *(f"{count} of {CLIENTS}" for count in COUNTS)])


def costs(rows: Sequence[Row]) -> str:
    """Each defence against none, seed by seed: mean difference and its standard error."""
    honest = {(row.case["defence"], row.case["seed"]): row for row in rows if row.case["attack"] == NOBODY}
    seeds = sorted({seed for _, seed in honest})
    body = []
    for defence in DEFENCES:
        cells = [defence]
        for what in WHAT:
            own, none = ([honest[name, seed].test(what) for seed in seeds] for name in (defence, "none"))
            cells += [mean_with_spread(own), difference(own, none)]
        body.append(cells)
    against = "against none (standard error)"
    return f"{len(seeds)} seeds.\n\n{as_markdown(body, ['defence', 'last round', against, 'chosen round', against])}"


def refusals(rows: Sequence[Row]) -> str:
    """How many updates the limits refused, of hostile and of honest clients."""
    checked = [row for row in rows if row.case["defence"] != "none" and "refused" in row.found]
    body = []
    for attack, own in group(checked, "attack").items():
        counts = [sum(row.found["refused"][who] for row in own) for who in ("hostile", "honest")]
        body.append([attack, *map(str, counts), str(len(own))])
    return as_markdown(body, ["attack", "of hostile clients", "of honest clients", "runs"])


def draw(path: Path, rows: Sequence[Row]) -> None:
    """A panel per attack, a line per defence against the number of hostile clients."""
    panels = []
    for attack in ATTACKS:
        lines = {
            defence: [
                pictures.Point(count, *mean_and_spread(values(rows, attack, count, defence, "last")))
                for count in COUNTS
            ]
            for defence in DEFENCES
        }
        along, up = f"hostile clients of {CLIENTS}", "partial AUC (FPR ≤ 0.3), last round"
        panels.append(pictures.Panel(attack, along, up, lines))
    pictures.lines(path, "Partial AUC against the number of hostile clients", panels)


def command(
    seeds: Annotated[int, typer.Option(help="Seeds of the attacks.")] = len(SEEDS),
    honest_seeds: Annotated[int, typer.Option(help="Seeds of runs where nobody is hostile.")] = len(HONEST_SEEDS),
    rounds: Rounds = 0,
    jobs: Jobs = 1,
    folder: Folder = OUT,
) -> None:
    """The demo with clients that lie, and defences.

    Four attacks against each defence. Half an hour on one core.
    """
    check(folder, seeds, jobs)
    todo = cases(demo.SEEDS[:seeds], demo.SEEDS[: max(seeds, honest_seeds)])
    with Harness(folder / "hostile.jsonl", run_case, jobs) as do:
        rows = do([Planned({**case, **length(rounds)}) for case in todo])
    draw(folder / "hostile.png", rows)
    finish("hostile", folder, markdown(rows))
