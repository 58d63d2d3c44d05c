"""What the documentation tells its readers to run: blocks of pages, their lines, and commands within sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LANGUAGES = ("bash", "python", "toml", "text", "json")
PROGRAMS = (
    "fedxl",
    "python",
    "make",
    "pip",
    "pytest",
    "torchrun",
    "flwr",
    "flower-supernode",
    "tensorboard",
    "mlflow",
)
FENCE = re.compile(r"^([ ]*)```(.*?)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r'^--8<-- "(.*)"$', re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


class Command(NamedTuple):
    """A line for a shell, with what continues it, and where it stands."""

    text: str
    where: str


def pages() -> list[Path]:
    """All but the changelog, which tells what commands once were."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    text, name = page.read_text(), str(page.relative_to(ROOT))
    found = []
    for match in FENCE.finditer(text):
        indent, language, body = match.groups()
        body = INCLUDE.sub(
            lambda include: (ROOT / include[1]).read_text(), re.sub(f"^{indent}", "", body, flags=re.M)
        )
        found.append(Block(name, text[: match.start()].count("\n") + 1, language, body))
    return found


def commands(block: Block) -> Iterator[Command]:
    """The lines of a block for a shell, without comments. A loop is one, and so is what a backslash continues."""
    whole, start = "", 0
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        start = start if whole else number
        whole += re.sub(r"(^|\s+)#\s.*$", "", line).strip()
        if whole.endswith("\\"):
            whole = whole[:-1]
        elif whole.startswith("for ") and not whole.endswith("done"):
            whole += "\n"
        elif whole:
            yield Command(re.sub(r"[ ]{2,}", " ", whole), f"{block.page}:{start}")
            whole = ""


def mentions(page: Path) -> list[Command]:
    """Commands within sentences and tables: `fedxl report runs`. They are shown, named or cut short."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    rest = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    begins = re.compile(rf"(?:OMP_NUM_THREADS=1 )?(?:\.venv/bin/)?(?:{'|'.join(PROGRAMS)})(?: |$)")
    found = []
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", rest):
        command = " ".join(match[1].split())
        if begins.match(command) and "\n\n" not in match[1]:
            found.append(Command(command, f"{name}:{rest[: match.start()].count(chr(10)) + 1}"))
    return found


def hidden(page: Path) -> list[str]:
    """Indented lines that read like commands: only fenced blocks say what they are."""
    rest = FENCE.sub("", page.read_text())
    return re.findall(rf"^[ ]{{4,}}(?:{'|'.join(PROGRAMS)}) .*$", rest, re.MULTILINE)
