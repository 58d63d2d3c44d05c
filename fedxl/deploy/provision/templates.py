"""The texts that `fedxl deploy init` writes. A folder of templates/ENGINE/ is laid out as the party's own will be.

`@name` is filled in, and `@@` is an @: scripts and nginx have dollars of their own. parts/ holds what texts share.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template

from fedxl import __version__
from fedxl.files import read_templates


class Text(Template):
    delimiter = "@"


TEXTS = {name: Text(text.removesuffix("\n")) for name, text in read_templates("fedxl.deploy").items()}
PARTS = {Path(name).stem: text.template for name, text in TEXTS.items() if name.startswith("parts/")}


def fill(path: str, /, **values: object) -> str:
    """A template with its values. Raises KeyError for a name that has none."""
    return TEXTS[path].substitute(PARTS | {"version": __version__} | values) + "\n"


def fill_folder(source: str, target: str, /, **values: object) -> dict[str, str]:
    """The templates whose paths begin with `source`, by these paths with `target` instead."""
    return {target + name.removeprefix(source): fill(name, **values) for name in TEXTS if name.startswith(source)}


def write(out: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files by their paths below a folder; their own folders are for this user alone."""
    for name, text in files.items():
        path = out / name
        for folder in reversed(path.parents[: len(Path(name).parents)]):
            folder.mkdir(mode=0o700, exist_ok=True, parents=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        if path.suffix == ".sh":
            path.chmod(0o755)
