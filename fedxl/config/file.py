"""The sections of an experiment's file, before anything that they name is looked up. It loads no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from fedxl import toml
from fedxl.errors import unknown

SECTIONS = ("data", "model", "risk", "algorithm", "run")
TUNE = "tune"  # a section that `fedxl tune` alone reads
FILES = ("path", "validation_path", "test_path", "root", "cache", "preparation")  # settings of [data] that name files
Table = toml.Table


@dataclass(frozen=True)
class Config:
    """One experiment, as its file says it; every section is checked when it is used."""

    data: Table
    risk: Table
    algorithm: Table
    model: Table = field(default_factory=lambda: {"name": "mlp"})
    run: Table = field(default_factory=dict)

    def tables(self) -> dict[str, Table]:
        return {name: getattr(self, name) for name in SECTIONS}


def read_tables(path: Path, known: Collection[str]) -> dict[str, Table]:
    """The sections of a file, all of them among the known ones."""
    tables = toml.read(path)
    for name in tables:
        if name not in known:
            raise unknown("section", name, known)
    return tables
