"""Learning to rank across five archives: pointwise, listwise and NDCG risks, federated and in one place.

Whole queries at clients, and queries whose items lie at all clients. The learning rate of each method is chosen on
validation queries of the first seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

import fedxl
from fedxl import metrics
from fedxl.algorithms import build
from fedxl.algorithms.protocol import Algorithm
from fedxl.errors import DivergedError, unknown
from fedxl.models import mlp
from fedxl.reporting.text import as_markdown, mean_and_spread, mean_with_spread
from fedxl.risks import XRisk
from studies import harness, pictures
from studies.harness import Harness, Outcome, Planned, Row, cell, group, machine, machines
from studies.options import OUT, Folder, Jobs, Seeds, check, finish
from studies.retrieval import ARCHIVES, DATA, federate

QUERIES = 4  # that a client reads in a step; in one place, a step reads as many as all clients together
METRICS = ("ndcg@5", "ndcg@10")
SELECT = "ndcg@10"
RISKS: Mapping[str, Callable[..., XRisk]] = {"listwise": fedxl.listwise, "NDCG": fedxl.ndcg}
FAMILIES = {"Local Pair": "local_pair", "FeDXL": "fedxl2", "FeDXL, K = 2": "fedxl2", "centralised": "sox"}
POINTWISE = "Local SGD: pointwise"
STEPS = 160  # of a client in all; 8 per round, or 2
RATES = {"pointwise": (0.03, 0.1, 0.3), "listwise": (0.1, 0.3, 1.0), "NDCG": (0.3, 1.0, 3.0)}
PLACES = ("whole queries", "items by kind")
CENTRAL = "in one place"


def build_method(method: str, lr: float) -> Algorithm:
    family, _, risk = method.partition(": ")
    if method == POINTWISE:
        return build("local_sgd", fedxl.listwise(), lr=lr, loss="squared")
    made = RISKS[risk](queries=QUERIES * (ARCHIVES if family == "centralised" else 1))
    return build(FAMILIES[family], made, lr=lr)


def cells() -> list[tuple[str, str]]:
    """Where items lie, and by which method they are ranked."""
    ranked = [f"{family}: {risk}" for family in ("Local Pair", "FeDXL") for risk in RISKS]
    found = [(place, method) for place in PLACES for method in (POINTWISE, *ranked)]
    found += [(PLACES[1], f"FeDXL, K = 2: {risk}") for risk in RISKS]
    return [*found, *((CENTRAL, f"centralised: {risk}") for risk in RISKS)]


def plan(data: str, place: str, method: str, lr: float, seed: int, steps: int) -> Planned:
    length = {} if steps == STEPS else {"steps": steps}
    return Planned({"data": data, "items": place, "method": method, "lr": lr, "seed": seed, **length})


def run_case(planned: Planned) -> Outcome:
    case = planned.case
    place, method, seed = case["items"], case["method"], case["seed"]
    splits = federate(DATA[case["data"]](np.random.default_rng(seed)), PLACES[0] if place == CENTRAL else place)
    many, steps = ARCHIVES if place == CENTRAL else 1, 2 if "K = 2" in method else 8
    total = case.get("steps", STEPS)
    torch.manual_seed(seed)
    model = mlp(splits.train.shape, hidden=(32,))
    try:
        result = fedxl.fit(
            model, splits, build_method(method, case["lr"]), rounds=total // steps,
            local_steps=steps, batch_size=(16 * many, 48 * many), eval_every=min(40, total) // steps,
            seed=seed, weighting="samples", select=SELECT, hooks=fedxl.Hooks(say=lambda line: None),
        )  # fmt: skip
    except DivergedError as error:
        return {"diverged": str(error), "on": machine()}, {}
    found = {
        split: {name: round(result.metrics[split][name], 8) for name in METRICS} for split in ("validation", "test")
    }
    return {**found, "seconds": round(result.seconds, 1), "on": machine()}, {}


def run(do: Harness, names: Sequence[str], seeds: int, steps: int = STEPS) -> list[Row]:
    """Tune every method on the first seed, then run it with all."""
    trials = {
        (data, place, method): {
            lr: [plan(data, place, method, lr, 0, steps)] for lr in RATES[method.partition(": ")[2]]
        }
        for data in names
        for place, method in cells()
    }
    tuned = harness.tune(do, trials, SELECT)
    chosen = {name: harness.best(found) for name, found in tuned.items()}
    return do(
        [
            plan(data, place, method, lr, seed, steps)
            for (data, place, method), lr in chosen.items()
            for seed in range(seeds)
        ]
    )


def rank_by_truth(data: str, seeds: int) -> list[dict[str, float]]:
    """What the true utilities reach on the test queries: noise in the grades keeps it below 1."""
    made = [DATA[data](np.random.default_rng(seed))[2] for seed in range(seeds)]
    each = metrics.resolve(METRICS)
    return [metrics.judge(each, items.utility, items.grades, items.queries) for items in made]


def markdown(rows: Sequence[Row]) -> str:
    seeds = len(group(rows, "seed"))
    parts = [
        "# Learning to rank",
        "Five archives, 100 training queries of 30 items, an MLP with 32 hidden units, 20 rounds of 8 steps (K = 2: "
        f"80 of 2). Test queries: mean ± standard deviation over {seeds} seeds of data, partition and weights. "
        "Learning rates are chosen on validation queries of the first seed. The pages on "
        "[queries](../guides/ranking.md) and the [maths](../maths.md#queries) say what the methods are.",
        f"On {machines(rows)}.",
    ]
    for data, own in group(rows, "data").items():
        body = [
            [place, method, *(cell(found, name) for name in METRICS), f"{found[0].case['lr']:g}"]
            for (place, method), found in group(own, "items", "method").items()
        ]
        if data == "synthetic":
            truth = rank_by_truth(data, seeds)
            values = [mean_with_spread([one[name] for one in truth]) for name in METRICS]
            body.append([CENTRAL, "the true utilities", *values, ""])
        table = as_markdown(body, ["items", "method", "NDCG@5", "NDCG@10", "lr"])
        parts += [f"## {data.capitalize()}", table.strip()]
    parts.append("![Test NDCG@10 against where items lie](ranking.png)")
    return "\n\n".join(parts) + "\n"


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Test NDCG@10 against where items lie, a line per method."""
    places = [*PLACES, CENTRAL]
    panels = []
    for data, own in group(rows, "data").items():
        lines: dict[str, list[pictures.Point]] = {}
        for (place, method), found in group(own, "items", "method").items():
            at = pictures.Point(places.index(place), *mean_and_spread([row.test(SELECT) for row in found]))
            lines.setdefault(method, []).append(at)
        panels.append(pictures.Panel(data, "where a query's items lie", "test NDCG@10", lines, places))
    pictures.lines(path, "Learning to rank across five archives", panels)


def command(
    data: Annotated[str, typer.Option(metavar="NAME,...", help="digits, synthetic.")] = ",".join(DATA),
    seeds: Seeds = 3,
    steps: Annotated[int, typer.Option(help="Local steps of a run.")] = STEPS,
    jobs: Jobs = 1,
    folder: Folder = OUT,
) -> None:
    """Learning to rank across five archives.

    Pointwise, listwise and NDCG risks, federated and in one place. A quarter of an hour on one core.
    """
    check(folder, seeds, jobs)
    for name in (chosen := data.split(",")):
        if name not in DATA:
            raise unknown("data set", name, DATA)
    with Harness(folder / "ranking.jsonl", run_case, jobs) as do:
        rows = run(do, chosen, seeds, steps)
    draw(folder / "ranking.png", rows)
    finish("ranking", folder, markdown(rows))
