"""The paper's table of sample complexities, measured: complexity.json, complexity.md and complexity.png.

python benchmarks/complexity.py [FOLDER]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from common import machine

from fedxl.experiments.theory import complexity, complexity_record

ROUNDS = 64


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    curves = []
    for method in complexity.METHODS:
        began = time.process_time()
        curves.append(complexity.curve(method, ROUNDS, lambda line: print(line, file=sys.stderr)))
        print(f"{method.name}: {time.process_time() - began:.0f} s")
    facts = {"processor time": f"{time.process_time():.0f} s", "on": machine()}
    complexity_record.write(curves, folder, facts)
    print(f"complexity.json, complexity.md and complexity.png in {folder}")


if __name__ == "__main__":
    main()
