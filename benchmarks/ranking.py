"""Learning to rank across five archives: ranking.json, ranking.md and ranking.png.

python benchmarks/ranking.py [FOLDER] [digits|synthetic]

Whole queries at clients, and queries whose items lie at all clients; pointwise, listwise and NDCG risks, federated
and centralised. The learning rate of each is chosen on validation queries of the first seed. About half an hour of
one core; it resumes.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine

import fedxl
from fedxl import metrics
from fedxl.errors import DivergedError
from fedxl.experiments.retrieval import ARCHIVES, DATA, federated
from fedxl.files import write_json
from fedxl.models import mlp

SEEDS = 3
QUERIES = 4  # that a client reads in a step; in one place, a step reads as many as all clients together
METRICS = ("ndcg@5", "ndcg@10")
RISKS = {
    "listwise": fedxl.listwise,
    "NDCG": fedxl.ndcg,
    "NDCG@10 by rank": partial(fedxl.ndcg, top=10, top_form="rank"),
    "K-SONG": partial(fedxl.ndcg, top=10),
    "K-SONG, weight": partial(fedxl.ndcg, top=10, top_form="weight"),
}
FAMILIES = {
    "Local Pair": fedxl.LocalPair,
    "FeDXL": fedxl.FeDXL2,
    "FeDXL, K = 2": fedxl.FeDXL2,
    "centralised": fedxl.SOX,
}
STEPS = 160  # of a client in all; 8 a round, or 2
RATES = {"pointwise": (0.03, 0.1, 0.3), "listwise": (0.1, 0.3, 1.0)}
RATES_OF_NDCG = (0.3, 1.0, 3.0)  # in all its forms
PLACES = ("whole queries", "items by kind")
CENTRAL = "in one place"


def algorithm(method: str, lr: float) -> Any:
    family, risk = method.split(": ")
    if risk == "pointwise":
        return fedxl.LocalSGD(fedxl.listwise(), lr=lr, loss="squared")
    return FAMILIES[family](RISKS[risk](queries=QUERIES * (ARCHIVES if family == "centralised" else 1)), lr=lr)


def cases(data: str) -> list[tuple[str, str]]:
    """(spread, method)."""
    ranked = [f"{family}: {risk}" for family in ("Local Pair", "FeDXL") for risk in RISKS]
    spread = [(spread, method) for spread in PLACES for method in ("Local SGD: pointwise", *ranked)]
    spread += [(PLACES[1], f"FeDXL, K = 2: {risk}") for risk in RISKS]
    return [*spread, *((CENTRAL, f"centralised: {risk}") for risk in RISKS)]


def rates(method: str) -> tuple[float, ...]:
    return RATES.get(method.split(": ")[1], RATES_OF_NDCG)


def run(data: str, spread: str, method: str, lr: float, seed: int) -> dict[str, float]:
    splits = federated(DATA[data](np.random.default_rng(seed)), PLACES[0] if spread == CENTRAL else spread)
    torch.manual_seed(seed)
    model = mlp(splits.train.example_shape, hidden=(32,))
    many = ARCHIVES if spread == CENTRAL else 1
    try:
        return fitted(model, splits, algorithm(method, lr), many, 2 if "K = 2" in method else 8, seed)
    except DivergedError:
        return {f"{split} {name}": 0.0 for split in ("validation", "test") for name in METRICS}


def fitted(model: Any, splits: Any, method: Any, many: int, steps: int, seed: int) -> dict[str, float]:
    result = fedxl.fit(
        model, splits, method, rounds=STEPS // steps, local_steps=steps, batch_size=(16 * many, 48 * many),
        eval_every=40 // steps, seed=seed,
        weighting="samples", select="ndcg@10", hooks=fedxl.Hooks(say=lambda line: None),
    )  # fmt: skip
    found = result.metrics
    return {f"{split} {name}": found[split][name] for split in ("validation", "test") for name in METRICS}


def study(path: Path, only: list[str]) -> dict[str, dict[str, float]]:
    runs = json.loads(path.read_text()) if path.exists() else {}
    for data in only:
        for spread, method in cases(data):
            for seed in range(SEEDS):
                wanted = rates(method) if seed == 0 else (chosen(runs, data, spread, method),)
                for lr in wanted:
                    key = " | ".join((data, spread, method, f"{lr:g}", str(seed)))
                    if key not in runs:
                        runs[key] = run(data, spread, method, lr, seed)
                        write_json(path, runs)
                        print(key, runs[key], flush=True)
    return runs


def chosen(runs: dict[str, dict[str, float]], data: str, spread: str, method: str) -> float:
    """The learning rate with the best validation metric of the first seed."""
    return max(rates(method), key=lambda lr: runs[f"{data} | {spread} | {method} | {lr:g} | 0"]["validation ndcg@10"])


def oracle(data: str) -> list[dict[str, float]]:
    """What the true utilities reach on the test queries: noise in the grades keeps it below 1."""
    made = [DATA[data](np.random.default_rng(seed))[2] for seed in range(SEEDS)]
    each = metrics.resolve(METRICS)
    return [metrics.judge(each, items.utility, items.grades, items.queries) for items in made]


def table(runs: dict[str, dict[str, float]]) -> dict[str, dict[tuple[str, str], list[dict[str, float]]]]:
    found: dict[str, dict[tuple[str, str], list[dict[str, float]]]] = defaultdict(dict)
    for data in DATA:
        for spread, method in cases(data):
            lr = chosen(runs, data, spread, method)
            keys = [f"{data} | {spread} | {method} | {lr:g} | {seed}" for seed in range(SEEDS)]
            found[data][spread, method] = [runs[key] for key in keys]
    return found


def cell(values: list[float]) -> str:
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"


def write(runs: dict[str, dict[str, float]], folder: Path) -> None:
    found = table(runs)
    lines = [
        "# Learning to rank", "",
        f"Five archives, 100 training queries of 30 items, an MLP with 32 hidden units, 20 rounds of 8 steps "
        "(K = 2: 80 of 2). Test "
        f"queries: mean ± standard deviation over {SEEDS} seeds of data, partition and weights. Learning rates are "
        "chosen on validation queries of the first seed. The pages on [queries](../guides/ranking.md) and the "
        "[maths](../maths.md#queries) say what the methods are.", "", f"On {machine()}.", "",
        "Command: `python benchmarks/ranking.py`.", "",
    ]  # fmt: skip
    for data, rows in found.items():
        truth = oracle(data)
        lines += [
            f"## {data.capitalize()}",
            "",
            "| items | method | NDCG@5 | NDCG@10 | lr |",
            "|---|---|---:|---:|---:|",
        ]
        for (spread, method), seeds in rows.items():
            values = [cell([one[f"test {name}"] for one in seeds]) for name in METRICS]
            lines.append(
                f"| {spread} | {method} | {values[0]} | {values[1]} | {chosen(runs, data, spread, method):g} |"
            )
        if data == "synthetic":
            values = [cell([one[name] for one in truth]) for name in METRICS]
            lines.append(f"| {CENTRAL} | the true utilities | {values[0]} | {values[1]} |  |")
        lines.append("")
    (folder / "ranking.md").write_text("\n".join(lines))
    plot(found, folder / "ranking.png")


def plot(found: Any, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    methods = list(dict.fromkeys(method for _, method in next(iter(found.values()))))
    figure, axes = plt.subplots(1, len(found), figsize=(12, 4.5), sharey=False)
    for axis, (data, rows) in zip(axes, found.items(), strict=True):
        places = [*PLACES, CENTRAL]
        for number, method in enumerate(methods):
            at = [place for place in places if (place, method) in rows]
            values = [[one["test ndcg@10"] for one in rows[place, method]] for place in at]
            x = [places.index(place) + (number - len(methods) / 2) * 0.06 for place in at]
            family = method.split(": ")[0]
            marker = {"Local SGD": "x", "Local Pair": "s", "FeDXL": "o", "FeDXL, K = 2": "^", "centralised": "D"}[
                family
            ]
            color = {
                "pointwise": "tab:gray",
                "listwise": "tab:blue",
                "NDCG": "tab:orange",
                "NDCG@10 by rank": "tab:red",
                "K-SONG": "tab:green",
                "K-SONG, weight": "tab:olive",
            }[method.split(": ")[1]]
            means, spreads = [np.mean(v) for v in values], [np.std(v, ddof=1) for v in values]
            axis.errorbar(x, means, spreads, fmt=marker, color=color, capsize=2, label=method)
        axis.set_xticks(range(len(places)), places)
        axis.set_title(data)
        axis.set_ylabel("test NDCG@10")
        axis.grid(axis="y", alpha=0.3)
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    folder.mkdir(parents=True, exist_ok=True)
    only = sys.argv[2:] or list(DATA)
    runs = study(folder / "ranking.json", only)
    if len(only) == len(DATA):
        write(runs, folder)
        print(f"ranking.json, ranking.md and ranking.png in {folder}")


if __name__ == "__main__":
    main()
