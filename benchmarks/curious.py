"""What a curious server and a curious site find out on the demo, and what it costs to prevent it.

python benchmarks/curious.py [FOLDER]

It writes curious.json, curious.md and curious.png: about four minutes of one core. It resumes: runs that curious.json
holds are not run again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from common import machine

from fedxl.experiments.curious import record, study


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    folder.mkdir(parents=True, exist_ok=True)
    found = study.study(folder / "curious.json")
    record.write(found, folder, machine())
    print(f"curious.json, curious.md and curious.png in {folder}")


if __name__ == "__main__":
    main()
