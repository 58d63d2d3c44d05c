"""A site's private seed of a run: the source of all that the server must not be able to work out."""

from __future__ import annotations

from pathlib import Path

from fedxl.deploy.secret import kept_seed

FILE = "private.seed"


def private_seed(state: Path, run: str) -> int:
    """A whole number below 2**128, made once for each run and kept in the site's state folder for its user alone."""
    return kept_seed(state / run / FILE)
