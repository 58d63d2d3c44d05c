"""The demo with 0 to 4 of 16 clients hostile, every attack and defence: hostile.json, hostile.md and hostile.png.

python benchmarks/hostile.py [FOLDER]

About half an hour of one core. It resumes: runs that hostile.json holds are not run again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from common import machine

from fedxl.experiments.hostile import record, study


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    folder.mkdir(parents=True, exist_ok=True)
    runs = study.study(folder / "hostile.json", list(study.cases()))
    record.write(runs, folder, machine())
    print(f"hostile.json, hostile.md and hostile.png in {folder}")


if __name__ == "__main__":
    main()
