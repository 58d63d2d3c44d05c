"""A site's look at its own data, before it takes part. Nothing leaves the site."""

from __future__ import annotations

import numpy as np

from fedxl.config.check import check_data
from fedxl.data.check import Findings
from fedxl.data.federation import Federation, Split, Splits
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.site import cache
from fedxl.deploy.site.own_part import own_held_back, own_rows


def check_site(site: SiteFile) -> Findings:
    """What is found in the data that this site would train and evaluate on."""
    findings, _ = check_data(cache.config_of(site), lambda splits: own(site, splits))
    return findings


def own(site: SiteFile, splits: Splits) -> Splits:
    """The site's share of the data that its file names."""
    part = own_rows(site, splits).numpy()
    held = own_held_back(site, splits)

    def taken(name: str) -> Split | None:
        if name not in held:
            return None
        split, rows = held[name]
        queries = None if split.queries is None else split.queries[rows]
        return Split(split.x[rows], split.y[rows], np.zeros(len(rows), np.int64), queries=queries)

    train = Federation(splits.train.source, [part])
    return splits._replace(
        train=train, validation=taken("validation"), test=taken("test"), names=(site.settings.name,)
    )
