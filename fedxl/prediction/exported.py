"""model.json: all that an exported folder says of its model. Reading it trusts nothing in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedxl.data.preparation import Preparation
from fedxl.errors import UserError, require
from fedxl.evaluation.label_decisions import Meaning, meaning_from_json
from fedxl.files import read_bytes, read_json
from fedxl.options import convert
from fedxl.prediction.network import WEIGHTS
from fedxl.prediction.onnx_file import ONNX
from fedxl.prediction.run import read_form
from fedxl.training.members import Form
from fedxl.training.settings import DTYPES

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
    """The model of an exported folder; one line if model.json is not what we write."""
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
