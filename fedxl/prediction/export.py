"""`fedxl export`: a folder that predicts without the run and without the training data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedxl import __version__
from fedxl.data.tables.prepare import Preparation
from fedxl.errors import UserError, require
from fedxl.evaluation.assess import SENSITIVITIES, SPECIFICITIES, Assessment, assess
from fedxl.evaluation.decision import DecisionOptions, Decisions
from fedxl.files import as_path, plain, read_bytes, read_json, write_atomically, write_json, writing
from fedxl.options import convert
from fedxl.prediction import card
from fedxl.prediction.card import COUNTS
from fedxl.prediction.onnx_file import ONNX, Checked, to_onnx
from fedxl.prediction.run import dtype_of, model_table, network_of, preparation_of, read_finished, weights_of
from fedxl.training.result import decisions_for
from fedxl.training.run_folder import WEIGHTS, Form, Run, read_form, require_run
from fedxl.training.settings import DTYPES

NOT_REBUILT = (
    "the network is code of your own, which is not exported: predictions use model.onnx, and loading "
    "model.safetensors needs that code"
)
COUNTED = (
    "metrics are of the counts in bins that sites disclosed, not of single scores; their intervals do not contain "
    "the noise that sites may have added"
)
ONLY_WEIGHTS = "the network is code of your own, which is not exported: without it, model.safetensors cannot be used"


def export(
    run: str | Path,
    out: str | Path | None = None,
    *,
    onnx: bool = True,
    calibration: str = "platt",
    specificity: float | None = None,
    sensitivity: float | None = None,
    horizons: Sequence[float] = (),
    model: nn.Module | None = None,
    allow_code: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Exported:
    """Write a finished run's model into a folder that predicts by itself.

    Args:
        run: The folder of a finished run.
        out: The folder to write; `export` in the run's folder by default.
        onnx: Whether to write model.onnx, too.
        calibration: platt or isotonic, fitted to the run's validation scores.
        specificity: The threshold between the classes reaches this on validation data; by default 0.9.
        sensitivity: Or it reaches this.
        horizons: Of time to event: times up to which to survive; by default quartiles of validation events.
        model: A network of the run's architecture, for runs of `fit` with a network of your own.
        allow_code: Whether a network that the run names as "package.module:factory" may be imported.
        say: Receives lines about what the folder lacks.
    """
    source, options = as_path(run, "run"), DecisionOptions(calibration, specificity, sensitivity, horizons)
    require_run(source, f"{source} is an exported model already" if is_exported(source) else f"{source} holds no run")
    found, target = read_finished(source), source / "export" if out is None else as_path(out, "out")
    free = not target.exists() or is_exported(target) or (target.is_dir() and not any(target.iterdir()))
    require(free, f"{target} holds something else; choose another folder")
    named = model_table(found) is not None
    # Where nobody has the network's code, and ONNX does not need it, there are weights alone.
    network = network_of(found, model, allow_code) if named or model is not None or onnx else None
    decisions = decisions_for(found.form, found.scores, found.histograms, options, found.shown)
    checked = to_onnx(network, found.form) if onnx and network is not None else None
    if not named:
        say(NOT_REBUILT if checked else ONLY_WEIGHTS)
    if decisions.why_none and decisions.survival is None:
        lost = "probability to survive" if found.timed else "calibration and no threshold"
        say(f"no {lost}: {decisions.why_none}")
    elif decisions.undecided and not found.timed:
        say(f"no calibration and no threshold of some labels: {decisions.reasons}")
    _write(target, found, decisions, checked, _assess(found, options))
    return read_exported(target)


def for_sites(source: Path) -> dict[str, bytes]:
    """The exported folder's files for sites that took part: no code, and no name, count or metric of any site."""
    run = read_finished(source)
    decisions = decisions_for(run.form, run.scores, run.histograms, DecisionOptions(), run.shown)
    about, weights = description(run, decisions, None, None), weights_of(run)
    unknown = {"undecided": "the run's validation data give none"}
    about["decisions"] = {
        name: unknown if "undecided" in each else {**each, "measured": {}}
        for name, each in about["decisions"].items()
    }
    every, shared = about["training"]["settings"], ("model.", "risk.", "algorithm.", "run.")
    names = [name for name in every if name.startswith(shared) and not name.startswith("run.track")]
    settings = {name: every[name] for name in names}
    about["training"] = {"settings": settings, "best_round": run.best_round}
    content = json.dumps({**about, "files": {WEIGHTS: digest(weights)}}, indent=1).encode()
    return {DESCRIPTION: content, WEIGHTS: weights}


def _assess(run: Run, options: DecisionOptions) -> Assessment | None:
    """What the run's scores say, or sites' counts in bins; at the usual operating points and the exported one."""
    specificities = {*SPECIFICITIES} | ({options.specificity} if options.specificity is not None else set())
    sensitivities = {*SENSITIVITIES} | ({options.sensitivity} if options.sensitivity is not None else set())
    found = assess(
        run.scores, run.histograms, specificities=sorted(specificities), sensitivities=sorted(sensitivities),
        calibration=options.calibration, horizons=options.horizons,
    )  # fmt: skip
    if found is None or found.split in run.scores:
        return found
    return replace(found, notes=(*found.notes, COUNTED))


def _write(target: Path, run: Run, decisions: Decisions, onnx: Checked | None, assessment: Assessment | None) -> None:
    """All files, model.json last: a folder without it is no export, so a half-written one is never used."""
    contents = {WEIGHTS: weights_of(run)}
    if onnx is not None:
        contents[ONNX] = onnx.content
    about = description(run, decisions, onnx, assessment)
    contents[CARD] = card.card(about, assessment, run).encode()
    digests = {name: digest(content) for name, content in contents.items()}
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        for name in (DESCRIPTION, ONNX):
            (target / name).unlink(missing_ok=True)
        for name, content in contents.items():
            write_atomically(target / name, content)
        write_json(target / DESCRIPTION, {**about, "files": digests})


def description(
    run: Run, decisions: Decisions, onnx: Checked | None, assessment: Assessment | None
) -> dict[str, Any]:
    """What model.json says, without the digests."""
    table, prepared = model_table(run), preparation_of(run)
    model = None if table is None else {key: value for key, value in table.items() if key != "weights"}
    meaning = {"column": prepared.label, "1": prepared.positive, "0": prepared.negative} if prepared else {}
    checked = None if onnx is None else {key: value for key, value in onnx._asdict().items() if key != "content"}
    content = {
        "format": FORMAT,
        "fedxl": __version__,
        "torch": torch.__version__,
        "model": model if model is None else {"name": "mlp", **model},
        **run.form._asdict(),
        "timed": run.timed,
        "weights_dtype": dtype_of(run),
        "meaning": meaning,
        "preparation": None if prepared is None else prepared.to_json(),
        "decisions": decisions.to_json(),
        "survival": None if decisions.survival is None else decisions.survival.to_json(),
        "decided_by": "scores" if "validation" in run.scores else COUNTS,
        "onnx": checked,
        "training": {**_without_paths(run.about), "best_round": run.best_round},
        "assessment": None if assessment is None else assessment.to_json(),
    }
    return plain(content)  # type: ignore[no-any-return]


def _without_paths(about: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says, with names of files in place of absolute paths: these are nobody else's business."""
    kept = [name for name in ("begun", "settings", "members", "environment", "privacy") if name in about]
    settings = {key: _name(value) for key, value in about["settings"].items()}
    return {**{name: about[name] for name in kept}, "settings": settings}


def _name(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_name(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


DESCRIPTION = "model.json"
CARD = "README.md"
FILES = (WEIGHTS, ONNX, CARD)  # that an exported folder may hold besides; no name in model.json is ever opened
FORMAT = 2


@dataclass(frozen=True, eq=False, repr=False)
class Exported:
    """An exported model."""

    path: Path
    form: Form
    weights_dtype: str
    model: Mapping[str, Any] | None  # the [model] table; None: an object of Python's, there as ONNX alone
    preparation: Preparation | None
    decisions: Decisions
    digests: Mapping[str, str]  # by name of file

    def __repr__(self) -> str:
        return f"Exported in {self.path}: {', '.join([DESCRIPTION, *self.digests])}"

    def content(self, name: str) -> bytes:
        """That of one of its files, which must lie in the folder and be what was written."""
        path = self.path / name
        require(name in self.digests, f"{self.path} holds no {name}; export the run again with it")
        inside = path.resolve().parent == self.path.resolve()
        require(inside, f"{path} leads out of the folder; an exported folder holds its files itself")
        require(path.is_file(), f"there is no file {path}, but {DESCRIPTION} names it; export the run again")
        content = read_bytes(path)
        same = digest(content) == self.digests[name]
        require(same, f"{path} is not the file that was exported: its digest differs; copy it or export it again")
        return content


def is_exported(path: Path) -> bool:
    return (path / DESCRIPTION).exists()


def read_exported(path: Path) -> Exported:
    """The model of an exported folder. Raises UserError if model.json is not what we write."""
    file = path / DESCRIPTION
    content = read_json(file)
    known = content.get("format") == FORMAT
    require(known, f"{file} has the format {content.get('format')!r}; this version of fedxl reads format {FORMAT}")
    try:
        model = content.get("model")
        require(model is None or isinstance(model, dict), "model must be a table or null")
        require(model is None or isinstance(model.get("name"), str), "model.name must be a text")
        dtype = content.get("weights_dtype")
        require(isinstance(dtype, str) and dtype in DTYPES, f"weights_dtype must be one of {', '.join(DTYPES)}")
        digests = convert(content.get("files"), dict, "files")
        for name, value in digests.items():
            require(name in FILES, f"files names {name!r}; there can be {', '.join(FILES)}")
            require(isinstance(value, str) and len(value) == 64, f"files: the digest of {name} must be 64 hex digits")
        form, told = read_form(content, file), content.get("preparation")
        preparation = None if told is None else Preparation.from_json(told)
        decisions = Decisions.from_json(content.get("decisions"), form.names, content.get("survival"))
        return Exported(path, form, str(dtype), model, preparation, decisions, digests)
    except UserError as error:
        raise UserError(f"{file}: {error}" if str(file) not in str(error) else str(error)) from None


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
