"""Prepares a million rows of 50 columns over 100 sites, beside pandas.read_csv: python -m benchmarks.table

Each measurement has a process of its own, and both take turns: other work on the machine disturbs both alike. Medians
of all turns are told. Memory is what a process takes at its peak beyond what it took before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 50_000


def write(path: Path, rows: int, columns: int, sites: int, missing: float) -> None:
    """Random numbers of about six digits, a share of them missing; label and site come on top of the columns."""
    import pyarrow as pa
    from pyarrow import csv

    rng = np.random.default_rng(0)
    names = [f"x{number}" for number in range(columns)]
    writer = None
    for start in range(0, rows, CHUNK):
        count = min(CHUNK, rows - start)
        label = rng.random(count) < 0.1
        table: dict[str, Any] = {"label": label.astype(np.int8), "site": rng.integers(sites, size=count)}
        for at, name in enumerate(names):
            values = np.round(rng.normal(at, 1 + at, count) + label, 4)
            table[name] = pa.array(values, mask=rng.random(count) < missing)
        batch = pa.table(table)
        writer = writer or csv.CSVWriter(path, batch.schema)
        writer.write(batch)
    assert writer is not None
    writer.close()


def ours(path: Path) -> dict[str, float]:
    from fedxl.data.table import TableOptions, table

    splits = table(str(path), "label", TableOptions(site="site"))
    held = [split for split in (splits.validation, splits.test) if split is not None]
    every = [splits.train.source.x, *(split.x for split in held)]  # type: ignore[attr-defined]
    return {"data": sum(x.numel() * x.element_size() for x in every) / 1e6, "sites": len(splits.train.parts)}


def pandas(path: Path) -> dict[str, float]:
    import pandas as pd

    frame = pd.read_csv(path)
    return {"data": float(frame.memory_usage().sum()) / 1e6}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def _measured(read: Callable[[Path], dict[str, float]], path: Path, tell: Any) -> None:
    # Libraries are loaded before the clock starts.
    import pandas as _  # noqa: F401
    import pyarrow.csv  # noqa: F401

    import fedxl.data.table  # noqa: F401

    before, start, working = _peak(), time.perf_counter(), time.process_time()
    found = read(path)
    times = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - working}
    tell.send({**times, "megabytes": _peak() - before, **found})


def measure(read: Callable[[Path], dict[str, float]], path: Path) -> dict[str, float]:
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_measured, args=(read, path, there))
    process.start()
    there.close()  # or a process that fails would be waited for
    found: dict[str, float] = here.recv()
    process.join()
    return found


def in_turns(path: Path, turns: int) -> list[dict[str, float]]:
    """The medians of what the two take, and the seconds of the best turn of each."""
    taken = [[measure(read, path) for read in (ours, pandas)] for _ in range(turns)]
    found = []
    for one in zip(*taken, strict=True):
        medians = {key: float(np.median([each[key] for each in one])) for key in one[0]}
        found.append({**medians, "best_seconds": min(each["seconds"] for each in one)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=50)
    parser.add_argument("--sites", type=int, default=100)
    parser.add_argument("--missing", type=float, default=0.0, help="share of missing values")
    parser.add_argument("--file", type=Path, help="where the CSV file is, or is written and left")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.file or Path(folder) / "million.csv"
        if not path.exists():
            write(path, given.rows, given.columns, given.sites, given.missing)
        fedxl, other = in_turns(path, given.turns)
        size = path.stat().st_size / 1e6
        found = {
            "file_megabytes": round(size, 1),
            "fedxl": {key: round(value, 2) for key, value in fedxl.items()},
            "pandas.read_csv": {key: round(value, 2) for key, value in other.items()},
            "memory_over_data": round(fedxl["megabytes"] / fedxl["data"], 2),
            "memory_over_file": round(fedxl["megabytes"] / size, 2),
            "times_faster_than_pandas": round(other["seconds"] / fedxl["seconds"], 2),
            "cpu_over_pandas": round(fedxl["cpu_seconds"] / other["cpu_seconds"], 2),
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
