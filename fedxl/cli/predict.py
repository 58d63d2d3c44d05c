"""`fedxl predict` and `fedxl export`: what a trained model is for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from torch import nn

from fedxl import registry
from fedxl.cli.output import say
from fedxl.errors import printable, require
from fedxl.evaluation.scores import Scores

if TYPE_CHECKING:  # they load scipy, for which other commands need not wait
    from fedxl.data.examples import Examples
    from fedxl.prediction.predictor import Predictor
    from fedxl.training.result import Prediction

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
Calibrated = Annotated[str, typer.Option("--calibration", help="platt or isotonic, fitted to validation scores.")]
Specificity = Annotated[
    float | None, typer.Option(help="The threshold reaches this on validation data; by default 0.9.")
]
Sensitivity = Annotated[float | None, typer.Option(help="Or the threshold reaches this.")]
Factory = Annotated[
    str, typer.Option("--model", metavar="MODULE:FUNCTION", help="Builds the network, for runs of fit with your own.")
]
Allow = Annotated[
    bool, typer.Option("--allow-code", help="Import the network that the folder names, if it is not one of fedxl's.")
]


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or an exported one.")],
    data: Annotated[Path, typer.Argument(help="A table (CSV, Parquet), a folder of images, or an .npz file with x.")],
    target: Annotated[Path, typer.Option("--out", "-o", help="Where predictions go: .csv or .parquet.")],
    calibration: Calibrated = "platt",
    specificity: Specificity = None,
    sensitivity: Sensitivity = None,
    threshold: Annotated[
        float | None, typer.Option(help="Of the raw score, instead of one that is chosen on validation data.")
    ] = None,
    model: Factory = "",
    allow_code: Allow = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, ..., or auto.")] = "auto",
) -> None:
    """Score new data: the identity of each row, its score, its calibrated probability and its class.

    Of several labels: these three for each.
    """
    from fedxl.prediction import predictor, table

    require(
        target.resolve() != data.resolve(), f"{target} is the data themselves; choose another file for the scores"
    )
    asked = specificity is not None or sensitivity is not None
    require(threshold is None or not asked, "give a threshold, or what it must reach, not both")
    found = predictor.load(
        folder,
        calibration=calibration,
        specificity=specificity,
        sensitivity=sensitivity,
        model=_network(model),
        allow_code=allow_code,
        device=device,
    )
    found = found if threshold is None else found.with_threshold(threshold)
    given = table.read_examples(data, found.preparation, len(found.form.labels))
    predicted = found.predict(given.x, str(data))
    changed = table.write(target, given.row, predicted)
    for line in _meanings(found):
        _say(line)
    for line in _metrics(predicted, given, found.form.names):
        _say(f"{data} has labels: {line}")
    if predicted.trained_on:
        many = f"{predicted.trained_on:,} of {len(given):,} rows are among the training data"
        _say(f"warning: {many}: metrics of these say nothing of new data")
    if changed:
        _say(f"{changed} identities begin like a formula and got an apostrophe; .parquet keeps them as they are")
    _say(f"{len(given):,} predictions in {target}")


def export(
    folder: Run,
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder to write; RUN/export by default.")
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx/--no-onnx", help="Whether to write model.onnx, too.")] = True,
    calibration: Calibrated = "platt",
    specificity: Specificity = None,
    sensitivity: Sensitivity = None,
    model: Factory = "",
    allow_code: Allow = False,
) -> None:
    """Write the model for use elsewhere: weights, ONNX, a description and a model card."""
    from fedxl.prediction import export as exports
    from fedxl.prediction.export import DESCRIPTION

    written = exports.export(
        folder,
        target,
        onnx=onnx,
        calibration=calibration,
        specificity=specificity,
        sensitivity=sensitivity,
        model=_network(model),
        allow_code=allow_code,
        say=_say,
    )
    _say(f"in {written.path}: {', '.join(sorted([*written.digests, DESCRIPTION]))}")


def _network(name: str) -> nn.Module | None:
    """The network that the user's own function builds; naming it on the command line is the permission to run it."""
    if not name:
        return None
    require(registry.own(name), f"--model must read package.module:factory, not {name!r}")
    network = registry.find("model", name, {})()
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
    if why := found.decisions.why_none or found.decisions.reasons:
        yield f"scores only, without probabilities and classes: {why}"


def _metrics(predicted: Prediction, given: Examples, labels: tuple[str, ...]) -> Iterator[str]:
    """A line on each label of which the data hold both classes."""
    from fedxl.evaluation.intervals import delong

    scores = Scores(predicted.scores.reshape(len(given), -1), given.y.numpy(), labels)
    for name, one in scores.by_label().items():
        if one.both_classes:
            found = delong(*one.flat)
            text = f"auroc {found.value:.4f} ({found.low:.4f} to {found.high:.4f})"
            yield f"{name}: {text}" if name else text


def _say(line: str) -> None:
    say(printable(line, 2000), style="")
