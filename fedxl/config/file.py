"""The sections of an experiment's file, before anything that they name is looked up. It loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedxl import toml

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
