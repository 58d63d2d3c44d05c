"""Prepares a million rows of 50 columns over 100 sites, beside what others take to read them.

python -m benchmarks.table    # beside pandas.read_csv, pyarrow's streaming reader and polars, some missing

fedxl reads the file, splits it by site, scales columns and fills gaps; the others only read it. Each measurement has
a process of its own, and all take turns: other work on the machine disturbs all alike. Medians of all turns are told.
Memory is what a process takes at its peak beyond what it took before. polars is measured if it is installed.
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
from importlib import import_module
from importlib.util import find_spec
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
    from fedxl.data.tables.roles import TableOptions
    from fedxl.data.tables.table import table

    splits = table(str(path), TableOptions(label="label", site="site"))
    every = [found.x for found in (splits.train, *splits.held_back.values())]
    return {"data": sum(x.numel() * x.element_size() for x in every) / 1e6, "sites": len(splits.train.parts)}


def pandas(path: Path) -> dict[str, float]:
    import pandas as pd

    frame = pd.read_csv(path)
    return {"data": float(frame.memory_usage().sum()) / 1e6}


def streamed(path: Path) -> dict[str, float]:
    """pyarrow's streaming reader into one array of single precision, as a plain program would do it."""
    from pyarrow import csv

    blocks = []
    for batch in csv.open_csv(path):
        columns = [column.to_numpy(zero_copy_only=False) for column in batch.columns]
        blocks.append(np.stack(columns, 1).astype(np.float32))
    return {"data": float(np.concatenate(blocks).nbytes) / 1e6}


def polars(path: Path) -> dict[str, float]:
    import polars as pl

    return {"data": float(pl.read_csv(path).estimated_size()) / 1e6}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def _measured(read: Callable[[Path], dict[str, float]], path: Path, tell: Any) -> None:
    # Libraries are loaded before the clock starts.
    for name in ("pandas", "pyarrow.csv", *(("polars",) if read is polars else ())):
        import_module(name)

    import fedxl.data.tables.table  # noqa: F401

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


def in_turns(path: Path, turns: int) -> dict[str, dict[str, float]]:
    """By reader: the medians of what it takes, and the seconds of its best turn."""
    readers = {"fedxl": ours, "pandas.read_csv": pandas, "pyarrow.csv.open_csv": streamed}
    readers |= {"polars.read_csv": polars} if find_spec("polars") else {}
    taken = [{name: measure(read, path) for name, read in readers.items()} for _ in range(turns)]
    found = {}
    for name in readers:
        each = [turn[name] for turn in taken]
        medians = {key: float(np.median([one[key] for one in each])) for key in each[0]}
        found[name] = {**medians, "best_seconds": min(one["seconds"] for one in each)}
    return found


def compare(path: Path, turns: int) -> dict[str, Any]:
    found = in_turns(path, turns)
    own = found["fedxl"]
    ratios = {
        name: {what: round(own[what] / each[what], 2) for what in ("seconds", "cpu_seconds", "megabytes")}
        for name, each in found.items()
        if name != "fedxl"
    }
    return {
        "file_megabytes": round(path.stat().st_size / 1e6, 1),
        **{name: {key: round(value, 2) for key, value in each.items()} for name, each in found.items()},
        "memory_over_data": round(own["megabytes"] / own["data"], 2),
        "fedxl_over": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=50)
    parser.add_argument("--sites", type=int, default=100)
    parser.add_argument("--missing", type=float, nargs="*", default=(0.0, 0.02), help="shares of missing values")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for missing in given.missing:
            path = Path(folder) / "rows.csv"
            write(path, given.rows, given.columns, given.sites, missing)
            print(json.dumps({"missing": missing, **compare(path, given.turns)}, indent=1), flush=True)


if __name__ == "__main__":
    main()
