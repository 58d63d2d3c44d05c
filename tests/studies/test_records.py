"""The recorded results: small, one row per run, and the tables of the documentation are made of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from studies import heterogeneity, labels
from studies.harness import Harness, read
from studies.paper import ablation, runtime, tables
from studies.paper.study import TABLE1, TABLE2
from tests.studies.running import command

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RECORDS = sorted(RESULTS.glob("*.jsonl"))
COMMANDS = ["drift", "rates", "complexity", "optimisers", "participation", "hostile", "curious", "privacy", "ranking"]


def test_records_are_small():
    assert len(RECORDS) > 25
    assert sum(path.stat().st_size for path in RESULTS.glob("*.json*")) < 2_000_000


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_one_row_per_run_and_no_curves(path):
    rows = read(path)
    assert rows
    assert len({row.key for row in rows}) == len(rows), "no run twice"
    assert not [row for row in rows if "curve" in row.found or "history" in row.found]
    assert (RESULTS / f"{path.stem}.md").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_recorded_study_is_a_finished_one(name, tmp_path, monkeypatch, capsys):
    """The command repeats no run, and comes to the table of the documentation."""

    def none_is_left(self, todo, jobs):
        raise AssertionError(f"{len(todo)} runs have no row, among them {todo[0].case}")

    monkeypatch.setattr(Harness, "_outcomes", none_is_left)
    shutil.copy(RESULTS / f"{name}.jsonl", tmp_path)
    code, text, err = command(monkeypatch, capsys, name, "--out", str(tmp_path))
    assert code == 0, err
    assert text.strip() == (RESULTS / f"{name}.md").read_text().strip()


def cells(text: str) -> set[str]:
    """The numbers of a table that have a spread, and those of one run."""
    return set(re.findall(r"0\.\d{3,4}(?: ± 0\.\d{3,4})?", text))


@pytest.mark.parametrize("path", [path for path in RECORDS if "table" in path.stem], ids=lambda path: path.stem)
def test_the_papers_tables_are_made_of_rows(path):
    rows, comparison = read(path), TABLE1 if path.stem.endswith("1") else TABLE2
    text = tables.markdown(comparison, rows, tables.table(comparison, rows))
    ours = [line for line in text.splitlines() if "| ours |" in line]
    assert ours
    assert set(ours) <= set(path.with_suffix(".md").read_text().splitlines())


@pytest.mark.parametrize("path", [p for p in RECORDS if "heterogeneity" in p.stem], ids=lambda path: path.stem)
def test_sites_that_differ_are_made_of_rows(path):
    rows = read(path)
    values = heterogeneity.markdown(rows, heterogeneity.table(rows)).partition("## Chosen")[0]
    assert {cell for cell in cells(values) if "±" in cell} <= cells(path.with_suffix(".md").read_text())


def test_the_other_tables_are_made_of_rows():
    made = {f"cifar10-{a.name}": ablation.markdown(a, read(RESULTS / f"cifar10-{a.name}.jsonl"))
            for a in (ablation.VARY_K, ablation.VARY_N)}  # fmt: skip
    made["cifar10-runtime"] = runtime.markdown(read(RESULTS / "cifar10-runtime.jsonl"), 32)
    made["labels"] = labels.markdown(read(RESULTS / "labels.jsonl"), 20)
    for name, text in made.items():
        assert len(cells(text)) >= 4
        assert cells(text) <= cells((RESULTS / f"{name}.md").read_text()), name
