"""Which examples of the data that a site names are its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedxl.data.federation import Split, Splits
from fedxl.deploy.provision.settings import SiteFile
from fedxl.errors import printable, require

SPLITS = ("validation", "test")
MOST_NAMED = 10  # sites of a table in an error


def own_rows(site: SiteFile, splits: Splits) -> Tensor:
    """Which training examples of the data are this site's."""
    return torch.as_tensor(splits.train.parts[_own_part(site, _names(splits))])


def _names(splits: Splits) -> Sequence[str]:
    """Of a file's sites; "" for clients that are numbered alone."""
    return splits.names if splits.preparation is not None else [""] * len(splits.train.parts)


def _own_part(site: SiteFile, names: Sequence[str]) -> int:
    """Which client of its data a site is: the one with its name, or the one with the number that it says."""
    part, count = site.settings.part, len(names)
    if site.settings.name in names:
        return list(names).index(site.settings.name)
    require(part < count, f"part is {part}, but the data have {count} client(s), 0 to {count - 1}")
    return part


def own_site(site: SiteFile, names: Sequence[str]) -> int:
    """Which site of a table this is: the one with its name, or the only one. A number might be another's."""
    own = site.settings.name
    listed = ", ".join(printable(name, 40) for name in names[:MOST_NAMED])
    listed += ", ..." if len(names) > MOST_NAMED else ""
    require(
        own in names or len(names) == 1,
        f"this site is called '{own}', and its table holds the sites {listed}; name it like one of them",
    )
    return list(names).index(own) if own in names else 0


def own_held_back(site: SiteFile, splits: Splits) -> dict[str, tuple[Split, Tensor]]:
    """By split: all of it, and this site's rows: of files its own, of other data sets an even share."""
    found = {}
    for name, pair in zip(SPLITS, (splits.validation, splits.test), strict=True):
        if pair is not None:
            rows = _even_share(pair, site.settings.part, len(splits.train.parts))
            if splits.preparation is not None and pair.sites is not None:
                rows = torch.from_numpy(np.flatnonzero(pair.sites == _own_part(site, _names(splits))))
            found[name] = (pair, rows)
    return {name: (pair, rows) for name, (pair, rows) in found.items() if len(rows)}


def _even_share(split: Split, part: int, parts: int) -> Tensor:
    """Every so many-th example; of items of queries, every so many-th query as a whole."""
    if split.queries is None:
        return torch.arange(part, len(split.y), parts)
    number = torch.unique(split.queries, return_inverse=True)[1]
    return torch.nonzero(number % parts == part).flatten()
