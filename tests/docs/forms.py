"""Commands that are not run here: whether the real parsers take them."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
import tomllib
from typing import Any

import click
import pytest
import typer

from benchmarks import step
from fedxl.cli.main import app
from studies.__main__ import app as studies
from tests.docs.pages import ROOT

LOOP = re.compile(r"for (?P<name>\w+) in (?P<values>[^;]+); do\s(?P<body>.*?);?\sdone", re.DOTALL)


def one_command(function: Any) -> typer.Typer:
    alone = typer.Typer()
    alone.command()(function)
    return alone


CLI, STUDIES = typer.main.get_command(app), typer.main.get_command(studies)
STEP = typer.main.get_command(one_command(step.main))


class ParsedError(Exception):
    """A program has read its arguments, and would begin."""


def well_formed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of a line, by the parser of its program; an AssertionError says what is wrong with it."""
    if loop := LOOP.fullmatch(text):
        for value in loop["values"].split():
            well_formed(loop["body"].replace(f"${loop['name']}", value), monkeypatch)
        return
    for part in re.split(r" && |\n", text):
        words = shlex.split(part.strip().removesuffix("&"))
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            del words[0]
        if words:
            program = words[0].rpartition("/")[2] if words[0].startswith(".venv") else words[0]
            assert program in FORMS, f"{program}: no parser; add one to FORMS"
            FORMS[program](words[1:], monkeypatch)


def fedxl(words: list[str], monkeypatch: pytest.MonkeyPatch, command: Any = CLI) -> None:
    """Commands, options and values by typer; what a sentence leaves out may be missing."""
    context = click.Context(command, info_name="fedxl")
    while isinstance(command, typer.core.TyperGroup) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]!r} in {context.info_name}"
        command, words = found, words[1:]
    try:
        with command.make_context(command.name, list(words)):
            return
    except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
        return
    except click.MissingParameter:
        return
    except click.UsageError as error:
        # A sentence may name an option without its value.
        if isinstance(error, click.NoSuchOption) or not isinstance(error, click.BadOptionUsage):
            raise AssertionError(error.format_message()) from None


def python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of ours reads its arguments as it always does, and is stopped before it begins."""
    if words[:2] == ["-m", "pytest"]:
        return pytest_(words[2:], monkeypatch)
    if words[:2] == ["-m", "studies"]:
        return fedxl(words[2:], monkeypatch, STUDIES)
    if words[:2] == ["-m", "benchmarks.step"]:
        return fedxl(words[2:], monkeypatch, STEP)
    if words[:2] == ["-m", "ipykernel"]:
        return foreign(words[2:], monkeypatch)
    if words[0] == "-m":
        words = [words[1].replace(".", "/") + ".py", *words[2:]]
    script = next((place / words[0] for place in (ROOT, ROOT / "examples") if (place / words[0]).is_file()), None)
    assert script is not None, f"there is no file {words[0]}"
    text = script.read_text()
    if "ArgumentParser(" not in text:
        most = 99 if "sys.argv[2:]" in text or "sys.argv[1:]" in text else int("sys.argv[1]" in text)
        assert len(words) - 1 <= most, f"{words[0]} takes {most} argument(s)"
        assert not [word for word in words if word.startswith("-")], f"{words[0]} has no options"
        with monkeypatch.context() as patch:
            patch.syspath_prepend(script.parent)
            runpy.run_path(str(script), run_name="imported")
        return None
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *given: Any) -> None:
        parse(self, *given)
        raise ParsedError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        patch.setattr(sys, "argv", [str(script), *words[1:]])
        patch.syspath_prepend(script.parent)
        with pytest.raises(ParsedError):
            runpy.run_path(str(script), run_name="__main__")
    return None


def make(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, equals, _ = word.partition("=")
        pattern = rf"^{name} \?=" if equals else rf"^{name}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"the Makefile has no {name}"


def pip(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] in ("install", "show", "wheel"), words
    for asked in re.findall(r"(?:fedxl|\.|whl)\[(.*?)\]", " ".join(words)):
        assert set(asked.split(",")) <= extras.keys(), f"fedxl has no extra {asked}"


def pytest_(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (word for word in words if word.startswith("tests/")):
        assert (ROOT / file).exists(), f"there is no file {file}"
        if "-k" in words:
            assert words[words.index("-k") + 1] in (ROOT / file).read_text()


def torchrun(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fedxl(words[words.index("-m") + 2 :], monkeypatch)


def docker(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an image that is run, what its entry point gets."""
    if words[0] == "run":
        (image,) = [number for number, word in enumerate(words) if word.startswith("fedxl:")]
        fedxl(words[image + 1 :], monkeypatch)


def foreign(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of others, which may not be installed."""


FORMS = {
    "fedxl": fedxl, "python": python, "make": make, "pip": pip, "pytest": pytest_, "torchrun": torchrun,
    "pre-commit": foreign, "flwr": foreign, "flower-supernode": foreign, "tensorboard": foreign, "mlflow": foreign,
    "cd": foreign, "sed": foreign, "docker": docker, "kubectl": foreign, "sbatch": foreign,
}  # fmt: skip
