"""The appendix' running times: rounds and seconds until training has come near its best, and bytes on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedxl.experiments.paper import pictures
from fedxl.experiments.paper.published import RUNTIME
from fedxl.experiments.paper.runs import Record
from fedxl.experiments.paper.study import TABLE1, Study, machines
from fedxl.reporting.report import as_markdown, over_seeds

METRIC = "pauc@0.5"
NEAR = 0.01
EVERY = 4  # rounds, between two looks at the training data


class Reached(NamedTuple):
    """When a run's training metric was first within `NEAR` of its best."""

    rounds: int
    seconds: float  # of training alone
    best: float


def reached(history: Sequence[Mapping[str, Any]]) -> Reached:
    """The first look at which the metric was near its best.

    S2Scores are those of training, without the looks themselves. What comes before the first look holds the time that
    a compiler takes once, so its rounds are counted at the pace of the later ones.
    """
    values = [record["train"][METRIC] for record in history]
    found = next(i for i, value in enumerate(values) if value >= max(values) - NEAR)
    first, last = history[0], history[-1]
    rounds = last["round"] - first["round"]
    pace = (last["training_seconds"] - first["training_seconds"]) / rounds if rounds else float("nan")
    return Reached(history[found]["round"], pace * history[found]["round"], max(values))


def run(study: Study) -> str:
    """Tune as for table 1, then run each federated method once more with an eye on the training data."""
    study.check_data()
    methods = [method for method in TABLE1.methods if not method.joint]
    tuned = study.tune(TABLE1, methods)
    pairs = [(subject, method) for subject in study.subjects for method in methods]
    watched: dict[str, Any] = {"train_metrics": True, "eval_every": EVERY}
    jobs = {(s.name, m.label): study.jobs(TABLE1, s, m, tuned[s.name, m.label].choice, **watched) for s, m in pairs}
    # One at a time, whatever else may be done side by side: they are timed.
    runs = study.perform(jobs, at_once=1)
    rows, content = [], []
    for (subject, method), found in runs.items():
        fit = [record for record in found if not record.diverged]
        if fit:
            line, entry = _measured(subject, method, fit)
            rows.append([study.titles[subject], *line])
            content.append(entry)
    columns = ["data", "method", "rounds", "seconds", "the paper", "best", "down, MB", "up, MB"]
    parts = [
        "# Running time\n",
        f"Rounds of {study.budget.local_steps} local steps, and seconds of training, until partial AUC (FPR ≤ 0.5) "
        f"on the training data is within {NEAR} of its best in {study.budget.iterations:,} iterations, looked at "
        f"every {EVERY} rounds; {over_seeds(study.seeds, 'mean')}. "
        "The paper: rounds (seconds on 16 machines with an A100 each). "
        "MB are those that a client receives and sends in a round.\n",
        as_markdown(rows, columns),
        f"On {'; '.join(machines([record for group in runs.values() for record in group]))}.\n",
    ]
    text = "\n".join(parts)
    study.write("runtime", text, {**study.how(), "rows": content})
    curves = {
        s.title: {
            m.label: [_curve(record) for record in runs[s.name, m.label] if not record.diverged] for m in methods
        }
        for s in study.subjects
    }
    pictures.curves(study.folder / "runtime.png", curves, "round", "training partial AUC, FPR ≤ 0.5")
    return text


def _measured(subject: str, method: str, records: Sequence[Record]) -> tuple[list[str], dict[str, Any]]:
    found = [reached(record.content["history"]) for record in records]
    rounds, seconds, best = (float(np.mean(values)) for values in zip(*found, strict=True))
    traffic = records[0].content["traffic"]
    paper = RUNTIME.get(subject, {}).get(method)
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
        "data": subject,
        "method": method,
        "runs": [one._asdict() for one in found],
        "traffic": traffic,
        "paper": paper and paper._asdict(),
        "keys": [record.key for record in records],
    }
    return line, entry


def _curve(record: Record) -> pictures.Curve:
    return [(look["round"], look["train"][METRIC]) for look in record.content["history"]]
