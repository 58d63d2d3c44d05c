"""Tables for tests: four sites that differ; categories, missing values, booleans, patients of several rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

SITES = ("a", "b", "c", "d")


def frame(rows: int = 240, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    site = rng.choice(SITES, rows, p=[0.4, 0.3, 0.2, 0.1])
    sick = rng.random(rows) < 0.3
    shift = np.array([SITES.index(name) for name in site])
    table = {
        "age": np.round(rng.normal(50 + 5 * shift, 10) + 8 * sick, 1),
        "dose": np.where(rng.random(rows) < 0.2, np.nan, rng.normal(1e6, 1e-1, rows) + sick),
        "smoker": rng.random(rows) < 0.5,
        "ward": rng.choice(["icu", "er", "ward 1"], rows, p=[0.2, 0.3, 0.5]),
        "sick": np.where(sick, "yes", "no"),
        "site": site,
        "patient": [f"{name}{number}" for name, number in zip(site, rng.integers(0, rows // 2, rows), strict=True)],
    }
    return pd.DataFrame(table)


def write_sites(folder: Path, table: pd.DataFrame, **changes: Any) -> list[str]:
    """One CSV file for each site, without the column of sites."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in SITES:
        path = folder / f"{name}.csv"
        table[table.site == name].drop(columns="site").to_csv(path, index=False, **changes)
        paths.append(str(path))
    return paths
