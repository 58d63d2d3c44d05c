"""Tables of runs, as text and as Markdown."""

from __future__ import annotations

from typer.testing import CliRunner

from fedxl.cli.main import app
from fedxl.reporting.text import as_markdown


def test_names_of_folders_stay_cells_of_the_table(tmp_path):
    evil = tmp_path / "a | b <img src=x onerror=alert(1)> \x1b[2J\u202e"
    evil.mkdir()
    (evil / "run.json").write_text("{}")
    for how in ([], ["--markdown"]):
        found = CliRunner().invoke(app, ["report", str(tmp_path), *how])
        assert found.exit_code == 0, found.output
        assert "\\x1b[2J\\u202e" in found.output
        assert not {"\x1b", "\u202e"} & set(found.output)
    head, _, row = found.output.splitlines()
    assert row.replace("\\|", "").count("|") == head.count("|")
    assert "<img" not in row


def test_what_is_no_markup_is_left_alone():
    assert as_markdown([["0.3 < 0.5"]], ["FPR <= 0.3"]) == "| FPR <= 0.3 |\n| --- |\n| 0.3 < 0.5 |\n"
