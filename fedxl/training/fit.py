"""`fit`: train a model on clients' data from Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor, nn

from fedxl.algorithms.protocol import AnyAlgorithm
from fedxl.data.augment import Augment
from fedxl.data.federation import Federation, Weighting, from_arrays
from fedxl.errors import require
from fedxl.metrics import Item
from fedxl.options import call
from fedxl.training.settings import Settings
from fedxl.training.simulation import Simulation
from fedxl.training.trainer import Hooks, Result, train


def fit(
    model: nn.Module,
    clients: Federation | Iterable[tuple[Tensor, Tensor]],
    algorithm: AnyAlgorithm,
    *,
    rounds: int = 100,
    local_steps: int = 32,
    batch_size: int | tuple[int, int] = (32, 32),
    validation: tuple[Tensor, Tensor] | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    cohort: int = 0,
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
    device: str = "auto",
    dtype: str = "float32",
    out: str | Path | None = None,
    resume: bool = False,
    hooks: Hooks | None = None,
) -> Result:
    """Train `model` on the clients' data, and choose the best round on validation data.

    The model itself is left as it is: `Result.model` is a trained copy.

    Args:
        model: Any network with one score an example, or as many as the risk pairs.
        clients: (x, y) for each client, labels 0/1. Images as bytes become floats in [0, 1].
        algorithm: Hyper-parameters and risk, for example `fedxl.FeDXL2(fedxl.partial_auc(lam=1.0), lr=0.02)`.
        rounds: Each ends with a communication between clients and server.
        local_steps: K, the steps of a client in a round.
        batch_size: Examples of S1 and of S2 a step; one number for both sides.
        validation: (x, y) to choose the best round on. Without it, the last round is the result.
        test: (x, y) to evaluate the chosen model on.
        cohort: Clients a round, drawn anew each time (by size if they count by samples); 0: all.
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
    both = (batch_size, batch_size) if isinstance(batch_size, int) else tuple(batch_size)
    require(len(both) == 2, f"batch_size must be one number or two, got {batch_size}")
    given = {
        "rounds": rounds, "local_steps": local_steps, "batch1": both[0], "batch2": both[1], "cohort": cohort,
        "weighting": weighting, "seed": seed, "eval_every": eval_every, "checkpoint_every": checkpoint_every,
        "fpr": tuple(fpr), "metrics": tuple(metrics), "select": select, "patience": patience,
        "train_metrics": train_metrics, "track": tuple(track), "tracking_uri": tracking_uri, "executor": executor,
        "compile": compile, "precision": precision, "clients_at_once": clients_at_once, "device": device,
        "dtype": dtype,
    }  # fmt: skip
    settings = call(Settings, given, "run")
    federation = clients if isinstance(clients, Federation) else from_arrays(clients)
    federation = federation if augment is None else federation.augmented(augment)
    require(out is not None or not resume, "resume=True needs out, the folder of the run to go on with")
    hooks = hooks or Hooks()
    held_back = {"validation": validation, "test": test}
    simulation = Simulation(model, federation, algorithm, settings, held_back, hooks.say)
    return train(simulation, hooks, None if out is None else Path(out), resume)
