"""`fit`: train a model on clients' data from Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedxl.algorithms.protocol import AnyAlgorithm
from fedxl.data.augment import Augment
from fedxl.data.federation import Clients, Federation, HeldBack, Splits, Weighting, as_splits
from fedxl.data.label_columns import Columns
from fedxl.data.label_forms import Label
from fedxl.data.participation import CohortWeights, Participation
from fedxl.errors import UserError, kind_of, require
from fedxl.metrics import Item
from fedxl.options import call
from fedxl.training.hooks import Hooks
from fedxl.training.problem import require_algorithm
from fedxl.training.result import Result
from fedxl.training.settings import Settings
from fedxl.training.simulation import Simulation
from fedxl.training.trainer import train


def fit(
    model: nn.Module,
    clients: Federation | Splits | Clients,
    algorithm: AnyAlgorithm,
    *,
    rounds: int = 100,
    local_steps: int = 32,
    batch_size: int | tuple[int, int] = (32, 32),
    validation: HeldBack | None = None,
    test: HeldBack | None = None,
    positive: Label | None = None,
    cohort: int = 0,
    participation: Participation = "uniform",
    trace: str | Path = "",
    cohort_weights: CohortWeights = "unbiased",
    weighting: Weighting = "clients",
    seed: int = 0,
    augment: Augment | None = None,
    eval_every: int = 10,
    checkpoint_every: int = 10,
    fpr: Sequence[float] = (0.1, 0.3, 0.5),
    metrics: Sequence[Item] = (),
    select: str = "",
    patience: int = 0,
    train_metrics: bool = False,
    track: Sequence[str] = (),
    tracking_uri: str = "",
    executor: str = "auto",
    compile: bool = True,
    precision: str = "fp32",
    clients_at_once: int = 0,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
    out: str | Path | None = None,
    resume: bool = False,
    hooks: Hooks | None = None,
) -> Result:
    """Train `model` on the clients' data, and choose the best round on validation data.

    The model itself is left as it is: `Result.model` is a trained copy.

    Args:
        model: Any network with one score an example, or as many as the risk pairs.
        clients: For each client a pair (x, y) of tensors, arrays, data frames or lists, or a torch Dataset; in a
            list, or in a dict by the clients' names. Or what `fedxl.from_frame` returns, or a `Federation`.
            Images as bytes become floats in [0, 1].
        algorithm: Hyper-parameters and risk, for example `fedxl.FeDXL2(fedxl.partial_auc(lam=1.0), lr=0.02)`.
        rounds: Each ends with a communication between clients and server.
        local_steps: K, the steps of a client in a round.
        batch_size: Examples of S1 and of S2 a step; one number for both sides.
        validation: (x, y) or a Dataset to choose the best round on; or one for each client, as a list or by name, for
            metrics by client. Without it, the last round is the result.
        test: The same to evaluate the chosen model on.
        positive: The label that counts as positive. Not needed if labels are 0 and 1, -1 and 1, or booleans.
        cohort: Clients a round, drawn anew each time (by size if they count by samples); 0: all.
        participation: Who takes part in a round: "uniform" cohorts, "cyclic" groups in turn, "reshuffled" (groups
            drawn anew in each cycle), or those available by a "trace".
        trace: A JSON file of who is available when, for participation="trace".
        cohort_weights: With groups or a trace, a round's step is as long as its cohort weighs ("unbiased"), or all
            are alike ("normalised": less noise, biased).
        weighting: Every client counts the same ("clients"), or by its examples ("samples").
        seed: Of all random draws. Training starts from the weights that the model has.
        augment: Crops, flips and noise of training images, drawn each time an image is read.
        eval_every: Rounds between two evaluations.
        checkpoint_every: Rounds between two checkpoints.
        fpr: False positive rates up to which partial AUC is reported.
        metrics: More metrics: "package.module:function", functions of scores and labels, or `fedxl.Metric`s.
        select: The validation metric that chooses the best round ("-name": less is better); empty: the risk's own.
        patience: Evaluations without a better validation metric after which the run ends; 0: it never does.
        train_metrics: Whether to evaluate on the training data, too.
        track: Where metrics go besides `out`: "tensorboard", "mlflow", or "package.module:Class" of your own.
        tracking_uri: MLflow's store; empty: MLFLOW_TRACKING_URI, else mlflow.db beside `out`.
        executor: loop, vmap, graph (on a GPU), or auto.
        compile: Whether graph compiles the step, which takes a while before the first round.
        precision: Of the network in training: fp32, or tf32 and bf16, which are faster on a GPU.
        clients_at_once: How many clients the executor runs together; 0: the whole cohort.
        device: cpu, cuda, ..., or auto.
        dtype: float32 or float64.
        out: A folder for metrics and checkpoints.
        resume: Whether to continue from the last checkpoint in `out`.
        hooks: Functions that receive progress and messages, and one that may stop the run.
    """
    _require_model(model)
    both = _two(batch_size)
    given = {
        "rounds": rounds, "local_steps": local_steps, "batch1": both[0], "batch2": both[1], "cohort": cohort,
        "participation": participation, "trace": str(trace), "cohort_weights": cohort_weights,
        "weighting": weighting, "seed": seed, "eval_every": eval_every, "checkpoint_every": checkpoint_every,
        "fpr": _several(fpr, "fpr"), "metrics": _several(metrics, "metrics"), "select": select, "patience": patience,
        "train_metrics": train_metrics, "track": _several(track, "track"), "tracking_uri": tracking_uri,
        "executor": executor, "compile": compile, "precision": precision, "clients_at_once": clients_at_once,
        "device": _text(device), "dtype": _text(dtype),
    }  # fmt: skip
    settings = call(Settings, given, "run")
    require(
        isinstance(out, (str, Path)) or out is None, f"out must be a folder, such as 'runs/first', not {kind_of(out)}"
    )
    require(out is not None or not resume, "resume=True needs out, the folder of the run to go on with")
    require(hooks is None or isinstance(hooks, Hooks), f"hooks must be fedxl.Hooks(...), not {kind_of(hooks)}")
    for item in fields(Hooks) if hooks else ():
        right = item.name == "stop_collapsed" or callable(getattr(hooks, item.name))
        require(right, f"hooks: {item.name} must be a function, not {kind_of(getattr(hooks, item.name))}")
    require_algorithm(algorithm)
    columns, given_positive = algorithm.risk.labels, positive is not None
    require(not (columns and given_positive), "positive is for one label; of several, labels are 0 and 1 in columns")
    splits = as_splits(clients, Columns(columns) if columns else positive, validation, test)
    federation = splits.train if augment is None else splits.train.augmented(_augment(augment))
    hooks = hooks or Hooks()
    held_back = {"validation": splits.validation, "test": splits.test}
    kept = (splits.names, splits.preparation, splits.columns)
    simulation = Simulation(model, federation, algorithm, settings, held_back, hooks.say, None, *kept)
    return train(simulation, hooks, None if out is None else Path(out), resume)


def _require_model(model: Any) -> None:
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UserError(f"model is the class {model.__name__}; give a network, such as {model.__name__}(...)")
    require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, not {kind_of(model)}")
    tensors = [*model.parameters(), *model.buffers()]
    lazy = any(is_lazy(tensor) for tensor in tensors)
    require(not lazy, "the model has lazy layers without shapes; call it once on some examples before fit")
    real = not any(tensor.is_complex() for tensor in tensors)
    require(real, "the model has complex weights; only real ones are trained")
    nowhere = any(tensor.device.type == "meta" for tensor in tensors)
    require(not nowhere, "the model is on the device 'meta', which holds no numbers; build it on cpu")
    for name, tensor in model.named_parameters():
        require(bool(tensor.isfinite().all()), f"the model's weight '{name}' holds NaN or infinity before training")


def _augment(augment: Any) -> Augment:
    right = isinstance(augment, Augment)
    hint = "; transforms of your own belong into a Dataset, and are drawn once" if callable(augment) else ""
    require(right, f"augment must be fedxl.Augment(crop=..., flip=..., noise=...), not {kind_of(augment)}{hint}")
    return augment  # type: ignore[no-any-return]


def _two(batch_size: Any) -> tuple[Any, Any]:
    """The batches of both sides; what they hold is checked with the other settings."""
    if isinstance(batch_size, (list, tuple)):
        require(len(batch_size) == 2, f"batch_size must be one number or two, got {batch_size}")
        return batch_size[0], batch_size[1]
    return batch_size, batch_size


def _several(items: Any, name: str) -> Any:
    """Items in a tuple. One text or number is no list, and `call` says so."""
    right = isinstance(items, Iterable) and not isinstance(items, (str, bytes))
    require(right, f"{name} must be a list, such as [{items!r}], not {kind_of(items)}")
    return tuple(items)


def _text(choice: str | torch.device | torch.dtype) -> Any:
    """torch's devices and types by name."""
    return str(choice).removeprefix("torch.") if isinstance(choice, (torch.device, torch.dtype)) else choice
