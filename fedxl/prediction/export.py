"""`fedxl export`: a folder that predicts without the run and without the training data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedxl import __version__
from fedxl.data.preparation import Preparation
from fedxl.errors import UserError, require
from fedxl.evaluation import binned
from fedxl.evaluation.decision import LabelDecisions, Meaning, Wish, meaning_from_json, reasons
from fedxl.evaluation.judgement import SENSITIVITIES, SPECIFICITIES, Judgement, LabelJudgement, judge, judge_labels
from fedxl.files import plain, read_bytes, read_json, write_atomically, write_json
from fedxl.options import convert
from fedxl.prediction import card
from fedxl.prediction.card import COUNTS
from fedxl.prediction.onnx_file import ONNX, Checked, to_onnx
from fedxl.prediction.run import WEIGHTS, FinishedRun, read_form, read_run
from fedxl.training.members import Form
from fedxl.training.run_files import is_run
from fedxl.training.settings import DTYPES

NOT_REBUILT = (
    "the network is code of your own, which is not exported: predictions use model.onnx, and loading "
    "model.safetensors needs that code"
)
Decided = tuple[Meaning | None, str]
Judgements = Judgement | LabelJudgement | None  # of one label, of several
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
        model: A network of the run's architecture, for runs of `fit` with a network of your own.
        allow_code: Whether a network that the run names as "package.module:factory" may be imported.
        say: Receives lines about what the folder lacks.
    """
    source, wish = Path(run), Wish(calibration, specificity, sensitivity)
    require(source.is_dir() and is_run(source), f"{source} holds no run")
    found, target = read_run(source), Path(out) if out is not None else source / "export"
    free = not target.exists() or is_exported(target) or (target.is_dir() and not any(target.iterdir()))
    require(free, f"{target} holds something else; choose another folder")
    named = found.model is not None
    # Where nobody has the network's code, and ONNX does not need it, there are weights alone.
    network = found.network(model, allow_code) if named or model is not None or onnx else None
    decision, why = found.decided(wish)
    checked = to_onnx(network, found.form) if onnx and network is not None else None
    if not named:
        say(NOT_REBUILT if checked else ONLY_WEIGHTS)
    if decision is None:
        say(f"no calibration and no threshold: {why}")
    elif isinstance(decision, LabelDecisions) and decision.undecided:
        say(f"no calibration and no threshold of some labels: {reasons(decision.undecided)}")
    judgement = _judge(found, wish)
    _write(target, found, (decision, why), checked, judgement)
    return read_exported(target)


def _judge(run: FinishedRun, wish: Wish) -> Judgements:
    """What the run's scores say, or sites' counts in bins; at the usual operating points and the exported one."""
    specificities = {*SPECIFICITIES} | ({wish.specificity} if wish.specificity is not None else set())
    sensitivities = {*SENSITIVITIES} | ({wish.sensitivity} if wish.sensitivity is not None else set())
    options: dict[str, Any] = {"specificities": sorted(specificities), "sensitivities": sorted(sensitivities)}
    options["calibration"] = wish.calibration
    if run.form.labels:
        return judge_labels(run.by_label, run.label_curves, **options)
    counted = {} if run.scored else binned.scores_of(run.curves)
    scored = run.scored or counted
    if not any(len(each) for each in scored.values()):
        return None
    judgement = judge(scored, **options)
    return replace(judgement, notes=(*judgement.notes, COUNTED)) if counted else judgement


def _shortened(judgement: Judgement | LabelJudgement) -> dict[str, Any]:
    """Without curves for each site, which would make the file of a hundred sites long."""
    content = judgement.to_json()
    if isinstance(judgement, LabelJudgement):
        return content
    kept = ("positives", "negatives", "metrics", "points", "brier")
    return {**content, "sites": {site: {key: told[key] for key in kept} for site, told in content["sites"].items()}}


def _write(target: Path, run: FinishedRun, decided: Decided, onnx: Checked | None, judgement: Judgements) -> None:
    """All files, model.json last: a folder without it is no export, so a half-written one is never used."""
    contents = {WEIGHTS: read_bytes(run.path / WEIGHTS)}
    if onnx is not None:
        contents[ONNX] = onnx.content
    about = description(run, decided, onnx, judgement)
    contents[CARD] = card.card(about, judgement).encode()
    digests = {name: digest(content) for name, content in contents.items()}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in (DESCRIPTION, ONNX):
            (target / name).unlink(missing_ok=True)
        for name, content in contents.items():
            write_atomically(target / name, content)
        write_json(target / DESCRIPTION, {**about, "files": digests})
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from None


def description(run: FinishedRun, decided: Decided, onnx: Checked | None, judgement: Judgements) -> dict[str, Any]:
    """What model.json says, without the digests. decided: the decision, and why there is none."""
    decision, undecided = decided
    model = None if run.model is None else {key: value for key, value in run.model.items() if key != "weights"}
    prepared = run.preparation
    labels = {"column": prepared.label, "1": prepared.positive, "0": prepared.negative} if prepared else {}
    checked = None if onnx is None else {key: value for key, value in onnx._asdict().items() if key != "content"}
    content = {
        "format": FORMAT,
        "fedxl": __version__,
        "torch": torch.__version__,
        "model": model if model is None else {"name": "mlp", **model},
        **run.form._asdict(),
        "weights_dtype": run.dtype,
        "labels": labels,
        "label_names": run.form.labels,
        "preparation": None if prepared is None else prepared.to_json(),
        "decision": None if decision is None else decision.to_json(),
        "undecided": undecided,
        "decided_by": "scores" if "validation" in run.scored or "validation" in run.by_label else COUNTS,
        "onnx": checked,
        "training": {**_without_paths(run.about), "best_round": run.best_round},
        "judgement": None if judgement is None else _shortened(judgement),
    }
    return plain(content)  # type: ignore[no-any-return]


def _without_paths(about: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says, with names of files in place of absolute paths: these are nobody else's business."""
    chosen = {
        name: about[name] for name in ("begun", "settings", "members", "environment", "privacy") if name in about
    }
    return {**chosen, "settings": {key: _name(value) for key, value in chosen["settings"].items()}}


def _name(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_name(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


DESCRIPTION = "model.json"
CARD = "README.md"
FILES = (WEIGHTS, ONNX, CARD)  # that an exported folder may hold besides; no name in model.json is ever opened
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Exported:
    """An exported model."""

    path: Path
    form: Form
    weights_dtype: str
    model: Mapping[str, Any] | None  # the [model] table; None: an object of Python's, there as ONNX alone
    preparation: Preparation | None
    decision: Meaning | None
    undecided: str  # why there is no decision
    digests: Mapping[str, str] = field(default_factory=dict)  # by name of file

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
        return _parsed(path, content)
    except UserError as error:
        raise UserError(f"{file}: {error}" if str(file) not in str(error) else str(error)) from None


def _parsed(path: Path, content: Mapping[str, Any]) -> Exported:
    file = path / DESCRIPTION
    model = content.get("model")
    require(model is None or isinstance(model, dict), "model must be a table or null")
    require(model is None or isinstance(model.get("name"), str), "model.name must be a text")
    dtype = content.get("weights_dtype")
    require(isinstance(dtype, str) and dtype in DTYPES, f"weights_dtype must be one of {', '.join(DTYPES)}")
    preparation, decision = content.get("preparation"), content.get("decision")
    digests = convert(content.get("files"), dict, "files")
    for name, value in digests.items():
        require(name in FILES, f"files names {name!r}; there can be {', '.join(FILES)}")
        require(isinstance(value, str) and len(value) == 64, f"files: the digest of {name} must be 64 hex digits")
    # Its "labels" are what 1 and 0 mean.
    form = read_form({**content, "labels": content.get("label_names", [])}, file)
    return Exported(
        path,
        form,
        str(dtype),
        model,
        None if preparation is None else Preparation.from_json(preparation),
        None if decision is None else meaning_from_json(decision, form.labels),
        str(content.get("undecided") or ""),
        digests,
    )


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
