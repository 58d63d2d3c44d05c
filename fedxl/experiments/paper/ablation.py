"""The appendix's ablations: FeDXL2 with different numbers of local steps, and with fewer sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedxl.config.experiment import Table
from fedxl.experiments.paper import pictures
from fedxl.experiments.paper.runs import PlannedRun, RunRecord
from fedxl.experiments.paper.setup import FPRS
from fedxl.experiments.paper.study import OURS, TABLE1, Study, column_named, machines, outline
from fedxl.reporting.text import as_markdown, mean_with_spread, over_seeds

Runs = Mapping[tuple[str, int], Sequence[RunRecord]]  # by data set and value: one run record per seed
EVALUATIONS = 40  # on validation data in one run


@dataclass(frozen=True)
class Ablation:
    name: str
    title: str
    letter: str
    values: Sequence[int]
    data: str = ""  # the setting of the data that it varies,
    run: str = ""  # or the setting of the run


VARY_K = Ablation("ablation-k", "N fixed, K varied", "K", (1, 8, 32, 128), run="local_steps")
# Each site holds a sixteenth of the data, so fewer sites have fewer examples.
VARY_N = Ablation("ablation-n", "K fixed, N varied", "N", (1, 4, 8, 16), data="present")


def run(study: Study, ablation: Ablation) -> str:
    """Run FeDXL2, tuned as for table 1, with each value. Returns the text to print."""
    study.check_data()
    method = column_named(TABLE1, OURS)
    tuned = study.tune(TABLE1, [method])
    jobs: dict[tuple[str, int], list[PlannedRun]] = {}
    for task in study.tasks:
        for value in ablation.values:
            data: Table = {ablation.data: value} if ablation.data else {}
            steps = value if ablation.run == "local_steps" else study.budget.local_steps
            eval_every = max(1, study.budget.iterations // steps // EVALUATIONS)
            choice = tuned[task.name, OURS].choice
            jobs[task.name, value] = study.jobs(
                TABLE1, task, method, choice, data, local_steps=steps, eval_every=eval_every
            )
    runs = study.perform(jobs)
    text = _markdown(study, ablation, runs)
    study.write(ablation.name, text, {**study.how(), "varied": ablation.letter, "rows": _content(runs)})
    panels = {
        f"{task.title}, FPR ≤ {limit:g}": {
            f"{ablation.letter} = {value}": [_curve(record, limit) for record in runs[task.name, value]]
            for value in ablation.values
        }
        for task in study.tasks
        for limit in FPRS
    }
    pictures.curves(study.folder / f"{ablation.name}.png", panels, "iteration", "validation partial AUC")
    return text


def _markdown(study: Study, ablation: Ablation, runs: Runs) -> str:
    rows = [
        [
            study.titles[task],
            str(value),
            *(mean_with_spread([record.test(f"pauc@{limit:g}") for record in found]) for limit in FPRS),
        ]
        for (task, value), found in runs.items()
    ]
    return "\n".join(
        [
            f"# {ablation.title}\n",
            f"FeDXL2, {study.budget.iterations:,} iterations; test partial AUC, {over_seeds(study.seeds)}.\n",
            as_markdown(rows, ["data", ablation.letter, *(f"FPR ≤ {limit:g}" for limit in FPRS)]),
            f"On {'; '.join(machines([record for found in runs.values() for record in found]))}.\n",
        ]
    )


def _content(runs: Runs) -> list[dict[str, Any]]:
    return [
        {"data": task, "value": value, "runs": [outline(record) for record in found]}
        for (task, value), found in runs.items()
    ]


def _curve(record: RunRecord, limit: float) -> pictures.Curve:
    rows = record.content.get("history", [])
    return [(row["steps"], row["validation"][f"pauc@{limit:g}"]) for row in rows]
