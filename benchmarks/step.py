"""How fast a step of all clients is: the executors against each other and against one model on all their data.

python -m benchmarks.step resnet18 --set stem=7x7
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as nnf

from fedxl import sampling
from fedxl.algorithms import ALGORITHMS
from fedxl.config import experiment as configs
from fedxl.data.examples import Augment, Examples, facts_about
from fedxl.data.splits import MEANS
from fedxl.engine.executors import Executor, executor
from fedxl.errors import UserError, require, unknown
from fedxl.models import MODELS, weights_of
from fedxl.models.functional import PRECISIONS, products
from fedxl.options import call
from fedxl.risks import partial_auc
from fedxl.training.problem import assemble
from fedxl.training.rounds import play_round
from fedxl.training.settings import Settings, pick_device
from fedxl.training.simulation import simulator

if TYPE_CHECKING:  # what a GPU needs is imported where it is used
    from fedxl.engine.cuda.lanes import Capture, Layout, Play

out, err = Console(), Console(stderr=True)
# What images undergo on their way, as in the paper's experiments on CIFAR.
AUGMENT = Augment(crop=4, flip=True, noise=0.02)
LOOP_STEPS = 2  # of the eager loop, which takes a second for each
EXAMPLES = 1500  # of a client, as the paper's CIFAR-10 on 16 machines; one in six is positive


@dataclass(frozen=True)
class Setting:
    """What is timed."""

    clients: int = 16
    local_steps: int = 32
    batch: int = 32  # of each side
    shape: tuple[int, int, int] = (3, 32, 32)
    precision: str = "bf16"
    device: str = "cuda"
    compile: bool = True
    layout: Layout = "auto"  # of the executor `graph`

    def __post_init__(self) -> None:
        for name in ("clients", "local_steps", "batch"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(min(self.shape) >= 1, f"images must have at least one pixel and one colour, got {list(self.shape)}")
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        half = self.precision == "bf16" and not self.device.startswith("cuda")
        require(not half, "bf16 is for GPUs; on a CPU set --precision fp32")


@dataclass(frozen=True)
class Row:
    """One line of the table; ratios are to other lines of the same run."""

    algorithm: str
    executor: str
    ms_per_step: float  # of all clients, averaging and merging included
    images_per_second: float
    to_joint_batch: float | None = None
    to_loop: float | None = None
    peak_memory_gb: float | None = None
    note: str = ""


class Job:
    """Rounds of one algorithm on one executor, to be timed."""

    def __init__(
        self,
        model: nn.Module,
        data: Examples,
        algorithm: str,
        run: Executor,
        local_steps: int,
        batch: int,
        cohort: int = 0,
        device: str = "cpu",
        precision: str = "fp32",
    ) -> None:
        self.cohort, self.clients = cohort, len(data.parts)
        settings = Settings(
            local_steps=local_steps, batch1=batch, batch2=batch, cohort=cohort, device=device, precision=precision
        )
        facts = facts_about(data.holdings(), settings.weighting)
        problem = assemble(model, ALGORITHMS[algorithm](risk=partial_auc(), lr=0.01), settings, facts)
        self.algorithm = problem.algorithm
        self.engine = simulator(problem, data, run)
        self.server = self.algorithm.init(weights_of(problem.model))
        self.number = self.algorithm.first_round
        if self.number == 0:
            self.round()  # the warm-up

    def round(self) -> None:
        members = sampling.cohort(0, self.number, self.clients, self.cohort)
        self.server, _ = play_round(self.algorithm, self.engine, self.server, self.number, members)
        self.number += 1

    def finish(self) -> None:
        """Wait until all that was asked for is done."""
        device = self.engine.placement.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def timed(job: Job, rounds: int, warm_up: int = 2) -> float:
    """Seconds per round, over several rounds without a pause, including the host's part."""
    for _ in range(warm_up):
        job.round()
    job.finish()
    began = time.perf_counter()
    for _ in range(rounds):
        job.round()
    job.finish()
    return (time.perf_counter() - began) / rounds


def images(setting: Setting, augment: Augment = AUGMENT) -> Examples:
    """Clients with random images of bytes: how long a step takes does not depend on what is on them."""
    total = setting.clients * EXAMPLES
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (total, *setting.shape), np.uint8))
    y = torch.from_numpy((np.arange(total) % 6 == 0).astype(np.int64))
    means = tuple(MEANS[site % len(MEANS)] for site in range(setting.clients))
    data = Examples(x, y[:, None], np.arange(total) // EXAMPLES)
    return data.augmented(replace(augment, site_means=means))


def table(
    build: Callable[[], nn.Module],
    setting: Setting,
    executors: tuple[str, ...],
    rounds: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """All lines: one model on the joint batch, then each algorithm on each executor."""
    data = images(setting)
    say("one model on the joint batch ...")
    bound = joint_batch(build(), setting)
    rows = [bound]
    for algorithm in ("fedxl2", "local_sgd"):
        loop = None
        for name in executors:
            say(f"{algorithm}, {name} ...")
            row = measure(build(), setting, algorithm, name, data, rounds)
            loop = row.ms_per_step if name == "loop" else loop
            rows.append(
                replace(
                    row,
                    to_joint_batch=row.ms_per_step / bound.ms_per_step,
                    to_loop=loop and row.ms_per_step / loop,
                )
            )
    return rows


def measure(
    model: nn.Module,
    setting: Setting,
    algorithm: str,
    name: str,
    data: Examples,
    rounds: int = 3,
    begin: Callable[[], None] = lambda: None,
) -> Row:
    """One line of the table. `begin` is called when all is compiled, before anything is captured or timed."""
    steps, notes = min(LOOP_STEPS, setting.local_steps) if name == "loop" else setting.local_steps, [""]
    _forget_memory(setting)
    graph: dict[str, Any] = {"capture": after(begin), "layout": setting.layout} if name == "graph" else {}
    run = executor(name, setting.compile, notes.append, **graph)
    job = Job(model, data, algorithm, run, steps, setting.batch, 0, setting.device, setting.precision)
    if name != "graph":
        begin()
    job.round()
    seconds = timed(job, 1 if name == "loop" else rounds, warm_up=1) / steps
    shown = len(data.parts) * 2 * setting.batch
    memory = _peak_memory(setting)
    return Row(algorithm, name, 1000 * seconds, shown / seconds, peak_memory_gb=memory, note=notes[-1][10:])


def after(begin: Callable[[], None]) -> Capture:
    from fedxl.engine.cuda.lanes import cuda_graph

    def capture(lanes: Sequence[Play], repeats: int, large: bool) -> Play:
        begin()
        return cuda_graph(lanes, repeats, large)

    return capture


def joint_batch(model: nn.Module, setting: Setting, begin: Callable[[], None] = lambda: None) -> Row:
    """The bound: plain SGD of one model on a batch as large as all clients' together, written as anyone would.

    Forward pass compiled and step captured where there is a GPU; the batch is there already, and nothing is averaged.
    """
    from fedxl.engine.cuda.lanes import cuda_graph, searching

    device, size = torch.device(setting.device), 2 * setting.batch * setting.clients
    exact, gpu = PRECISIONS[setting.precision], setting.device.startswith("cuda")
    _forget_memory(setting)
    layout = torch.channels_last if gpu else torch.contiguous_format
    model = model.to(device).to(memory_format=layout).train()  # type: ignore[call-overload]
    x = torch.rand(size, *setting.shape, device=device).contiguous(memory_format=layout)
    y = (torch.arange(size, device=device) % 2).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss() -> torch.Tensor:
        with exact.casting(device):
            h = model(x)
        return nnf.binary_cross_entropy_with_logits(h.float().squeeze(-1), y)

    forward = torch.compile(loss) if gpu and setting.compile else loss

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        forward().backward()
        optimizer.step()

    with products(exact), searching():
        run = cuda_graph([step], 1, large=True) if gpu else step
        begin()
        seconds = repeated(run, 20 if gpu else 2, gpu)
    note = "SGD, compiled and captured" if gpu and setting.compile else "SGD"
    return Row("one model", "joint batch", 1000 * seconds, size / seconds, 1.0, None, _peak_memory(setting), note)


def repeated(run: Callable[[], None], times: int, gpu: bool) -> float:
    """Seconds per call."""
    for number in range(times + 1):
        if number == 1:  # the first one warms up
            if gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
        run()
    if gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def _forget_memory(setting: Setting) -> None:
    if setting.device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak_memory(setting: Setting) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if setting.device.startswith("cuda") else None


def executors_on(device: str) -> tuple[str, ...]:
    return ("loop", "graph") if device.startswith("cuda") else ("loop", "vmap")


def as_text(rows: Sequence[Row], setting: Setting) -> Table:
    """The table for a terminal."""
    where = ", ".join(
        f"{key} {value}" if key != "device" else value for key, value in machine(setting.device).items()
    )
    shown = Table(title=f"{where}\n{describe(setting)}", title_justify="left")
    shown.add_column("")
    for heading in ("ms per step", "images/s", "to joint batch", "to loop", "peak GiB"):
        shown.add_column(heading, justify="right")
    shown.add_column("")
    for row in rows:
        numbers = (row.to_joint_batch, row.to_loop, row.peak_memory_gb)
        cells = ["" if number is None else f"{number:.3g}" for number in numbers]
        name = f"{row.algorithm}, {row.executor}"
        shown.add_row(name, f"{row.ms_per_step:.3f}", f"{row.images_per_second:,.0f}", *cells, row.note)
    return shown


def describe(setting: Setting) -> str:
    image = "x".join(map(str, setting.shape))
    batches = f"batch {setting.batch}+{setting.batch}"
    return (
        f"{setting.clients} clients, {setting.local_steps} steps per round, {batches}, {image}, {setting.precision}"
    )


def as_json(rows: Sequence[Row], setting: Setting, model: str, options: Sequence[str]) -> str:
    """The same for programs."""
    record = {
        "machine": machine(setting.device),
        "model": {"name": model, "options": list(options)},
        "setting": asdict(setting),
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(record, indent=2) + "\n"


def machine(device: str) -> dict[str, str]:
    """What the times were measured on."""
    gpu = device.startswith("cuda")
    name = torch.cuda.get_device_name() if gpu else f"{platform.machine()}, {torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"device": name, **versions, **({"cuda": str(torch.version.cuda)} if gpu else {})}


def main(
    model: Annotated[str, typer.Argument(help="A network by name: cnn, resnet18, densenet121, ...")] = "resnet18",
    options: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the network, as stem=7x7.")
    ] = None,
    clients: Annotated[int, typer.Option(help="How many run together.")] = 16,
    steps: Annotated[int, typer.Option(help="Local steps per round.")] = 32,
    batch: Annotated[int, typer.Option(help="Examples per step of S1, and of S2.")] = 32,
    size: Annotated[int, typer.Option(help="Pixels of an image's side.")] = 32,
    channels: Annotated[int, typer.Option(help="Colours of an image.")] = 3,
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16; auto: bf16 on a GPU, else fp32.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "auto",
    rounds: Annotated[int, typer.Option(help="How many are timed.")] = 3,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Whether graph fuses the step.")] = True,
    target: Annotated[Path | None, typer.Option("--json", help="Write the measurements to this file, too.")] = None,
) -> None:
    """How fast a step of all clients is here: FeDXL2 and Local SGD against the eager loop and the joint batch."""
    chosen = str(pick_device(device))
    usual = "bf16" if chosen.startswith("cuda") else "fp32"
    setting = Setting(
        clients=clients,
        local_steps=steps,
        batch=batch,
        shape=(channels, size, size),
        precision=usual if precision == "auto" else precision,
        device=chosen,
        compile=compiled,
    )
    require(rounds >= 1, f"rounds must be at least 1, got {rounds}")
    build = network(model, options or [], setting.shape)
    rows = table(build, setting, executors_on(setting.device), rounds=rounds, say=_aside)
    out.print(as_text(rows, setting))
    if target:
        target.write_text(as_json(rows, setting, model, options or []))
        out.print(f"measurements in {target}", highlight=False, soft_wrap=True)


def network(name: str, options: Sequence[str], shape: tuple[int, ...]) -> Callable[[], nn.Module]:
    """How to build a network with one output from `key=value` options. Raises UserError if that cannot be done."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    settings = dict(configs.parse_assignment(option, "key=value, for example stem=7x7") for option in options)

    def build() -> nn.Module:
        return call(MODELS[name], settings, "model", ours={"shape": shape, "outputs": 1})

    build()
    return build


def _aside(line: str) -> None:
    """What goes on, for people at a terminal; results alone go into a pipe."""
    if err.is_terminal:
        err.print(line, style="dim", highlight=False, soft_wrap=True, markup=False)


def command() -> None:
    try:
        typer.run(main)
    except UserError as error:
        err.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    command()
