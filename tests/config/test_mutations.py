"""A thousand mutated configs and two hundred mutated .npz files: one line each, or a run that could begin."""

from __future__ import annotations

import functools
import io
import os
import random
import signal
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import datasets

from fedxl.algorithms import ALGORITHMS
from fedxl.config import experiment as configs
from fedxl.config.experiment import Config, read, simulate
from fedxl.data import DATASETS
from fedxl.models import MODELS
from fedxl.options import accepted
from fedxl.risks import RISKS
from fedxl.training.settings import Settings
from tests.cli.test_errors import arrays
from tests.config import mutations
from tests.config.mutations import complaints, mutated_bytes

CONFIGS, FILES = 1000, 200
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.toml"
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

WHOLE = [0, 1, -1, 2, 3, 7, 100, 10**5, 10**6, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, -(2**63)]
REAL = [0.0, -0.0, 0.5, 1.0, 3.0, 100.0, 1e-320, 1e-30, 1e-6, 1e6, 1e30, 1e308, -1e308]
TEXTS = [
    "", " ", "a", "0", "auto", "none", "group", "raw", "sigmoid", "square", "psm", "loop", "vmap", "graph", "cpu",
    "cuda", "samples", "dirichlet", "quantity", "local", "float64", "bf16", "auroc", "pauc@0.5", "pauc@", "pauc@nan",
    "é", "\0", "a\nb", "\x1b[2J", "%s{}", "../..", "/dev/null", "/", ":", "os:system", "x" * 5000,
]  # fmt: skip
ODD = [
    2**63, 2**64, 10**4000, float("inf"), float("nan"), [], [1, "a"], [[]], [[[[[[[[[[1]]]]]]]]]], [0.1] * 1000, {},
    {"a": 1}, {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}}}},
]  # fmt: skip
RAW = ["9" * 4401, "0x" + "f" * 5000, "[" * 2000, "{a." * 300, "1979-05-27", "07:32:00", "'''", '"', "=", "[data]"]


def known(section: str, name: str) -> dict[str, Any]:
    """The settings that a section takes by this name, with their types."""
    tables: dict[str, Any] = {"data": DATASETS, "model": MODELS, "risk": RISKS, "algorithm": ALGORITHMS}
    options = accepted(Settings if section == "run" else tables[section][name])
    return {name: hint for name, hint in options.items() if name not in ("shape", "outputs", "score", "risk")}


def value(hint: Any, chance: random.Random) -> Any:
    """Mostly of the right type, so that it comes far."""
    if chance.random() < 0.15:
        return chance.choice([*ODD, *map(Bare, RAW)])
    kinds = [*typing.get_args(hint), hint]
    if typing.get_origin(hint) is tuple:
        return [value(kinds[0], chance) for _ in range(chance.choice((0, 1, 1, 2, 3, 20)))]
    if typing.get_origin(hint) is typing.Literal:
        return chance.choice([*kinds[:-1], *TEXTS])
    tables: dict[Any, list[Any]] = {int: WHOLE, float: [*REAL, *WHOLE], str: TEXTS, bool: [True, False]}
    return chance.choice(next((tables[kind] for kind in kinds if kind in tables), [*WHOLE, *REAL, *TEXTS]))


def written(tables: dict[str, Any]) -> str:
    """As TOML, also what no config of ours could hold."""
    lines = []
    for section, table in tables.items():
        lines += [f"[{section}]", *(f"{configs._toml(key)} = {text(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def text(value: Any) -> str:
    return value if isinstance(value, Bare) else configs._toml(value).replace("Infinity", "inf").replace("NaN", "nan")


class Bare(str):
    """TOML as it stands, right or wrong."""


def mutants(path: str) -> Iterator[bytes]:
    """Contents of configs, a few things wrong with each: most by their values, some by their letters."""
    chance = random.Random(0)
    here = [{"name": "digits"}, {"name": "digits"}, {"name": "npz", "path": path}]
    for number in range(CONFIGS):
        tables: dict[str, Any] = {
            "data": dict(chance.choice([*here, {"name": chance.choice(list(DATASETS))}])),
            "model": {"name": chance.choice(list(MODELS)[:4])},
            "risk": {"name": chance.choice(list(RISKS))},
            "algorithm": {"name": chance.choice(list(ALGORITHMS))},
            "run": {},
        }
        if tables["risk"]["name"] == "contrastive":
            tables["data"], tables["model"]["name"] = {"name": "digits", "views": True}, "mlp"
        options = {section: known(section, table.get("name", "")) for section, table in tables.items()}
        for _ in range(chance.choice((1, 1, 2, 3))):
            section = chance.choice(list(tables))
            hints = {"name": str, "unknown": Any, "a\nb": Any} if chance.random() < 0.05 else options[section]
            if hints:
                name = chance.choice(list(hints))
                tables[section][name] = value(hints[name], chance)
        content = EXAMPLE.read_bytes() if number % 8 == 1 else written(tables).encode()
        yield mutated_bytes(content, chance) if number % 4 == 1 else content


def test_a_thousand_mutated_configs_are_one_line_each_or_could_begin(tmp_path, monkeypatch):
    np.savez(tmp_path / "d.npz", **arrays())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_digits", functools.cache(datasets.load_digits))  # it is the same each time

    def act(content: bytes) -> None:
        Path("c.toml").write_bytes(content)
        experiment = read(Path("c.toml"))
        simulate(experiment, lambda line: None)
        Path("again.toml").write_text(configs.dump(experiment))
        assert read(Path("again.toml")) == experiment, "what a run writes down is what it was told"
        count(tmp_path / "begun")

    cases = list(mutants("d.npz"))
    assert len(cases) == CONFIGS
    found = complaints(cases, act)
    assert not found, "\n".join(found[:10])
    assert 50 < (tmp_path / "begun").stat().st_size < CONFIGS / 2, "some are good, most are not"


def test_two_hundred_mutated_files_are_one_line_each_or_data(tmp_path):
    chance, good = random.Random(1), arrays()
    kinds = ("<f8", ">f8", "f2", "g", "i1", "u8", "?", "c16", "O", "U3", "M8[s]", [("a", "f4"), ("b", "i8")])

    def file(number: int) -> bytes:
        content = {name: array for name, array in good.items() if chance.random() < 0.95}
        if number % 4 == 0 and content:
            name = chance.choice(list(content))
            content[name] = np.zeros(content[name].shape, dtype=chance.choice(kinds))
        stream = io.BytesIO()
        (np.savez if number % 2 else np.savez_compressed)(stream, **content)
        return stream.getvalue() if number % 4 == 0 else mutated_bytes(stream.getvalue(), chance)

    def act(content: bytes) -> None:
        (tmp_path / "d.npz").write_bytes(content)
        data = {"name": "npz", "path": str(tmp_path / "d.npz")}
        task = simulate(Config(data, {"name": "auroc"}, {"name": "fedxl2"}), lambda line: None)
        assert task.data.y.shape == (12, 1)
        count(tmp_path / "read")

    found = complaints([file(number) for number in range(FILES)], act)
    assert not found, "\n".join(found[:10])
    assert 10 < (tmp_path / "read").stat().st_size < FILES / 2, "some are good, most are not"


def test_whoever_hangs_dies_or_raises_is_found_out(monkeypatch):
    """So that the silence of the others says something."""
    monkeypatch.setattr(mutations, "WORK", 0.2)
    cases: list[Any] = [lambda: None, lambda: int("x"), lambda: os._exit(3), lambda: None]
    wrong = complaints(cases, lambda case: case())
    assert ["ValueError" in wrong[0], "ended with 3" in wrong[1], len(wrong)] == [True, True, 2]
    [hung] = complaints([lambda: sum(range(10**13))], lambda case: case())
    assert f"ended with -{signal.SIGPROF.value}" in hung
    [greedy] = complaints([lambda: bytes(2**40)], lambda case: case())
    assert "MemoryError" in greedy


def count(path: Path) -> None:
    """One more, told across processes."""
    with path.open("a") as file:
        file.write(".")
