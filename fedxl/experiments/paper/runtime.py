"""The appendix's running times: rounds and seconds until training is near its best, and bytes per round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedxl.experiments.paper import pictures
from fedxl.experiments.paper.published import RUNTIME
from fedxl.experiments.paper.runs import RunRecord
from fedxl.experiments.paper.study import TABLE1, Study, machines
from fedxl.reporting.text import as_markdown, over_seeds

METRIC = "pauc@0.5"
NEAR = 0.01
EVERY = 4  # rounds between two evaluations on the training data


class NearBest(NamedTuple):
    """When a run's training metric was first within `NEAR` of its best."""

    rounds: int
    seconds: float  # of training, without evaluation
    best: float


def reached(history: Sequence[Mapping[str, Any]]) -> NearBest:
    """The first evaluation at which the metric was near its best.

    Seconds are those of training, without evaluation. The rounds before the first evaluation include the compiler's
    time, so they are counted at the pace of the later rounds.
    """
    values = [row["train"][METRIC] for row in history]
    found = next(i for i, value in enumerate(values) if value >= max(values) - NEAR)
    first, last = history[0], history[-1]
    rounds = last["round"] - first["round"]
    pace = (last["training_seconds"] - first["training_seconds"]) / rounds if rounds else float("nan")
    return NearBest(history[found]["round"], pace * history[found]["round"], max(values))


def run(study: Study) -> str:
    """Tune as for table 1, then run each federated method again and evaluate on the training data."""
    study.check_data()
    methods = [method for method in TABLE1.methods if not method.joint]
    tuned = study.tune(TABLE1, methods)
    pairs = [(task, method) for task in study.tasks for method in methods]
    watched: dict[str, Any] = {"train_metrics": True, "eval_every": EVERY}
    jobs = {(s.name, m.label): study.jobs(TABLE1, s, m, tuned[s.name, m.label].choice, **watched) for s, m in pairs}
    # One at a time, whatever --jobs says: these runs are timed.
    runs = study.perform(jobs, at_once=1)
    rows, content = [], []
    for (task, method), found in runs.items():
        fit = [record for record in found if not record.diverged]
        if fit:
            line, entry = _measured(task, method, fit)
            rows.append([study.titles[task], *line])
            content.append(entry)
    columns = ["data", "method", "rounds", "seconds", "the paper", "best", "down, MB", "up, MB"]
    parts = [
        "# Running time\n",
        f"Rounds of {study.budget.local_steps} local steps, and seconds of training, until partial AUC (FPR ≤ 0.5) "
        f"on the training data is within {NEAR} of its best in {study.budget.iterations:,} iterations, evaluated "
        f"every {EVERY} rounds; {over_seeds(study.seeds, 'mean')}. "
        "The paper: rounds (seconds on 16 machines with an A100 each). "
        "MB: what a client receives and sends in a round.\n",
        as_markdown(rows, columns),
        f"On {'; '.join(machines([record for group in runs.values() for record in group]))}.\n",
    ]
    text = "\n".join(parts)
    study.write("runtime", text, {**study.how(), "rows": content})
    curves = {
        s.title: {
            m.label: [_curve(record) for record in runs[s.name, m.label] if not record.diverged] for m in methods
        }
        for s in study.tasks
    }
    pictures.curves(study.folder / "runtime.png", curves, "round", "training partial AUC, FPR ≤ 0.5")
    return text


def _measured(task: str, method: str, records: Sequence[RunRecord]) -> tuple[list[str], dict[str, Any]]:
    found = [reached(record.content["history"]) for record in records]
    rounds, seconds, best = (float(np.mean(values)) for values in zip(*found, strict=True))
    traffic = records[0].content["traffic"]
    paper = RUNTIME.get(task, {}).get(method)
    line = [
        method,
        f"{rounds:.0f}",
        f"{seconds:.1f}",
        f"{paper.rounds} ({paper.seconds})" if paper else "",
        f"{best:.4f}",
        f"{traffic['down'] / 1e6:.2f}",
        f"{traffic['up'] / 1e6:.2f}",
    ]
    entry = {
        "data": task,
        "method": method,
        "runs": [one._asdict() for one in found],
        "traffic": traffic,
        "paper": paper and paper._asdict(),
        "keys": [record.key for record in records],
    }
    return line, entry


def _curve(record: RunRecord) -> pictures.Curve:
    return [(row["round"], row["train"][METRIC]) for row in record.content["history"]]
