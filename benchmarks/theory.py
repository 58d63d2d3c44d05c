"""The theorems' rates, measured on a small problem: theory.json, theory.md and theory.png.

python benchmarks/theory.py [FOLDER]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from common import machine

from fedxl.experiments.theory import measure, record


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    panels = {}
    for name, measured in measure.PANELS.items():
        began = time.process_time()
        panels[name] = measured(lambda line, name=name: print(f"{name}: {line}", file=sys.stderr))
        print(f"{name}: {time.process_time() - began:.0f} s")
    facts = {"processor time": f"{time.process_time():.0f} s", "on": machine()}
    record.write(panels, folder, facts)
    print(f"theory.json, theory.md and theory.png in {folder}")


if __name__ == "__main__":
    main()
