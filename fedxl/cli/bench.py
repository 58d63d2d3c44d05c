"""`fedxl bench`: how fast a step is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedxl.config import experiment as configs
from fedxl.errors import require
from fedxl.training.settings import pick_device

out, err = Console(), Console(stderr=True)


def bench(
    model: Annotated[str, typer.Argument(help="A network by name: cnn, resnet18, densenet121, ...")] = "resnet18",
    options: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the network, as stem=7x7.")
    ] = None,
    clients: Annotated[int, typer.Option(help="How many run together.")] = 16,
    steps: Annotated[int, typer.Option(help="Local steps a round.")] = 32,
    batch: Annotated[int, typer.Option(help="Examples a step of S1, and of S2.")] = 32,
    size: Annotated[int, typer.Option(help="Pixels of an image's side.")] = 32,
    channels: Annotated[int, typer.Option(help="Colours of an image.")] = 3,
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16; auto: bf16 on a GPU, else fp32.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "auto",
    rounds: Annotated[int, typer.Option(help="How many are timed.")] = 3,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Whether graph fuses the step.")] = True,
    target: Annotated[Path | None, typer.Option("--json", help="Write the measurements to this file, too.")] = None,
) -> None:
    """How fast a step of all clients is here: FeDXL2 and Local SGD against the eager loop and the joint batch."""
    from fedxl.experiments import bench as benches

    chosen = str(pick_device(device))
    usual = "bf16" if chosen.startswith("cuda") else "fp32"
    setting = benches.Setting(
        clients=clients,
        local_steps=steps,
        batch=batch,
        shape=(channels, size, size),
        precision=usual if precision == "auto" else precision,
        device=chosen,
        compile=compiled,
    )
    require(rounds >= 1, f"rounds must be at least 1, got {rounds}")
    build = configs.network(model, options or [], setting.shape)
    rows = benches.table(build, setting, benches.executors_on(setting.device), rounds=rounds, say=_aside)
    out.print(benches.as_text(rows, setting))
    if target:
        target.write_text(benches.as_json(rows, setting, model, options or []))
        out.print(f"measurements in {target}", highlight=False, soft_wrap=True)


def _aside(line: str) -> None:
    """What goes on, for people at a terminal; results alone go into a pipe."""
    if err.is_terminal:
        err.print(line, style="dim", highlight=False, soft_wrap=True, markup=False)
