"""Which examples of the data that a site names are its own, and a look at them before the site takes part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedxl.config.experiment import Config, Table, check_data, with_files
from fedxl.data import NAMED
from fedxl.data.check import Findings
from fedxl.data.federation import Federation, Split, Splits
from fedxl.deploy.provision.settings import SiteFile, files_below
from fedxl.errors import printable, require

SPLITS = ("validation", "test")
MOST_NAMED = 10  # sites of a table in an error


def own_data(site: SiteFile) -> Table:
    """[data], with the files that its data set looks for by itself."""
    return files_below(site.folder, with_files(site.data))


def own_config(site: SiteFile) -> Config:
    """The data that a site's file names."""
    given = own_data(site)
    if given.get("name") in NAMED:
        given.setdefault("called", site.settings.name)  # its draws are those that it would make among all sites
    return Config(data=given, risk={}, algorithm={}, run={})


def check_site(site: SiteFile) -> Findings:
    """What is found in the data that this site would train and evaluate on. Nothing leaves the site."""
    findings, _ = check_data(own_config(site), lambda splits: _own_splits(site, splits))
    return findings


def _own_splits(site: SiteFile, splits: Splits) -> Splits:
    """The site's share of the data that its file names."""
    held: dict[str, Split | None] = dict.fromkeys(SPLITS)
    for name, (split, rows) in own_held_back(site, splits).items():
        queries = None if split.queries is None else split.queries[rows]
        held[name] = Split(split.x[rows], split.y[rows], np.zeros(len(rows), np.int64), queries=queries)
    train = Federation(splits.train.source, [own_rows(site, splits).numpy()])
    return splits._replace(train=train, validation=held["validation"], test=held["test"], names=(site.settings.name,))


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
    told = f"this site is called '{own}', and its table holds the sites {listed}; name it like one of them"
    require(own in names or len(names) == 1, told)
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
