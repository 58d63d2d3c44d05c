"""A site's training data on its disk, ready to be mapped into memory: opened in no time, however large.

Flower starts a new process for every message. Reading images anew each time would take longer than training on them.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedxl import __version__
from fedxl.checkpoint import write_atomically
from fedxl.config import Config, load_data
from fedxl.data.augment import Augment
from fedxl.data.federation import Federation
from fedxl.data.source import TensorSource
from fedxl.errors import UserError, require
from fedxl.flower.settings import SiteFile

FACTS = "data.json"  # written last: without it there is no cache


def opened(site: SiteFile) -> Federation:
    """The site's data as a federation of one client; prepared first if that has not been done."""
    facts = _facts(site)
    if facts is None:
        prepare(site)
        facts = _facts(site)
        assert facts is not None
    x, y = (_mapped(site.cache / f"{name}.npy") for name in ("x", "y"))
    means = _mapped(site.cache / "means.npy") if facts["means"] else None
    augment = Augment(**{**facts["augment"], "site_means": tuple(facts["augment"]["site_means"])})
    return Federation(TensorSource(x, y, augment, means), [np.arange(len(y))])


def count(site: SiteFile) -> int:
    """How many examples the site has; its data are prepared if they have not been."""
    return len(opened(site).source.labels)


def prepare(site: SiteFile) -> int:
    """Write the cache anew; how many examples it holds."""
    options = dict(site.data)
    federation = load_data(Config(data=options, risk={}, algorithm={}, run={})).train
    part, count = site.settings.part, len(federation.parts)
    require(part < count, f"part is {part}, but the data have {count} client(s), 0 to {count - 1}")
    source = federation.source
    require(isinstance(source, TensorSource), "only data held in memory can be prepared")
    assert isinstance(source, TensorSource)
    own = torch.as_tensor(federation.parts[part])
    try:
        site.cache.mkdir(parents=True, exist_ok=True)
        (site.cache / FACTS).unlink(missing_ok=True)
        arrays = {"x": source.x, "y": source.labels} | ({} if source.means is None else {"means": source.means})
        for name, tensor in arrays.items():
            partial = site.cache / f".{name}.npy"  # not over a file that another process has mapped
            np.save(partial, tensor[own].numpy())
            partial.replace(site.cache / f"{name}.npy")
        facts = {"key": key(site), "means": source.means is not None, "augment": asdict(source.augment)}
        write_atomically(site.cache / FACTS, json.dumps(facts).encode())
    except OSError as error:
        raise UserError(f"cannot write to {site.cache}: {error.strerror}; make room and prepare again") from None
    return len(own)


def key(site: SiteFile) -> str:
    """Of everything that the cache depends on, but for the files themselves."""
    text = json.dumps([__version__, site.data, site.settings.part], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _facts(site: SiteFile) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads((site.cache / FACTS).read_text())
    except (OSError, ValueError):
        return None
    return facts if facts.get("key") == key(site) else None


def _mapped(path: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that cannot be written to: nobody does
        return torch.from_numpy(np.load(path, mmap_mode="r"))
