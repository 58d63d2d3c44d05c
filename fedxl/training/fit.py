"""`fit`: train a model on clients' data from Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedxl.algorithms.protocol import Algorithm
from fedxl.data.examples import Augment, Examples, Splits
from fedxl.data.inputs import Clients, HeldBack, as_splits
from fedxl.data.targets import Label
from fedxl.errors import SYNONYMS, UserError, kind_of, printable, require, require_known
from fedxl.files import as_path
from fedxl.models import uncompiled
from fedxl.options import accepted, call
from fedxl.progress import rounds
from fedxl.risks import XRisk
from fedxl.training.interrupts import Interrupts, unhandled
from fedxl.training.result import Result
from fedxl.training.settings import Hooks, Progress, Settings
from fedxl.training.simulation import Simulation
from fedxl.training.trainer import train

LISTS = ("fpr", "metrics", "track")  # settings that are lists


def fit(
    model: nn.Module,
    clients: Examples | Splits | Clients,
    algorithm: Algorithm,
    *,
    batch_size: int | tuple[int, int] = (32, 32),
    validation: HeldBack | None = None,
    test: HeldBack | None = None,
    positive: Label | None = None,
    augment: Augment | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    hooks: Hooks | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Train `model` on the clients' data, and choose the best round on validation data.

    The model itself is left as it is: `Result.model` is a trained copy. Ctrl-C finishes the round and returns the
    result so far, with `interrupted`; a second one raises KeyboardInterrupt at once.

    Args:
        model: Any network with one score per example, or as many as the risk pairs.
        clients: For each client a pair (x, y) of tensors, arrays, data frames or lists, or a torch Dataset; in a
            list, or in a dict by the clients' names. Or what `fedxl.from_frame` returns, or `Examples`.
            Images as bytes become floats in [0, 1].
        algorithm: Hyper-parameters and risk, for example `fedxl.FeDXL2(fedxl.partial_auc(lam=1.0), lr=0.02)`.
        batch_size: Examples of S1 and of S2 per step; one number for both sides.
        validation: (x, y) or a Dataset to choose the best round on; or one for each client, as a list or by name, for
            metrics by client. Without it, the last round is the result.
        test: The same to evaluate the chosen model on.
        positive: The label that counts as positive. Not needed if labels are 0 and 1, -1 and 1, or booleans.
        augment: Crops, flips and noise of training images, drawn each time an image is read.
        out: A folder for metrics and checkpoints.
        resume: Whether to continue from the last checkpoint in `out`.
        hooks: Functions that receive progress and messages, and one that may stop the run.
        progress: Whether to show rounds as they are done; by default in a notebook and on a terminal, not in a log.
        settings: How to run: the fields of `fedxl.Settings`, for example `rounds=100, local_steps=32, seed=0`.
            Training starts from the weights that the model has, whatever the seed.
    """
    folder = None if out is None else as_path(out, "out")
    require(folder is not None or not resume, "resume=True needs out, the folder of the run to resume")
    require(hooks is None or isinstance(hooks, Hooks), f"hooks must be fedxl.Hooks(...), not {kind_of(hooks)}")
    for item in fields(Hooks) if hooks else ():
        right = item.name == "stop_collapsed" or callable(getattr(hooks, item.name))
        require(right, f"hooks: {item.name} must be a function, not {kind_of(getattr(hooks, item.name))}")
    hooks = hooks or Hooks()
    held: dict[str, Any] = {"validation": validation, "test": test, "positive": positive, "augment": augment}
    found = simulation(model, clients, algorithm, hooks.say, batch_size=batch_size, **held, **settings)
    with found.threads(), Interrupts(hooks.say, unhandled()) as interrupts, rounds(log=bool(progress)) as tell:
        shown = interrupts.stopping(hooks if progress is False else _telling(hooks, tell))
        return train(found, shown, folder, resume)


def _telling(hooks: Hooks, tell: Callable[[int, int, str], None]) -> Hooks:
    """These hooks, which show the rounds, too."""

    def on_progress(now: Progress) -> None:
        tell(now.round, now.rounds, now.latest)
        hooks.on_progress(now)

    return replace(hooks, on_progress=on_progress)


def simulation(
    model: nn.Module,
    clients: Examples | Splits | Clients,
    algorithm: Algorithm,
    say: Callable[[str], None],
    *,
    batch_size: int | tuple[int, int] = (32, 32),
    validation: HeldBack | None = None,
    test: HeldBack | None = None,
    positive: Label | None = None,
    augment: Augment | None = None,
    **settings: Any,
) -> Simulation:
    """What `fit` trains with these arguments, checked; nothing has begun yet."""
    model = uncompiled(model)
    _require_model(model)
    require_algorithm(algorithm)
    run = _run(batch_size, settings, type(algorithm))
    columns, given_positive = len(algorithm.risk.pairing.labels), positive is not None
    require(not (columns and given_positive), "positive is for one label; of several, labels are 0 and 1 in columns")
    splits = as_splits(clients, positive, columns, validation, test)
    hint = "; transforms of your own belong into a Dataset, and are drawn once" if callable(augment) else ""
    crops = f"augment must be fedxl.Augment(crop=..., flip=..., noise=...), not {kind_of(augment)}{hint}"
    require(augment is None or isinstance(augment, Augment), crops)
    splits = splits if augment is None else splits._replace(train=splits.train.augmented(augment))
    return Simulation(model, splits, algorithm, run, say)


def _run(batch_size: int | tuple[int, int], settings: dict[str, Any], algorithm: type[Algorithm]) -> Settings:
    named = [key for key in ("batch1", "batch2") if key in settings]
    require(not named, f"{', '.join(named)}: give batch_size, one number or two")
    for name in settings:
        setting = SYNONYMS.get(name, name)
        told = f"unknown argument of fit '{name}'; {setting} is a setting of the algorithm"
        require(setting not in accepted(algorithm), f"{told}: fedxl.{algorithm.__name__}(..., {setting}=...)")
        require_known("argument of fit", name, inspect.signature(fit).parameters)
    given = {key: _several(value, key) if key in LISTS else _plain(value) for key, value in settings.items()}
    sizes = batch_size if isinstance(batch_size, (list, tuple)) else (batch_size, batch_size)
    require(len(sizes) == 2, f"batch_size must be one number or two, got {batch_size}")
    given["batch1"], given["batch2"] = sizes  # checked with the other settings
    return call(Settings, given, "run")


def require_algorithm(algorithm: Any) -> None:
    right = isinstance(algorithm, Algorithm) and isinstance(algorithm.risk, XRisk)
    found = printable(repr(algorithm), 60)
    require(right, f"algorithm must be an object such as fedxl.FeDXL2(fedxl.auroc()), not {found}")


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


def _several(items: Any, name: str) -> Any:
    right = isinstance(items, Iterable) and not isinstance(items, (str, bytes))
    require(right, f"{name} must be a list, such as [{items!r}], not {kind_of(items)}")
    return tuple(items)


def _plain(value: Any) -> Any:
    """Paths, and torch's devices and types, as texts."""
    return str(value).removeprefix("torch.") if isinstance(value, (Path, torch.device, torch.dtype)) else value


def _signature() -> inspect.Signature:
    """What `fit` takes, with the settings of a run by their own names and defaults."""
    own = [each for each in inspect.signature(fit).parameters.values() if each.kind is not each.VAR_KEYWORD]
    fields_ = [item for item in fields(Settings) if item.name not in ("batch1", "batch2")]
    kind = inspect.Parameter.KEYWORD_ONLY
    run = [inspect.Parameter(item.name, kind, default=item.default, annotation=item.type) for item in fields_]
    return inspect.Signature([*own, *run], return_annotation=Result)


fit.__signature__ = _signature()  # type: ignore[attr-defined]
