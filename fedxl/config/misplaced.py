"""Settings in the wrong section: which one they belong in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fedxl.algorithms import ALGORITHMS
from fedxl.data import DATASETS
from fedxl.errors import UserError
from fedxl.models import MODELS
from fedxl.options import accepted
from fedxl.risks import KNOWN_RISKS
from fedxl.training.settings import Settings

TABLES: Mapping[str, Mapping[str, Any]] = {
    "data": DATASETS,
    "model": MODELS,
    "risk": KNOWN_RISKS,
    "algorithm": ALGORITHMS,
}
OURS = {"model": ("shape", "outputs"), "algorithm": ("risk",)}  # filled in, and no settings


def require_settings_in_place(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """One line for a setting that its own section does not know, and another one does.

    >>> require_settings_in_place({"algorithm": {"name": "fedxl2"}, "run": {"lr": 0.1}})
    Traceback (most recent call last):
    fedxl.errors.UserError: unknown setting 'run.lr'; lr belongs in [algorithm]
    """
    known = {section: _known(section, tables.get(section, {}).get("name")) for section in (*TABLES, "run")}
    for section, table in tables.items():
        own = known.get(section)
        strange = [key for key in table if own is not None and key != "name" and key not in own]
        for key in strange:
            # Many data sets have a seed or clients of their own; the later sections are the more general ones.
            homes = [other for other, names in known.items() if names is not None and key in names]
            if homes:
                raise UserError(f"unknown setting '{section}.{key}'; {key} belongs in [{homes[-1]}]")


def _known(section: str, name: Any) -> Collection[str] | None:
    """What a section takes; None if that is not known here: of one's own, or of a name that does not exist."""
    if section == "run":
        return set(accepted(Settings))
    named = name or ("mlp" if section == "model" else "")
    build = TABLES[section].get(named) if isinstance(named, str) else None
    return None if build is None else {*accepted(build)} - {*OURS.get(section, ())}
