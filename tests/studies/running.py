"""What the tests of studies share: a command as a user calls it, and rows that were never run."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from studies import harness
from studies.__main__ import main
from studies.harness import Row


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The exit code of `python -m studies ...`, and what it prints."""
    monkeypatch.setattr(sys, "argv", ["studies", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def made(case: dict[str, Any], **found: Any) -> Row:
    return Row(harness.key_of(case), case, found)
