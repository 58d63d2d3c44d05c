"""Executors by name, and which of them `auto` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from fedxl import tree
from fedxl.engine.executors import loop, seeded, vectorised
from fedxl.engine.group import Executor
from fedxl.errors import first_line
from fedxl.models import Score, Weights, weights_of

EXECUTORS = ("loop", "vmap", "graph")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def executor(
    name: str, compiled: bool = True, say: Callable[[str], None] = lambda line: None, **graph: Any
) -> Executor:
    """An executor; `graph` (with options of its own) keeps the step it has captured, so each engine has its own."""
    plain: dict[str, Executor] = {"loop": loop, "vmap": vectorised}
    if name in plain:
        return plain[name]
    try:
        # Not before it is needed: it builds on private modules of torch, which the next torch may not have.
        from fedxl.engine.cuda.graph import GraphExecutor
    except Exception as error:  # whatever a module raises that was written for another torch
        say(f"executor: loop, because graph does not work with torch {torch.__version__}: {first_line(error)}")
        return loop
    return GraphExecutor(compiled=compiled, say=say, **graph)


def choose(model: nn.Module, score: Score, probe: Tensor, clients_at_once: int) -> tuple[str, str]:
    """What `auto` runs, and why (measured in docs/benchmarks.md and docs/performance.md)."""
    if probe.is_cuda:
        return "graph", f"steps of {clients_at_once} clients, captured once and replayed on the GPU"
    if clients_at_once < 2:
        return "loop", "one client at a time"
    if any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        return "loop", "grouped convolutions gain nothing on a CPU"
    if why := not_for_vmap(model, score, probe):
        return "loop", why
    return "vmap", f"{clients_at_once} clients as one program"


def not_for_vmap(model: nn.Module, score: Score, probe: Tensor) -> str:
    """Why clients with this model cannot run as one program; empty if they can."""

    def gradient(weights: Weights, x: Tensor) -> Any:
        found: Any = vjp(lambda params: score(weights._replace(params=params), x)[0], weights.params)
        h, backward = found
        return backward(h)

    probe = torch.cat([probe, probe]) if len(probe) == 1 else probe  # BatchNorm takes no single example
    try:
        with seeded(0, probe.device):
            vmap(gradient, randomness="different")(tree.stack([weights_of(model)] * 2), torch.stack([probe] * 2))
    except Exception as error:  # whatever a model of the user's may raise
        return f"the model cannot be vectorised: {first_line(error)}"
    return ""


def possible(name: str, device: torch.device) -> tuple[str, str]:
    """The executor asked for, or the one that takes its place on this device and why."""
    if name == "graph" and device.type != "cuda":
        return "loop", f"graph needs a CUDA device, and this is {device.type}"
    return name, ""
