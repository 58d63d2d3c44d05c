"""The appendix's ablations: FeDXL2 with different numbers of local steps, and with fewer sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedxl.config.experiment import Table
from fedxl.reporting.text import as_markdown, over_seeds
from fedxl.training.result import Result
from studies import pictures
from studies.harness import Outcome, Row, cell, group, machines
from studies.paper.setup import FPRS, title_of
from studies.paper.study import OURS, Comparison, Study, column_named

EVALUATIONS = 40  # on validation data in one run


@dataclass(frozen=True)
class Ablation:
    name: str
    about: str
    title: str
    letter: str
    values: Sequence[int]
    data: str = ""  # the setting of the data that it varies; empty: the local steps of the run


VARY_K = Ablation(
    "ablation-k", "FeDXL2 with different numbers of local steps.", "N fixed, K varied", "K", (1, 8, 32, 128)
)
# Each site holds a sixteenth of the data, so fewer sites have fewer examples.
VARY_N = Ablation("ablation-n", "FeDXL2 with fewer sites.", "K fixed, N varied", "N", (1, 4, 8, 16), data="present")


def curves(result: Result) -> Outcome:
    """Validation partial AUC by iteration, which is drawn and not recorded."""
    history = result.history
    arrays = {
        f"pauc@{limit:g}": np.array([row["validation"][f"pauc@{limit:g}"] for row in history]) for limit in FPRS
    }
    return {}, {"steps": np.array([row["steps"] for row in history], float), **arrays}


def run(study: Study, comparison: Comparison, ablation: Ablation) -> str:
    """Run FeDXL2, tuned as for table 1, with each value. Returns the text to print."""
    study.check_data()
    method = column_named(comparison, OURS)
    tuned = study.tune(comparison, [method])
    planned = []
    for task in study.tasks:
        for value in ablation.values:
            data: Table = {ablation.data: value} if ablation.data else {}
            steps = study.budget.local_steps if ablation.data else value
            every = max(1, study.budget.iterations // steps // EVALUATIONS)
            planned += study.runs(
                comparison, task, method, tuned[task.name, OURS], data=data, case={ablation.letter: value},
                local_steps=steps, eval_every=every,
            )  # fmt: skip
    rows = study.do(planned)
    study.keep(ablation.name, tuned, rows)
    draw(study, ablation, rows)
    return markdown(ablation, rows)


def markdown(ablation: Ablation, rows: Sequence[Row]) -> str:
    found = [row for row in rows if not row.case.get("trial")]
    cells = group(found, "data", "network", ablation.letter)
    table = [
        [title_of(own[0].case), str(value), *(cell(own, f"pauc@{limit:g}") for limit in FPRS)]
        for (_, _, value), own in cells.items()
    ]
    seeds = len(next(iter(cells.values())))
    return "\n".join(
        [
            f"# {ablation.title}\n",
            f"FeDXL2, {found[0].case['iterations']:,} iterations; test partial AUC, {over_seeds(seeds)}.\n",
            as_markdown(table, ["data", ablation.letter, *(f"FPR ≤ {limit:g}" for limit in FPRS)]),
            f"On {machines(found)}.\n",
        ]
    )


def draw(study: Study, ablation: Ablation, rows: Sequence[Row]) -> None:
    """Validation partial AUC against iterations, one line per value: the mean over seeds."""
    panels = []
    for own in group(rows, "data", "network").values():
        for limit in FPRS:
            lines = {}
            for value, runs in group(own, ablation.letter).items():
                found = [study.do.arrays(row) for row in runs if not row.diverged]
                if found:
                    means = np.mean([each[f"pauc@{limit:g}"] for each in found], 0)
                    points = zip(found[0]["steps"], means, strict=True)
                    lines[f"{ablation.letter} = {value}"] = [pictures.Point(x, mean) for x, mean in points]
            title = f"{title_of(own[0].case)}, FPR ≤ {limit:g}"
            panels.append(pictures.Panel(title, "iteration", "validation partial AUC", lines))
    pictures.lines(study.folder / f"{ablation.name}.png", ablation.title, panels)
