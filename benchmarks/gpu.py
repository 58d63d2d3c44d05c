"""All figures of docs/performance.md, on one GPU: everything is compiled side by side, then timed one at a time.

python benchmarks/gpu.py --out figures.jsonl --plot clients.png [CASE ...]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import step as bench
from benchmarks.step import Setting
from fedxl.data.examples import Examples
from fedxl.engine.cuda import lanes
from fedxl.engine.executors import executor
from fedxl.models import MODELS
from fedxl.reporting.plots import require_matplotlib

Begin = Callable[[], None]
COLOUR = (3, 32, 32)
STEMS = ("7x7", "3x3")
COHORTS = (1, 4, 7, 13, 25, 100, 200, 400)  # what a card has of a cohort of 50 or 400 on several
NOT_COMPILED = Setting(compile=False)


def network(name: str, shape: tuple[int, ...] = COLOUR, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name](shape, **options)


def step(
    begin: Begin, model: str, options: dict[str, Any], algorithm: str, run: str, streams: int = 0, **changes: Any
) -> dict[str, Any]:
    """A step of all clients, whole rounds timed; with a number of streams other than the engine's, if named."""
    if streams:
        lanes.STREAMS = lanes.STREAMS_OF_LARGE = streams  # of this process, which does nothing else
    setting = Setting(**changes)
    built = network(model, setting.shape, **options)
    row = bench.measure(built, setting, algorithm, run, bench.images(setting), 4, begin)
    return {**asdict(row), "clients": setting.clients}


def not_compiled(
    begin: Begin, model: str, options: dict[str, Any], layout: str, setting: Setting = NOT_COMPILED
) -> dict[str, Any]:
    """A step that is not compiled; also the time of its replay alone."""
    run: Any = executor("graph", False, capture=bench.after(begin), layout=layout)
    built, images = network(model, setting.shape, **options), bench.images(setting)
    job = bench.Job(
        built, images, "fedxl2", run, setting.local_steps, setting.batch, 0, setting.device, setting.precision
    )
    job.round()
    seconds = bench.timed(job, 2, warm_up=1) / setting.local_steps
    captured = run.captured
    launches = max(1, 32 // (captured.repeats * captured.plan.at_a_time))
    replay = bench.repeated(captured.replay, launches, setting.device == "cuda") * launches / 32
    return {
        "ms_per_step": 1000 * seconds,
        "replay_ms_per_step": 1000 * replay,
        "operations": len(captured.plan.traced.module.graph.nodes),
        "note": captured.description,
    }


def joint(begin: Begin, stem: str) -> dict[str, Any]:
    return asdict(bench.joint_batch(network("resnet18", stem=stem), Setting(), begin))


def fedavg(begin: Begin, run: str, precision: str, cohort: int = 50) -> dict[str, Any]:
    """1,000 clients with 50 images of ten classes, a cohort of them per round, one epoch in batches of 10."""
    rng, total = np.random.default_rng(0), 50_000
    x = torch.from_numpy(rng.integers(0, 256, (total, *COLOUR), np.uint8))
    classes = torch.from_numpy(rng.integers(0, 10, (total, 1)))
    data = Examples(x, classes, np.arange(total) // 50)
    notes = [""]
    how = executor(run, say=notes.append)
    job = bench.Job(network("simple_cnn", outputs=10), data, "local_sgd", how, 5, 5, cohort, "cuda", precision)
    if run == "loop":
        begin()
    job.round()  # of a graph, what it compiles
    begin()
    rounds = 3 if run == "loop" else 200
    return {"ms_per_round": 1000 * bench.timed(job, rounds, warm_up=2), "clients": cohort, "note": notes[-1]}


def cases() -> dict[str, Callable[[Begin], dict[str, Any]]]:
    found: dict[str, Callable[[Begin], dict[str, Any]]] = {}
    for stem in STEMS:
        for algorithm in ("fedxl2", "local_sgd"):
            for run in ("graph", "loop"):
                found[f"resnet18 {stem}, {algorithm}, {run}"] = (
                    lambda begin, stem=stem, algorithm=algorithm, run=run: step(
                        begin, "resnet18", {"stem": stem}, algorithm, run
                    )
                )
        found[f"resnet18 {stem}, joint batch"] = lambda begin, stem=stem: joint(begin, stem)
    for precision in ("bf16", "tf32"):
        found[f"fedavg, graph, {precision}"] = lambda begin, precision=precision: fedavg(begin, "graph", precision)
    for cohort in COHORTS:
        found[f"fedavg, graph, bf16, cohort {cohort}"] = lambda begin, cohort=cohort: fedavg(
            begin, "graph", "bf16", cohort
        )
    found["fedavg, loop, bf16"] = lambda begin: fedavg(begin, "loop", "bf16")
    for run in ("graph", "loop"):
        found[f"densenet121, fedxl2, {run}"] = lambda begin, run=run: step(
            begin, "densenet121", {}, "fedxl2", run, compile=False
        )
    for size in (28, 64):
        found[f"densenet121, {size} pixels, vectorised"] = lambda begin, size=size: step(
            begin, "densenet121", {}, "fedxl2", "graph", compile=False, layout="vectorised", shape=(1, size, size)
        )
        for streams in (4, 8, 16):
            found[f"densenet121, {size} pixels, {streams} streams"] = lambda begin, size=size, streams=streams: step(
                begin, "densenet121", {}, "fedxl2", "graph", streams,
                compile=False, layout="streams", shape=(1, size, size),
            )  # fmt: skip
    found |= layouts()
    found["resnet20, fedxl2, graph, one client"] = lambda begin: step(
        begin, "resnet20", {}, "fedxl2", "graph", clients=1
    )
    for clients in (1, 2, 4, 8, 32, 64):
        found[f"resnet18 7x7, fedxl2, graph, {clients} clients"] = lambda begin, clients=clients: step(
            begin, "resnet18", {"stem": "7x7"}, "fedxl2", "graph", clients=clients
        )
    return found


# What is not compiled, and on which lanes: DenseNet by `auto`, the others where there is no compiler.
SUBJECTS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "resnet18 7x7": ("resnet18", {"stem": "7x7"}, COLOUR),
    "resnet18 3x3": ("resnet18", {"stem": "3x3"}, COLOUR),
    "resnet20": ("resnet20", {}, COLOUR),
    "cnn": ("cnn", {}, COLOUR),
    "densenet121 32": ("densenet121", {}, COLOUR),
    "densenet121 28": ("densenet121", {}, (1, 28, 28)),
}


def layouts() -> dict[str, Callable[[Begin], dict[str, Any]]]:
    """Streams against one lane where nothing is compiled (docs/notes/compiler.md)."""
    found: dict[str, Callable[[Begin], dict[str, Any]]] = {}
    for name, (model, options, shape) in SUBJECTS.items():
        for layout in ("streams", "vectorised"):
            case = {"model": model, "options": options, "layout": layout}
            setting = replace(NOT_COMPILED, shape=shape)
            found[f"not compiled, {name}, {layout}"] = lambda begin, case=case, setting=setting: not_compiled(
                begin, setting=setting, **case
            )
    return found


def work(name: str, arrived: Any, turn: Any, parties: int, patience: float, out: Path) -> None:
    def begin() -> None:
        """All are there, or it took too long; then one at a time."""
        if began:
            return
        with arrived.get_lock():
            arrived.value += 1
        deadline = time.monotonic() + patience
        while arrived.value < parties and time.monotonic() < deadline:
            time.sleep(0.1)
        turn.acquire()
        began.append(time.time())

    began: list[float] = []
    try:
        found = cases()[name](begin)
    except Exception as error:  # one that fails must not keep the others from their turn
        found = {"error": f"{type(error).__name__}: {error}"[:500]}
    begin()  # whatever never came to its turn takes it now, to hand it on
    with out.open("a") as file:
        file.write(json.dumps({"case": name, **found}) + "\n")
    print(name, found, flush=True)
    turn.release()


def plot(figures: Path, target: Path) -> None:
    """Milliseconds per step against the number of clients, beside a line through N = 1."""
    plt = require_matplotlib()
    rows = [json.loads(line) for line in figures.read_text().splitlines()]
    points = sorted(
        (row["clients"], row["ms_per_step"])
        for row in rows
        if row.get("case", "").startswith("resnet18 7x7, fedxl2, graph") and "ms_per_step" in row
    )
    clients, ms = zip(*points, strict=True)
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    axes.plot(clients, ms, "o-", color="#1b6ca8", label="all clients, one graph")
    axes.plot(clients, [ms[0] * n / clients[0] for n in clients], "--", color="#555555", label="one after another")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(clients, [str(n) for n in clients])
    axes.set_yticks([2.0**n for n in range(-1, 8)], [f"{2.0**n:g}" for n in range(-1, 8)])
    axes.set(xlabel="clients", ylabel="ms per step of all clients", ylim=(0.5 * min(ms), 1.5 * ms[0] * clients[-1]))
    axes.set_title(f"FeDXL2, ResNet18 (7x7 stem), batch 32+32, {rows[0]['machine']['device']}")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(target, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", help="parts of names; all by default")
    parser.add_argument("--out", type=Path, default=Path("figures.jsonl"))
    parser.add_argument("--plot", type=Path, help="draw ms per step against the number of clients")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait until all have been compiled")
    arguments = parser.parse_args()
    names, parts = list(cases()), arguments.cases
    known = [part for part in parts if part in names]  # a whole name means that case alone
    wanted = [n for n in names if not parts or n in known or any(p in n for p in parts if p not in known)]
    arguments.out.write_text(json.dumps({"machine": bench.machine("cuda"), "setting": asdict(Setting())}) + "\n")
    context = multiprocessing.get_context("spawn")
    arrived, turn = context.Value("i", 0), context.Semaphore(1)
    processes = [
        context.Process(target=work, args=(name, arrived, turn, len(wanted), arguments.patience, arguments.out))
        for name in wanted
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if arguments.plot:
        plot(arguments.out, arguments.plot)


if __name__ == "__main__":
    main()
