"""A site's process that prepares its data, and ends."""

from __future__ import annotations

from pathlib import Path

from fedxl.deploy.log import Say
from fedxl.deploy.provision.settings import read_site
from fedxl.deploy.site import cache


def main(folder: Path, say: Say) -> None:
    file = read_site(folder / "site.toml")
    # Not by `say`: the supervisor, who reads this line, says it.
    print(f"site {file.settings.name}: {cache.count(file)} examples ready", flush=True)
