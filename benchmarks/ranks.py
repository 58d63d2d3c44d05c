"""Several processes on this machine's cores: strong and weak scaling, what communication costs, and placement.

python benchmarks/ranks.py        # writes docs/results/ranks.*, a few minutes
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, population
from torch import nn

from benchmarks.step import Job
from fedxl.cli.processes import free_port
from fedxl.data.examples import Examples
from fedxl.engine.executors import executor
from fedxl.engine.ranks.ranked import Ranked, costs, longest_first
from fedxl.engine.ranks.team import Place, Seat, Team
from fedxl.models import cnn, mlp, operations

RESULTS = Path(__file__).parents[1] / "docs" / "results"
LIMIT = 600.0
STEPS, BATCH, FEATURES = 16, 16, 64
RANKS = (1, 2, 4)
CLIENTS = {"MLP": 256, "CNN": 8}  # of the federation that is divided; half as many per rank in weak scaling
NOTE = (
    "The CPU time of the busiest rank is what a round would take if each rank had a core of its own. Wall-clock "
    "times depend on how many cores there are and what else they do. Communication includes waiting for slower ranks."
)
Sizes = list[int]  # examples of each client


def images(sizes: Sizes) -> Examples:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(sum(sizes), 1, 16, 16)).astype(np.float32))
    return examples(x, sizes)


def vectors(sizes: Sizes) -> Examples:
    if len(set(sizes)) == 1:
        return population(len(sizes), sizes[0], FEATURES)
    rng = np.random.default_rng(0)
    return examples(torch.from_numpy(rng.normal(size=(sum(sizes), 4)).astype(np.float32)), sizes)


def examples(x: torch.Tensor, sizes: Sizes) -> Examples:
    """Every second example is positive."""
    return Examples(x, torch.arange(len(x))[:, None] % 2, np.repeat(np.arange(len(sizes)), sizes))


def job(network: str, sizes: Sizes) -> tuple[Job, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    data = images(sizes) if network == "CNN" else vectors(sizes)
    probe = data.fetch(torch.tensor([0, 1]))
    shape = tuple(probe.shape[1:])
    model = cnn(shape) if network == "CNN" else mlp(shape, hidden=(FEATURES,))
    run = executor("loop" if network == "CNN" else "vmap")
    return Job(model, data, "fedxl2", run, STEPS, BATCH), model, probe


def ranked(made: Job, model: nn.Module, probe: torch.Tensor, team: Team, by_cost: bool) -> None:
    first = [len(side) for side in made.engine.drawing.first]
    engine = Ranked(made.engine, team, costs(operations(model, probe), 2 * BATCH, STEPS, first))
    if not by_cost:
        engine._places = lambda cohort: [i % team.size for i in range(len(cohort))]  # type: ignore[method-assign]
    made.engine = engine  # type: ignore[assignment]


def rank(
    number: int, size: int, port: int, network: str, sizes: Sizes, by_cost: bool, rounds: int, answers: Any
) -> None:
    """One process: its rounds, timed."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(number), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    made, model, probe = job(network, sizes)
    if size == 1:
        answers.put(timed(made, rounds, lambda: (0, 0.0)))
        return
    with Team.joined(Seat(number, size, number, size), Place("cpu"), LIMIT) as team:
        ranked(made, model, probe, team, by_cost)
        answers.put(timed(made, rounds, lambda: (team.spent.bytes, team.spent.seconds)))


def timed(made: Job, rounds: int, spent: Callable[[], tuple[int, float]]) -> dict[str, float]:
    made.round()
    seconds: list[float] = []
    (sent, waited), worked = spent(), time.process_time()
    for _ in range(rounds):
        began = time.perf_counter()
        made.round()
        seconds.append(time.perf_counter() - began)
    sent_after, waited_after = spent()
    return {
        "seconds": statistics.median(seconds),
        "cpu": (time.process_time() - worked) / rounds,
        "bytes": (sent_after - sent) / rounds,
        "talking": (waited_after - waited) / rounds,
    }


def measure(size: int, network: str, sizes: Sizes, by_cost: bool = True, rounds: int = 3) -> dict[str, Any]:
    """A round on so many ranks: its time, the CPU time of all ranks, the bytes that one sends, the time it waits."""
    context = get_context("spawn")
    answers, port = context.Queue(), free_port()
    started = [
        context.Process(target=rank, args=(number, size, port, network, sizes, by_cost, rounds, answers))
        for number in range(size)
    ]
    for process in started:
        process.start()
    each = [answers.get(timeout=LIMIT) for _ in started]
    for process in started:
        process.join()
    mean = {key: statistics.mean(one[key] for one in each) for key in ("bytes", "talking")}
    # Of the CPU's work that of the busiest rank: on a core of its own it would be the round's time.
    longest = {key: max(one[key] for one in each) for key in ("seconds", "cpu")}
    found = {"ranks": size, "network": network, "clients": len(sizes), "by_cost": by_cost, **mean, **longest}
    found["all_cpu"] = sum(one["cpu"] for one in each)
    print(json.dumps(found), flush=True)
    return found


def ragged(clients: int) -> Sizes:
    """A few clients hold most examples (a Pareto distribution), the largest two million."""
    rng = np.random.default_rng(3)
    sizes = rng.pareto(0.7, clients) + 0.05
    return [int(size) for size in np.clip(2_000_000 * sizes / sizes.max(), 100, None)]


def table(rows: list[dict[str, Any]], title: str) -> list[str]:
    lines = [
        f"## {title}",
        "",
        "| network | ranks | clients | round, ms | busiest rank's CPU, ms | all ranks' CPU, ms |",
    ]
    lines[-1] += " KB sent per rank | ms in communication |"
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        times = " | ".join(f"{1000 * row[key]:.0f}" for key in ("seconds", "cpu", "all_cpu"))
        sent = f"{row['bytes'] / 1000:.1f} | {1000 * row['talking']:.0f}"
        lines.append(f"| {row['network']} | {row['ranks']} | {row['clients']} | {times} | {sent} |")
    return [*lines, ""]


def placed(rows: list[dict[str, Any]], sizes: Sizes) -> list[str]:
    lines = ["## Placement of ragged clients", ""]
    each = costs(2.0 * 4 * FEATURES, 2 * BATCH, STEPS, [size // 2 for size in sizes])
    for name, places in (
        ("by cost", longest_first(list(each), 2)),
        ("round-robin", [i % 2 for i in range(len(sizes))]),
    ):
        loads = [sum(c for c, place in zip(each, places, strict=True) if place == rank) for rank in range(2)]
        row = next(row for row in rows if row["by_cost"] == (name == "by cost"))
        busiest, everyone, whole = (1000 * row[key] for key in ("cpu", "all_cpu", "seconds"))
        lines.append(
            f"- {name}: by the model the costliest rank has {max(loads) / sum(loads):.2f} of all cost; measured, the "
            f"busiest takes {busiest:.0f} ms of {everyone:.0f} of CPU time, and a round {whole:.0f} ms"
        )
    return [*lines, ""]


def draw(strong: list[dict[str, Any]], weak: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    for axis, rows, title in zip(
        axes, (strong, weak), ("Strong: the same clients", "Weak: as many clients on each rank"), strict=True
    ):
        for network in CLIENTS:
            own = [row for row in rows if row["network"] == network]
            for key, style, what in (
                ("cpu", "o-", "busiest rank's CPU"),
                ("seconds", "x:", "wall clock, 2 shared cores"),
            ):
                ratios = [row[key] / own[0][key] for row in own]
                axis.plot([row["ranks"] for row in own], ratios, style, label=f"{network}, {what}")
        axis.plot(RANKS, [1 / n if rows is strong else 1 for n in RANKS], "k--", lw=0.8, label="ideal")
        axis.set(title=title, xlabel="ranks", ylabel="time of a round, one rank = 1", xticks=RANKS, ylim=(0, None))
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=150)


def main() -> None:
    strong = [measure(n, network, [64] * many) for network, many in CLIENTS.items() for n in RANKS]
    weak = [measure(n, network, [64] * (many // 2) * n) for network, many in CLIENTS.items() for n in RANKS]
    sizes = ragged(12)
    places = [measure(2, "MLP", sizes, by_cost) for by_cost in (True, False)]
    found = {"machine": machine(), "strong": strong, "weak": weak, "placement": {"sizes": sizes, "rows": places}}
    (RESULTS / "ranks.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = ["# Several processes", "", found["machine"], ""]
    lines += [NOTE, ""]
    lines += [f"FeDXL2, {STEPS} steps of {BATCH}+{BATCH} examples per round. `python benchmarks/ranks.py`", ""]
    lines += table(strong, "Strong scaling: the same clients") + table(weak, "Weak scaling: as many on each rank")
    (RESULTS / "ranks.md").write_text("\n".join([*lines, *placed(places, sizes)]))
    draw(strong, weak, RESULTS / "ranks.png")


if __name__ == "__main__":
    main()
