"""`compare`: results side by side, trained here if need be, each algorithm with the same seeds and the same data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedxl.algorithms.protocol import Algorithm
from fedxl.errors import printable, require
from fedxl.metrics import key
from fedxl.progress import progress
from fedxl.reporting.notebook import Comparison, Runs, as_runs
from fedxl.training.fit import fit, require_algorithm
from fedxl.training.result import Result
from fedxl.training.settings import Hooks

MOST_SEEDS = 1000
Network = nn.Module | Callable[[], nn.Module]
QUIET = Hooks(say=lambda line: None)  # many runs, one table: what each has to say goes nowhere


def compare(
    what: Mapping[str, Runs | Sequence[Runs] | Algorithm],
    model: Network | None = None,
    clients: Any = None,
    *,
    seeds: int = 1,
    reference: str = "",
    **settings: Any,
) -> Comparison:
    """Compare results, or train algorithms and compare these: means over seeds, intervals, paired differences.

    Args:
        what: By label a result, the folder of a run or of several, a list of them, or an algorithm to train.
        model: For algorithms: a network, or a function that builds one, which is called with torch's seed set to
            each seed. A network starts from its own weights with every seed.
        clients: For algorithms: the data, as for `fit`.
        seeds: Runs of each algorithm, with the seeds `seed`, `seed + 1`, ...
        reference: The label that the others are compared with; by default the best on validation data.
        settings: What else `fit` takes: validation, test, batch_size, rounds, ... Without `select`, the metric of the
            reference's risk chooses the best round of every algorithm; without a reference, that of the first label.
    """
    require(isinstance(what, Mapping) and len(what) > 0, "give results or algorithms by label, in a dict")
    named = all(isinstance(label, str) and label for label in what)
    require(named, f"labels must be texts, not {printable(list(what), 60)}")
    require(1 <= seeds <= MOST_SEEDS, f"seeds must lie between 1 and {MOST_SEEDS}, got {seeds}")
    todo = {label: it for label, it in what.items() if isinstance(it, Algorithm)}
    require(not todo or (model is not None and clients is not None), "algorithms need model and clients to train on")
    fixed = [name for name in ("out", "resume", "hooks", "progress") if name in settings]
    require(not fixed, f"{', '.join(fixed)}: not for several runs; train each with fit, and compare the results")
    settings = {"select": _metric(what.get(reference, next(iter(what.values())))), **settings}
    trained: dict[str, Sequence[Result]] = {}
    with progress("runs", len(todo) * seeds) if todo else nullcontext(lambda count: None) as advance:
        for label, algorithm in todo.items():
            assert model is not None, "checked"
            trained[label] = [_trained(model, clients, algorithm, n, settings, advance) for n in range(seeds)]
    runs = []
    for label, it in what.items():
        found = as_runs(it if not isinstance(it, Algorithm) else trained[label])
        runs += [replace(run, name=f"{label}-{run.seed}", label=label) for run in found]
    return Comparison(runs, trained, reference)


def _metric(it: Runs | Sequence[Runs] | Algorithm) -> str:
    """What chooses its best round, where that means the same for others; else each risk chooses by its own."""
    metric = it.risk.metric if isinstance(it, Algorithm) else next((run.chosen_by for run in as_runs(it)), "")
    return "" if key(metric) == "risk" else metric


def _trained(
    model: Network, clients: Any, algorithm: Algorithm, number: int, settings: Mapping[str, Any], advance: Any
) -> Result:
    require_algorithm(algorithm)
    seed = int(settings.get("seed", 0)) + number
    result = fit(network(model, seed), clients, algorithm, hooks=QUIET, progress=False, **{**settings, "seed": seed})
    require(not result.interrupted, "stopped; nothing is compared")
    advance(1)
    return result


def network(model: Network, seed: int) -> nn.Module:
    """A network: the one given, or what builds one, with torch's seed set."""
    if isinstance(model, nn.Module) or not callable(model):
        return model
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return model()
