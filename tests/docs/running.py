"""Runs a page of the documentation from top to bottom: its commands in one folder, its Python code in one module."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedxl.cli.main import app
from fedxl.data.participation import read_trace
from fedxl.errors import UserError
from tests.docs.accounts import BLOCKS_ELSEWHERE, ELSEWHERE, MISTAKES, NOT_RUN, SHORTER
from tests.docs.pages import Block, commands
from tests.docs.settings import check_settings

ADVICE = "mend the page; or name in tests/docs/accounts.py why the line is run shorter, elsewhere or not at all"


def found_in(table: dict[str, str], line: str) -> str | None:
    return next((value for pattern, value in table.items() if re.fullmatch(pattern, line)), None)


def entry_of(block: Block, entry: str) -> bool:
    """Whether an entry, `page: words`, means this block."""
    page, _, words = entry.partition(": ")
    return page == block.page and words in block.text


class Reader:
    """Somebody who follows a page, line by line."""

    def __init__(self, page: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], before: str) -> None:
        self.patch, self.capsys, self.shown = patch, capsys, ""
        self.module = types.ModuleType(f"page_{re.sub(r'[^a-z]', '_', page)}")
        patch.setitem(sys.modules, self.module.__name__, self.module)  # where dataclasses look for their types
        exec(before, self.module.__dict__)

    def follow(self, block: Block) -> None:
        """Run a block, unless the accounts say who else does."""
        if any(entry_of(block, entry) for entry in BLOCKS_ELSEWHERE):
            return
        kinds = {"bash": self.shell, "python": self.python, "toml": self.toml, "text": self.text, "json": self.json}
        if block.language in kinds:
            kinds[block.language](block)

    def shell(self, block: Block) -> None:
        for line, where in commands(block):
            if found_in(ELSEWHERE, line) or found_in(NOT_RUN, line):
                continue
            try:
                for part in line.split(" && "):
                    self.command(*shlex.split(f"{part} {found_in(SHORTER, part) or ''}"))
            except (AssertionError, UserError, OSError) as error:
                pytest.fail(f"{where}: `{line}` does not run: {error}\n{ADVICE}", pytrace=False)

    def command(self, program: str, *words: str) -> None:
        if program == "cd":
            self.patch.chdir(words[0])
        elif program == "fedxl":
            done = CliRunner().invoke(app, words, catch_exceptions=False)
            self.shown += done.output
            assert done.exit_code == 0, f"exit code {done.exit_code}, {done.output}"
        elif program == "python" and words[0].endswith(".py"):
            with self.patch.context() as patch:
                patch.setattr(sys, "argv", list(words))
                runpy.run_path(words[0], run_name="__main__")
        else:
            raise AssertionError(f"the tests cannot run {program}")

    def python(self, block: Block) -> None:
        try:
            exec(compile(block.text, str(block), "exec"), self.module.__dict__)
        except Exception as error:
            pytest.fail(f"{block}: the code does not run: {error!r}", pytrace=False)
        self.shown += "".join(self.capsys.readouterr())
        if first := re.match(r"# (\w+)\.py\n", block.text):  # a file that later blocks name
            self.patch.setitem(sys.modules, first[1], self.module)

    def toml(self, block: Block) -> None:
        for name in ("mypackage", "mypackage.nets"):  # a reader's own code is what the page has shown
            self.patch.setitem(sys.modules, name, self.module)
        try:
            check_settings(block.text, Path("settings.toml"))
        except (UserError, ValueError) as error:
            pytest.fail(f"{block}: these settings are refused: {error}", pytrace=False)

    def json(self, block: Block) -> None:
        """A trace of who is available, the one JSON file that readers write."""
        Path("trace.json").write_text(block.text)
        read_trace(Path("trace.json"), sorted(set(re.findall(r'"(?!rounds)(\w+)"', block.text))))

    def text(self, block: Block) -> None:
        """What the page says that it shows; numbers may differ a little from machine to machine."""
        for line in block.text.splitlines():
            if line in MISTAKES:
                with pytest.raises(UserError) as mistake:
                    self.command(*shlex.split(MISTAKES[line]))
                self.shown += f"fedxl: {mistake.value}\n"
            words, numbers = apart(line)
            same = [apart(other)[1] for other in self.shown.splitlines() if apart(other)[0] == words]
            close = any(all(abs(a - b) <= 0.01 for a, b in zip(numbers, other, strict=True)) for other in same)
            assert close, f"{block}: nothing shows {line!r}, but {same or self.shown}"


def apart(line: str) -> tuple[list[str], list[float]]:
    """The words of a line, and its numbers."""
    number = r"(?<![\w@.])-?\d+(?:\.\d+)?"
    return re.sub(number, "#", line).split(), [float(found) for found in re.findall(number, line)]
