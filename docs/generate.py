"""The generated parts of the documentation site: a hook of mkdocs.

A line `<!-- generate: NAME -->` in a page, with the line below it, becomes what `GENERATORS[NAME]` returns; that line
is for readers of the file in a checkout. Settings come from the tables and signatures that configs are checked
against, so that the pages cannot differ from what the program accepts.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import fedxl
from fedxl import metrics
from fedxl.algorithms import ALGORITHMS
from fedxl.cli.main import app
from fedxl.data import DATASETS
from fedxl.deploy.provision.settings import ServerSettings, SiteSettings
from fedxl.experiments.tune.plan import TuneSettings
from fedxl.models import LIBRARIES, MODELS, with_parts
from fedxl.options import accepted, groups_of
from fedxl.risks import KNOWN_RISKS, SURROGATES
from fedxl.training.advice import RULES

ROOT = Path(__file__).parents[1]
# Files of the repository that the site shows, too.
OUTSIDE = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "LICENSE", "examples/digits.toml")
MARK = re.compile(r"^<!-- generate: (\w+) -->\n\*Filled in by `make docs`.*\*$", re.MULTILINE)
FILLED_IN = {"score", "risk", "shape", "outputs", "model"}  # what fedxl passes itself: no options of a user


# What mkdocs calls.


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie at the top of the repository."""
    for name in OUTSIDE:
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in generated parts. Links that leave docs/ lead to the copies on the site."""
    if not page.file.src_uri.startswith(("notes/", "CHANGELOG")):  # these may speak of what was
        _check_names(markdown, page)
    names = "|".join(map(re.escape, OUTSIDE))
    markdown = re.sub(rf"\]\(\.\./((?:\.\./)*)({names})", r"](\1\2", markdown)
    markdown = MARK.sub(lambda mark: _generated(mark[1], page), markdown)
    if "<!-- generate:" in markdown:
        raise PluginError(f"{page.file.src_uri}: the line below a mark begins with *Filled in by `make docs`")
    return markdown


def _generated(name: str, page: Page) -> str:
    if name not in GENERATORS:
        raise PluginError(f"{page.file.src_uri}: nothing generates '{name}'; there is {', '.join(GENERATORS)}")
    return GENERATORS[name]()


def _check_names(markdown: str, page: Page) -> None:
    """Files and tests that a page names must be there: they move, and pages are forgotten."""
    gone = [
        name
        for name in re.findall(r"\b(?:fedxl|tests|benchmarks)/[\w/]+\.py\b", markdown)
        if not (ROOT / name).exists()
    ]
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = {path.name for path in files}
    gone += [name for name in re.findall(r"\btest_\w+\.py\b", markdown) if name not in names]
    functions = set(re.findall(r"^def (test_\w+)", "\n".join(path.read_text() for path in files), re.MULTILINE))
    gone += [name for name in re.findall(r"::(test_\w+)", markdown) if name not in functions]
    if gone:
        raise PluginError(f"{page.file.src_uri} names what is not there: {', '.join(sorted(set(gone)))}")


# Tables of options.


class Option(typing.NamedTuple):
    name: str
    type: str
    default: str
    about: str


def options(fn: Callable[..., Any]) -> list[Option]:
    """What a user can set of a function or a dataclass, with the comments that stand beside a dataclass's fields."""
    about = comments(fn)
    defaults = dict(_defaults(fn))
    found = []
    for name, hint in accepted(fn).items():
        if name not in FILLED_IN and not name.startswith("_"):
            found.append(Option(name, type_in_words(hint), _default(defaults.get(name)), about.get(name, "")))
    return found


def _defaults(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Defaults by name; of a group of options, those of its options."""
    groups = groups_of(fn)
    for name, parameter in inspect.signature(fn).parameters.items():
        if name in groups:
            yield from groups[name].defaults.items()
        else:
            yield name, parameter.default


def comments(fn: Callable[..., Any]) -> dict[str, str]:
    """The comments beside the fields of a dataclass, inherited ones too, or of a function's groups of options."""
    found: dict[str, str] = {}
    if inspect.isclass(fn):
        for base in reversed(fn.__mro__):
            if dataclasses.is_dataclass(base):
                found |= {name: text for name, text in _field_comments(base).items() if text}
    else:
        found |= _parameter_comments(fn)
    for group in groups_of(fn).values():
        found |= comments(group.source)
    return found


def _parameter_comments(fn: Callable[..., Any]) -> dict[str, str]:
    """The comments beside the parameters of a function."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(fn)))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    by_line = _comments_by_line(source)
    parameters = [*node.args.args, *node.args.kwonlyargs]
    return {each.arg: by_line[each.lineno] for each in parameters if each.lineno in by_line}


def _field_comments(cls: type) -> dict[str, str]:
    nodes, by_line = _annotated(cls)
    return {ast.unparse(node.target): by_line.get(node.lineno, "") for node in nodes}


def _annotated(cls: type) -> tuple[list[ast.AnnAssign], dict[int, str]]:
    """The annotated names in a class's source, and its comments by line."""
    source = textwrap.dedent(inspect.getsource(cls))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    return [node for node in body.body if isinstance(node, ast.AnnAssign)], _comments_by_line(source)


def _comments_by_line(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if value is None or str(value) == "<factory>":
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`".replace("'", '"')
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def type_in_words(hint: Any) -> str:
    """As TOML has it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f'`"{arg}"`' for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_in_words(arg) for arg in args if arg is not type(None))
    if origin is tuple:
        return f"list of {type_in_words(args[0])}"
    names = {float: "number", int: "whole number", bool: "true or false", str: "text"}
    return names.get(hint, "any" if hint is Any else getattr(hint, "__name__", str(hint)))


def table(rows: Sequence[Option]) -> str:
    lines = ["| setting | type | default | |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {cell(row.type)} | {cell(row.default)} | {cell(row.about)} |" for row in rows]
    return "\n".join(lines) if rows else "No settings."


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def settings_of(fn: Callable[..., Any]) -> Callable[[], str]:
    return lambda: table(options(fn))


# What there is by name.


def named(entries: Mapping[str, Any]) -> Callable[[], str]:
    """A section for each entry of a table: what it is, and what can be set."""

    def sections() -> str:
        parts = []
        for name, entry in entries.items():
            build = getattr(entry, "build", entry)
            parts += [f"## `{name}`", _docstring(build), table(options(build))]
        return "\n\n".join(parts)

    return sections


def _docstring(fn: Callable[..., Any]) -> str:
    """The docstring as Markdown: indented formulas stay blocks of their own."""
    text = inspect.getdoc(fn) or ""
    paragraphs = re.split(r"\n\n", text.split(">>>")[0].rstrip())
    return "\n\n".join(_formula(paragraph) for paragraph in paragraphs)


def _formula(paragraph: str) -> str:
    """A line that begins with `F =` or the like is a block; the words behind the formula are not part of it."""
    out = []
    for line in paragraph.splitlines():
        found = re.match(r"\s*((?:F|g_i|v|u_i|c) +(?:=|<-).*?)(?:\.|\s{2,}(?=\()|$)(.*)$", line)
        out.append(f"\n    {found[1]}\n\n{found[2].strip()}" if found else line)
    return "\n".join(out)


def summaries(entries: Mapping[str, Any]) -> str:
    lines = ["| name | |", "|---|---|"]
    lines += [f"| `{name}` | {cell(_first_line(entry))} |" for name, entry in entries.items()]
    return "\n".join(lines)


def _first_line(entry: Any) -> str:
    return str(getattr(entry, "summary", "")) or (inspect.getdoc(entry) or "").splitlines()[0]


def metrics_by_name() -> str:
    return summaries(metrics.KNOWN)


def surrogates() -> str:
    return ", ".join(f"`{name}`" for name in SURROGATES)


def advice() -> str:
    """The rules of `fedxl advise`, in order: of each topic the first that applies is taken."""
    lines = ["| topic | if | then | because |", "|---|---|---|---|"]
    for topic, rule in ((topic, rule) for topic, rules in RULES.items() for rule in rules):
        then = ", ".join(f"`{name} = {value}`" for name, value in rule.settings.items())
        then = then.replace("{fedxl}", "fedxl1 or fedxl2").replace("{centralized}", "sgd or sox")
        why = re.sub(r"\{[^}]*\}", "…", rule.why.replace("{fedxl}", "FeDXL"))  # numbers differ
        lines.append(f"| {topic} | {cell(rule.when)} | {cell(then)} | {cell(why)} |")
    return "\n".join(lines)


# The Python API and the modules.


def api() -> str:
    """Every public name, by the room that it lives in: what people call first, then what they get back."""
    rooms: dict[str, list[str]] = {}
    for name in fedxl.__all__:
        rooms.setdefault(fedxl._HOMES[name].split(".")[1], []).append(name)
    order = ["training", "algorithms", "risks", "data", "metrics"]
    parts = []
    for room in sorted(rooms, key=lambda room: (order.index(room) if room in order else len(order), room)):
        parts.append(f"## fedxl.{room}")
        for name in sorted(rooms[room], key=lambda name: (name != "fit", name)):
            parts += _documented(name, getattr(fedxl, name))
    return "\n\n".join(parts)


def _documented(name: str, entry: Any) -> list[str]:
    """Its docstring by mkdocstrings, and a table of its fields if it is a dataclass. Plain tables have pages."""
    if not callable(entry):
        return []
    parts = [f"::: fedxl.{name}"]
    if dataclasses.is_dataclass(entry) and isinstance(entry, type):
        lines = ["| field | type | default | |", "|---|---|---|---|"]
        lines += [
            f"| `{name}` | {_code(kind)} | {_code(default)} | {cell(about)} |"
            for name, kind, default, about in fields(entry)
        ]
        parts.append("\n".join(lines))
    return parts


def _code(text: str) -> str:
    return f"`{cell(text)}`" if text else ""


def fields(cls: type) -> list[tuple[str, str, str, str]]:
    """The fields of a dataclass as its source has them: name, type, default, comment."""
    about = comments(cls)
    found: dict[str, tuple[str, str, str, str]] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            for node in _annotated(base)[0]:
                name, kind = ast.unparse(node.target), ast.unparse(node.annotation)
                default = ast.unparse(node.value) if node.value else "required"
                if not (kind.startswith("ClassVar") or name.startswith("_")):
                    found[name] = (name, kind, "" if "lambda" in default else default, about.get(name, ""))
    return list(found.values())


def modules() -> str:
    """Every module with the first sentence of its docstring."""
    lines = ["| module | |", "|---|---|"]
    for path in sorted((ROOT / "fedxl").rglob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        if text:
            name = str(path.relative_to(ROOT)).removesuffix("/__init__.py")
            lines.append(f"| `{name}` | {cell(text.splitlines()[0])} |")
    return "\n".join(lines)


# The command line.


def command_line() -> str:
    return "\n\n".join(_commands(typer.main.get_command(app), "fedxl"))


def _commands(command: click.Command, path: str) -> Iterator[str]:
    about = inspect.cleandoc(command.help or "").replace("\f", "")
    if isinstance(command, click.Group):
        if path != "fedxl":
            yield f"## {path}\n\n{about}"
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)  # which loads it
            assert inner is not None
            yield from _commands(inner, f"{path} {name}")
        return
    yield f"### {path}\n\n{about}"
    usage = " ".join([path, *_arguments(command)])
    yield f"```text\n{usage}\n```"
    rows = [row for row in map(_parameter, command.params) if row]
    if rows:
        yield "\n".join(["| | | default |", "|---|---|---|", *rows])


def _arguments(command: click.Command) -> list[str]:
    words = ["[OPTIONS]"] if any(isinstance(p, click.Option) for p in command.params) else []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            name = parameter.make_metavar(click.Context(command)).strip("[]")
            words.append(name if parameter.required else f"[{name}]")
    return words


def _parameter(parameter: click.Parameter) -> str | None:
    if "--help" in parameter.opts:
        return None
    is_option = isinstance(parameter, click.Option)
    name = "/".join([*parameter.opts, *parameter.secondary_opts]) if is_option else str(parameter.human_readable_name)
    metavar = f" {parameter.metavar}" if is_option and parameter.metavar else ""
    default = parameter.default
    shown = "" if default is None or callable(default) or default in ((), False, "") else f"`{default}`"
    if not is_option and parameter.required:
        shown = "required"
    return f"| `{name}{metavar}` | {cell(str(getattr(parameter, 'help', '') or ''))} | {shown} |"


GENERATORS: Mapping[str, Callable[[], str]] = {
    "run_settings": settings_of(fedxl.Settings),
    "tune_settings": settings_of(TuneSettings),
    "server_settings": settings_of(ServerSettings),
    "site_settings": settings_of(SiteSettings),
    "algorithms": named(ALGORITHMS),
    "risks": named(KNOWN_RISKS),
    "surrogates": surrogates,
    "datasets": named(DATASETS),
    "models": named(MODELS),
    "model_parts": settings_of(with_parts),
    "libraries": lambda: summaries(LIBRARIES),
    "metrics": metrics_by_name,
    "api": api,
    "modules": modules,
    "advice": advice,
    "command_line": command_line,
}
