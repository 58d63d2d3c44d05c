"""A page as one HTML file that loads nothing. Jinja2 is an extra: fedxl[report]."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

from fedxl import __version__
from fedxl.errors import UserError, printable
from fedxl.files import write_atomically
from fedxl.reporting.page import Page

TEMPLATES = resources.files("fedxl.reporting") / "templates"


def require_jinja2() -> Any:
    try:
        import jinja2
    except ImportError:
        raise UserError("a report in HTML needs Jinja2: pip install 'fedxl[report]'") from None
    return jinja2


def render(page: Page) -> str:
    """The file. Whatever is not SVG of our own is escaped; of all content, only the style sheet is allowed."""
    jinja2 = require_jinja2()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_clean)
    template = environment.from_string((TEMPLATES / "report.html").read_text(encoding="utf-8"))
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    html: str = template.render(
        page=page, version=__version__, style=_Trusted(style), style_hash=_Trusted(f"sha256-{digest}")
    )
    return html


def write(path: Path, page: Page) -> None:
    """Write the file, whole or not at all."""
    content = render(page).encode("utf-8", errors="replace")
    try:
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file with --html") from None


def _clean(value: object) -> object:
    """Text of others with its control characters spelled out, line by line; the rest as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "\n".join(printable(line.replace("\t", "    "), len(line) * 4) for line in value.split("\n"))


class _Trusted(str):
    """Text of this package: put into the page as it is."""

    def __html__(self) -> str:
        return str(self)
