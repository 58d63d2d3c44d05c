"""Defaults and the demo as they were when the records in docs/results were made, so that their commands give them.

Since version 0.4 even levels hold G, Local Pair has them, and the demo tunes nothing but learning rates.
"""

from __future__ import annotations

from dataclasses import replace

from fedxl.config.experiment import Config, Table
from fedxl.experiments import demo
from fedxl.experiments.demo import Entry

EVEN: Table = {"level": "even", "hold": 0.0}
DEMO: Table = {"name": "fedxl2", "level": "free", "lr": 0.3, "weight_decay": 1e-3, "gamma": 0.1}
LOCAL_PAIR: Table = {"name": "local_pair", "level": "free", "lr": 3.0, "weight_decay": 1e-3, "gamma": 0.1}
# The demo's, by sixteen trials for each algorithm on validation data.
ENTRIES = {
    "FeDXL2": Entry("FeDXL2", DEMO, {"lam": 0.5}),
    "Local SGD": Entry("Local SGD", {"name": "local_sgd", "lr": 0.3, "weight_decay": 0.0}),
    "Local Pair": Entry("Local Pair", LOCAL_PAIR, {"lam": 1.0}),
    "CODASCA": Entry("CODASCA", {"name": "codasca", "lr": 1.0, "weight_decay": 1e-4}),
}
FEDXL2 = ENTRIES["FeDXL2"]


def experiment(entry: Entry, seed: int) -> Config:
    """A run of the demo with rounds of 16 steps."""
    config = demo.experiment(entry, seed)
    return replace(config, run={**config.run, "rounds": 40, "local_steps": 16, "eval_every": 2})
