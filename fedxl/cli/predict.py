"""`fedxl predict` and `fedxl export`: use a trained model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from torch import nn

from fedxl import registry
from fedxl.cli.output import say
from fedxl.errors import UserError, printable, require
from fedxl.evaluation.scores import Scores

if TYPE_CHECKING:  # they load scipy, for which other commands need not wait
    from fedxl.data.examples import Examples
    from fedxl.prediction.predictor import Predictor
    from fedxl.training.result import Prediction

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
Calibrated = Annotated[str, typer.Option("--calibration", help="Fitted to validation scores: platt or isotonic.")]
Specificity = Annotated[
    float | None,
    typer.Option(help="Choose the threshold that reaches this specificity on validation data; by default 0.9."),
]
Sensitivity = Annotated[
    float | None, typer.Option(help="Choose the threshold that reaches this sensitivity on validation data.")
]
Horizons = Annotated[
    list[float] | None,
    typer.Option("--horizon", help="Report the probability of no event up to this time; repeatable."),
]
Factory = Annotated[
    str, typer.Option(metavar="MODULE:FUNCTION", help="Function that builds the network of a run started in Python.")
]
Allow = Annotated[
    bool, typer.Option("--allow-code", help="Import the network's code that the folder names (not fedxl's own).")
]


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or an exported one.")],
    data: Annotated[Path, typer.Argument(help="A table (CSV, Parquet), a folder of images, or an .npz file with x.")],
    target: Annotated[Path, typer.Option("--out", "-o", help="File for the predictions: .csv or .parquet.")],
    calibration: Calibrated = "platt",
    specificity: Specificity = None,
    sensitivity: Sensitivity = None,
    threshold: Annotated[float | None, typer.Option(help="Use this raw score as the threshold.")] = None,
    horizons: Horizons = None,
    model: Factory = "",
    allow_code: Allow = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, ..., or auto.")] = "auto",
) -> None:
    """Score new data: per row its identity, score, calibrated probability and class.

    With several labels, each label has these three. With time to event, a row has a risk score and the probability of
    no event up to each horizon.
    """
    from fedxl.prediction import predictor, table

    require(target.resolve() != data.resolve(), f"{target} is the data file; choose another file for the scores")
    asked = specificity is not None or sensitivity is not None
    require(threshold is None or not asked, "give --threshold, or --specificity or --sensitivity, not both")
    found = predictor.load(
        folder, calibration=calibration, specificity=specificity, sensitivity=sensitivity, horizons=horizons or (),
        model=_network(model), allow_code=allow_code, device=device,
    )  # fmt: skip
    found = found if threshold is None else found.with_threshold(threshold)
    given = table.read_examples(data, found.preparation, len(found.form.labels))
    predicted = found.predict(given.x, str(data))
    changed = table.write(target, given.row, predicted)
    for line in _meanings(found):
        _say(line)
    for line in _metrics(predicted, given, found.form.names):
        _say(f"{data} has {'times and events' if given.time is not None else 'labels'}: {line}")
    if predicted.trained_on:
        many = f"{predicted.trained_on:,} of {len(given):,} rows are among the training data"
        _say(f"warning: {many}: their metrics do not describe new data")
    if changed:
        _say(f"{changed} identities look like formulas and got an apostrophe; .parquet keeps them unchanged")
    _say(f"{len(given):,} predictions in {target}")


def export(
    folder: Run,
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder to write; RUN/export by default.")
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx/--no-onnx", help="Also write model.onnx, or leave it out.")] = True,
    calibration: Calibrated = "platt",
    specificity: Specificity = None,
    sensitivity: Sensitivity = None,
    horizons: Horizons = None,
    model: Factory = "",
    allow_code: Allow = False,
) -> None:
    """Write the model for use elsewhere: weights, ONNX, a description and a model card."""
    from fedxl.prediction import export as exports
    from fedxl.prediction.export import DESCRIPTION

    written = exports.export(
        folder, target, calibration=calibration, specificity=specificity, sensitivity=sensitivity,
        horizons=horizons or (), model=_network(model), allow_code=allow_code, onnx=onnx, say=_say,
    )  # fmt: skip
    _say(f"in {written.path}: {', '.join(sorted([*written.digests, DESCRIPTION]))}")


def _network(name: str) -> nn.Module | None:
    """The network that the user's own function builds; naming it on the command line is the permission to run it."""
    if not name:
        return None
    require(registry.own(name), f"--model must read package.module:factory, not {name!r}")
    build = registry.find("model", name, {})
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise UserError(f"--model: '{name}' is called without arguments, but {error}") from None
    network = build()
    registry.require_type(network, nn.Module, name)
    return network  # type: ignore[no-any-return]


def _meanings(found: Predictor) -> Iterator[str]:
    """What classes and probabilities rest on: a line for each label that has them, and one for the others."""
    for name, decision in found.decisions.decided.items():
        prepared, positive = found.preparation, name or "a label of 1"
        if not name and prepared is not None and prepared.positive:
            positive = f"{prepared.label} = {prepared.positive}" if prepared.label else prepared.positive
        where = " on validation data" if decision.measured else ""
        yield f"class 1 ({positive}) from score {decision.threshold:.6g} on: {decision.rule}{where}"
        if decision.calibration.note:
            yield f"{f'probabilities of {name}' if name else 'probabilities'}: {decision.calibration.note}"
    if (survival := found.decisions.survival) is not None:
        columns = ", ".join(f"survival@{at:g}" for at in survival.horizons)
        if columns:
            yield f"{columns}: probability of no event up to then, from Breslow's hazard on the validation data"
    elif why := found.decisions.why_none or found.decisions.reasons:
        yield f"scores only, without probabilities and classes: {why}"


def _metrics(predicted: Prediction, given: Examples, labels: tuple[str, ...]) -> Iterator[str]:
    """A line on each label of which the data hold both classes, or on times if they hold an event."""
    from fedxl.evaluation.intervals import intervals, reported

    time = None if given.time is None else given.time.numpy().astype(np.float64)
    if predicted.survival is not None and time is None:
        return  # events without their times do not say how good the scores are
    scores = Scores(predicted.scores.reshape(len(given), -1), given.y.numpy(), labels, time=time)
    metric, *_ = reported(time is not None, 1.0)
    for name, one in scores.by_label().items():
        if one.has_metrics:
            found = intervals([metric], one)[metric]
            text = f"{metric} {found.value:.4f} ({found.low:.4f} to {found.high:.4f})"
            yield f"{name}: {text}" if name else text


def _say(line: str) -> None:
    say(printable(line, 2000), style="")
