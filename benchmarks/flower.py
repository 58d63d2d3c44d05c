"""What a round costs over Flower with a network of ResNet18's size: time, bytes against the payload, memory.

python benchmarks/flower.py [--sites 1] [--rounds 3]
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from fedxl import wire
from fedxl.algorithms import FeDXL2
from fedxl.algorithms.protocol import Share
from fedxl.cli.processes import free_port
from fedxl.config.experiment import Config
from fedxl.deploy.protocol.envelope import Envelope, TrainRequest
from fedxl.deploy.provision import folders
from fedxl.deploy.provision.settings import SiteFile, SiteSettings
from fedxl.deploy.site import cache
from fedxl.deploy.supervise.children import descendants
from fedxl.deploy.supervise.processes import local
from fedxl.models import resnet18, weights_of
from fedxl.risks import partial_auc
from fedxl.training.rounds import passive_like
from fedxl.training.run_folder import read_run


def request(steps: int, batch: int, precision: str) -> dict[str, float]:
    """MB of a request to a site, and how much of it are the pooled scores that the site reads."""
    algorithm = FeDXL2(partial_auc())
    server, phase = algorithm.init(weights_of(resnet18((3, 32, 32)))), algorithm.phase(1)
    one = torch.zeros(())
    passive = passive_like(phase, server, algorithm.reading(batch, batch), steps)
    sent = wire.flatten(TrainRequest(phase.downlink(server), Share(one, one, one, one, one), passive), precision)
    whole = Envelope({}, sent).size
    pool = sum(t.numel() * t.element_size() for name, t in sent.items() if name.startswith("passive"))
    return {"MB": whole / 1e6, "pool MB": pool / 1e6, "pool share": pool / whole}


def opening(examples: int = 24_000) -> dict[str, float]:
    """Seconds to prepare a site's data, images of CIFAR's size in an .npz file, and to open them once they are."""
    with tempfile.TemporaryDirectory() as folder:
        rng, place = np.random.default_rng(0), Path(folder)
        x = rng.integers(0, 256, (examples, 3, 32, 32), dtype=np.uint8)
        np.savez(place / "data.npz", x=x, y=rng.integers(0, 2, examples), client=np.zeros(examples, int))
        site = SiteFile(SiteSettings(name="a"), {"name": "npz", "path": str(place / "data.npz")}, place)
        seconds = {}
        opens = cache.training_data
        for name, work in {"prepare": cache.prepare, "open": opens, "open again": opens}.items():
            began = time.perf_counter()
            work(site)
            seconds[name] = round(time.perf_counter() - began, 4)
    return seconds


def resident(program: str) -> float:
    """MB of memory that processes of ours hold whose command line names this program; the largest of them."""
    largest = 0
    for pid in descendants(os.getpid()):
        try:
            if program in Path(f"/proc/{pid}/cmdline").read_text():
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                largest = max([largest, *(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))])
        except OSError:
            continue
    return largest / 1e3


def rounds(sites: int, count: int, steps: int) -> dict[str, object]:
    """Seconds per round, over real processes on this machine."""
    names = [f"site{number}" for number in range(sites)]
    config = Config(
        data={"name": "digits", "clients": sites, "one_class": 0},
        model={"name": "mlp", "hidden": [3300, 3300]},  # 11.1 million weights, as ResNet18
        risk={"name": "pauc"},
        algorithm={"name": "fedxl2", "lr": 0.01},
        run={"rounds": count, "local_steps": steps, "batch1": 4, "batch2": 4, "eval_every": 1},
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "federation"
        folders.init(names, place, port=free_port(), config=config)
        seen: list[float] = []
        memory = dict.fromkeys(("superlink", "gateway", "app", "node"), 0.0)

        def watch(run: Path) -> None:
            done = len(read_run(run).rows)
            seen.extend([time.monotonic()] * (done - len(seen)))
            for program in memory:
                memory[program] = max(memory[program], resident(f"fedxl.deploy\0{program}\0"))

        local(place, print, watch)
    gaps = [after - before for before, after in itertools.pairwise(seen)]
    largest = {f"{program}, MB": round(size) for program, size in memory.items()}
    return {"sites": sites, "seconds a round": [round(gap, 1) for gap in gaps], **largest}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for precision in wire.PRECISIONS:
        print(f"a request, ResNet18, K = 32, B = 32, {precision}:", request(32, 32, precision))
    print("24,000 images at a site, seconds:", opening())
    print(rounds(arguments.sites, arguments.rounds, steps=1))


if __name__ == "__main__":
    main()
