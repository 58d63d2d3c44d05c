"""Two checkouts on one GPU, row by row in turns: is one slower than the other?

python benchmarks/compare.py BEFORE AFTER [--out compare.json] [--case "resnet18 7x7, fedxl2, graph" ...]

Each row of each checkout is a process of its own. All compile side by side. Then they capture their steps one at a
time, and are timed one at a time, before and after in turns: what else the machine does falls on both. By the times
in docs/performance.md its six rows take five minutes: two to compile, one and a half to capture, one to time.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS = (
    "resnet18 7x7, fedxl2, graph",
    "resnet18 7x7, local_sgd, graph",
    "resnet18 3x3, fedxl2, graph",
    "resnet18 3x3, local_sgd, graph",
    "fedavg, graph, bf16",
    "densenet121, fedxl2, graph",
)
PAUSE = 0.05


def work(checkout: Path, case: str, name: str, parties: int, patience: float, folder: Path) -> None:
    """One row of one checkout: compile, wait for the others, capture, and time whenever it is its turn."""
    sys.path[:0] = [str(checkout), str(checkout / "benchmarks")]
    import gpu  # of that checkout, as what it times

    bench = gpu.bench
    assert Path(bench.__file__).is_relative_to(checkout), f"{bench.__file__} is not of {checkout}"
    measured, lock = bench.timed, (folder / "lock").open("w")

    def begin() -> None:
        (folder / f"ready-{name}").touch()
        deadline = time.monotonic() + patience
        while len(list(folder.glob("ready-*"))) < parties and time.monotonic() < deadline:
            time.sleep(PAUSE)
        fcntl.flock(lock, fcntl.LOCK_EX)  # which a process may ask for again

    def timed(job: Any, rounds: int, warm_up: int = 2) -> float:
        (folder / f"captured-{name}").touch()
        fcntl.flock(lock, fcntl.LOCK_UN)
        seconds, number = [], 0
        while not (folder / "end").exists():
            if not (folder / f"turn-{name}-{number}").exists():
                time.sleep(PAUSE)
                continue
            seconds.append(measured(job, rounds, warm_up))
            write(folder / f"done-{name}-{number}", seconds[-1])
            number += 1
        return statistics.median(seconds)

    bench.timed = timed
    try:
        found: dict[str, Any] = gpu.cases()[case](begin)
    except Exception as error:  # one that fails must not hold up the others
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    (folder / f"ready-{name}").touch()
    write(folder / f"result-{name}", found)


def write(path: Path, value: Any) -> None:
    """Whole, or not at all: another process waits for the file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


def take_turn(process: subprocess.Popen[bytes], name: str, number: int, folder: Path) -> float | None:
    """Seconds per round, or None: the process has failed."""
    (folder / f"turn-{name}-{number}").touch()
    done = folder / f"done-{name}-{number}"
    while not done.exists():
        if process.poll() is not None or (folder / f"result-{name}").exists():
            return None
        time.sleep(PAUSE)
    return float(json.loads(done.read_text()))


def compare(
    checkouts: list[Path], cases: list[str], turns: int, patience: float, folder: Path
) -> list[dict[str, Any]]:
    names = {(i, case): f"{i}{k}" for i in (0, 1) for k, case in enumerate(cases)}
    processes = {}
    for (i, case), name in names.items():
        options = [str(checkouts[i]), case, name, str(len(names)), str(patience), str(folder)]
        environment = {**os.environ, "PYTHONPATH": str(checkouts[i])}
        processes[name] = subprocess.Popen([sys.executable, __file__, "--worker", *options], env=environment)
    for name, process in processes.items():  # or one would capture while another is timed
        found = [folder / f"{what}-{name}" for what in ("captured", "result")]
        while process.poll() is None and not any(path.exists() for path in found):
            time.sleep(PAUSE)
    rows = []
    for case in cases:
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(turns):
            for i in (0, 1) if number % 2 == 0 else (1, 0):
                name = names[i, case]
                found = take_turn(processes[name], name, number, folder)
                seconds[i].extend([] if found is None else [found])
        rows.append(row(case, *seconds))
        print(rows[-1], flush=True)
    (folder / "end").touch()
    for process in processes.values():
        process.wait()
    for shown, case in zip(rows, cases, strict=True):
        shown["results"] = [json.loads((folder / f"result-{names[i, case]}").read_text()) for i in (0, 1)]
    return rows


def row(case: str, before: list[float], after: list[float]) -> dict[str, Any]:
    """Milliseconds per round, the median and its spread, and what the second takes of the first."""
    shown: dict[str, Any] = {"case": case}
    for name, seconds in (("before", before), ("after", after)):
        if seconds:
            shown[name] = round(1000 * statistics.median(seconds), 3)
            shown[f"{name} spread"] = round((max(seconds) - min(seconds)) / statistics.median(seconds), 4)
    if before and after:
        shown["ratio"] = round(statistics.median(after) / statistics.median(before), 4)
    return shown


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        checkout, case, name, parties, patience, folder = sys.argv[2:]
        work(Path(checkout), case, name, int(parties), float(patience), Path(folder))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", nargs=2, type=Path, help="before and after")
    parser.add_argument(
        "--case", action="append", help="a row of benchmarks/gpu.py by its whole name; six by default"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--patience", type=float, default=200, help="seconds to wait until all have been compiled")
    parser.add_argument("--out", type=Path, default=Path("compare.json"))
    arguments = parser.parse_args()
    checkouts = [path.resolve() for path in arguments.checkouts]
    with tempfile.TemporaryDirectory() as folder:
        cases = arguments.case or list(ROWS)
        rows = compare(checkouts, cases, arguments.turns, arguments.patience, Path(folder))
    arguments.out.write_text(json.dumps(rows, indent=2) + "\n")
    for shown in rows:
        before, after, ratio = (shown.get(name, "-") for name in ("before", "after", "ratio"))
        print(f"{shown['case']:34} {before:>9} {after:>9} {ratio:>7}")


if __name__ == "__main__":
    main()
