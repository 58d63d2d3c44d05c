"""AUROC against epsilon on the demo's images, and a membership attack: privacy.json, privacy.md and privacy.png.

python benchmarks/privacy.py [FOLDER]

About four minutes of one core. It resumes: runs that privacy.json holds are not run again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from common import machine

from fedxl.experiments.privacy import record, study


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    folder.mkdir(parents=True, exist_ok=True)
    found = study.study(folder / "privacy.json")
    record.write(found["runs"], found["attacks"], folder, machine())
    print(f"privacy.json, privacy.md and privacy.png in {folder}")


if __name__ == "__main__":
    main()
