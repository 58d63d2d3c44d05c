"""Who takes part in a run, and run.json: what a report says of a run besides its metrics."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import torch

from fedxl import __version__
from fedxl.data.federation import Holding
from fedxl.files import plain


class Member(NamedTuple):
    """A client or site, and how many training examples it holds."""

    name: str
    positives: int
    negatives: int


def members(names: Sequence[str], holdings: Sequence[Holding]) -> list[Member]:
    return [Member(name, held.positives, held.negatives) for name, held in zip(names, holdings, strict=True)]


def numbered(count: int) -> tuple[str, ...]:
    """Names for clients that have none."""
    return tuple(f"client {number}" for number in range(count))


class Form(NamedTuple):
    """What a network takes and gives: its model is rebuilt from this and from the settings."""

    shape: tuple[int, ...]  # of an example
    dtype: str  # of its numbers, as the network gets them
    score_shape: tuple[int, ...]  # of a score; () is one number
    columns: tuple[str, ...] = ()  # of the data frames that examples came in
    labels: tuple[str, ...] = ()  # the names of several labels, each of which has a score


def about(
    settings: Mapping[str, Any], members: Sequence[Member], select: str, form: Form, privacy: Mapping[str, Any]
) -> str:
    """run.json: settings, members, and where the run began. privacy: what a private run will have spent."""
    content = {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": dict(settings),
        "select": select,
        **form._asdict(),
        "members": [member._asdict() for member in members],
        "environment": environment(),
        **({"privacy": dict(privacy)} if privacy else {}),
    }
    return json.dumps(plain(content), indent=1) + "\n"


def environment() -> dict[str, str]:
    """The versions that a result may depend on, and the machine."""
    return {
        "fedxl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }
