"""The appendix's running times: rounds and seconds until training is near its best, and bytes per round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedxl.reporting.text import as_markdown, over_seeds
from fedxl.training.result import Result
from studies import pictures
from studies.harness import Outcome, Row, group, machines
from studies.paper.published import RUNTIME
from studies.paper.setup import title_of
from studies.paper.study import Comparison, Study

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


def pace(result: Result) -> Outcome:
    """When a run was near its best, its bytes per round, and beside the row its training metric by round."""
    found = {"reached": reached(result.history)._asdict(), "traffic": result.traffic and result.traffic._asdict()}
    curve = {"round": [row["round"] for row in result.history], "train": [r["train"][METRIC] for r in result.history]}
    return found, {name: np.array(values, float) for name, values in curve.items()}


def run(study: Study, comparison: Comparison) -> str:
    """Tune as for table 1, then run each federated method again and evaluate on the training data."""
    study.check_data()
    methods = [method for method in comparison.methods if not method.joint]
    tuned = study.tune(comparison, methods)
    planned = [
        run
        for task in study.tasks
        for method in methods
        for run in study.runs(
            comparison, task, method, tuned[task.name, method.label], train_metrics=True, eval_every=EVERY
        )
    ]
    rows = study.do(planned, jobs=1)  # one at a time, whatever --jobs says: these runs are timed
    study.keep("runtime", tuned, rows)
    draw(study, rows)
    return markdown(rows, study.budget.local_steps)


def markdown(rows: Sequence[Row], local_steps: int) -> str:
    found = [row for row in rows if not row.case.get("trial") and not row.diverged]
    cells = group(found, "data", "network", "method")
    table = [[title_of(own[0].case), *_line(own)] for own in cells.values()]
    parts = [
        "# Running time\n",
        f"Rounds of {local_steps} local steps, and seconds of training, until partial AUC (FPR ≤ 0.5) "
        f"on the training data is within {NEAR} of its best in {found[0].case['iterations']:,} iterations, evaluated "
        f"every {EVERY} rounds; {over_seeds(len(next(iter(cells.values()))), 'mean')}. "
        "The paper: rounds (seconds on 16 machines with an A100 each). "
        "MB: what a client receives and sends in a round.\n",
        as_markdown(table, ["data", "method", "rounds", "seconds", "the paper", "best", "down, MB", "up, MB"]),
        f"On {machines(found)}.\n",
    ]
    return "\n".join(parts)


def _line(rows: Sequence[Row]) -> list[str]:
    case, traffic = rows[0].case, rows[0].found["traffic"]
    rounds, seconds, best = (np.mean([row.found["reached"][name] for row in rows]) for name in NearBest._fields)
    paper = RUNTIME.get(case["data"], {}).get(case["method"])
    return [
        case["method"],
        f"{rounds:.0f}",
        f"{seconds:.1f}",
        f"{paper.rounds} ({paper.seconds})" if paper else "",
        f"{best:.4f}",
        f"{traffic['down'] / 1e6:.2f}",
        f"{traffic['up'] / 1e6:.2f}",
    ]


def draw(study: Study, rows: Sequence[Row]) -> None:
    """The training metric against rounds: the mean over seeds."""
    panels = []
    for own in group([row for row in rows if not row.diverged], "data", "network").values():
        lines = {}
        for name, runs in group(own, "method").items():
            found = [study.do.arrays(row) for row in runs]
            points = zip(found[0]["round"], np.mean([each["train"] for each in found], 0), strict=True)
            lines[name] = [pictures.Point(x, mean) for x, mean in points]
        panels.append(pictures.Panel(title_of(own[0].case), "round", "training partial AUC, FPR ≤ 0.5", lines))
    pictures.lines(study.folder / "runtime.png", "Running time", panels, across=4)
