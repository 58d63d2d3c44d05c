"""The 14 findings of ChestX-ray14 in one run, against runs of one label. It needs chestmnist.npz, or a like file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from fedxl.config.experiment import Config, Table
from fedxl.data.sets.published import CHEST
from fedxl.errors import require, unknown
from fedxl.reporting.plots import require_matplotlib
from fedxl.reporting.text import as_markdown
from fedxl.training.result import Result
from studies import harness, recorded
from studies.harness import Harness, Outcome, Planned, Row, group, machines, train
from studies.options import OUT, Folder, Jobs, Seeds, check, finish

LONGER = 2  # times the rounds, for one more run of all labels
EVEN, FIRST = (28, 28), (48, 8)  # examples per step: as many of either side, or most of S1
RATES = {True: (10.0, 30.0, 100.0, 300.0, 1000.0), False: (1.0, 3.0, 10.0, 30.0, 100.0)}  # of 14 labels, of one
TUNED_LABEL = "effusion"  # chooses the rate of all runs of one label
TUNING_SEED = 100
LABELS = ("effusion", "cardiomegaly", "mass")  # that have runs of their own


class Kind(NamedTuple):
    """A column of the table."""

    several: bool  # 14 labels in one run
    batch: tuple[int, int] = EVEN
    longer: int = 1  # times the rounds
    known: float = 1.0  # of its labels to each site

    @property
    def tuned_as(self) -> tuple[bool, tuple[int, int]]:
        """Runs of one label have both batches, so that what the batch does is told apart from the labels."""
        return self.several, self.batch


KINDS = {
    "14 labels in one run": Kind(True),
    "48 + 8": Kind(True, FIRST),
    f"{LONGER} times the rounds": Kind(True, longer=LONGER),
    "half known": Kind(True, known=0.5),
    "its own run": Kind(False),
    "its own run, 48 + 8": Kind(False, FIRST),
}
ALL, OWN, LONG = "14 labels in one run", "its own run", f"{LONGER} times the rounds"


def plan(kind: str, label: str, rate: float, seed: int, rounds: int, data: Table, trial: bool = False) -> Planned:
    """A run of all labels, or of one."""
    made = KINDS[kind]
    risk: Table = {"name": "auroc", "scores": "sigmoid", **({"labels": list(CHEST)} if made.several else {})}
    config = Config(
        data={
            "name": "medmnist", **data, "label": "all" if made.several else label, "clients": 8,
            **({"known": made.known} if made.known < 1 else {}),
        },
        model={"name": "cnn", "channels": 8, "norm": "group"},
        risk=risk,
        algorithm={"name": "fedxl2", **recorded.EVEN, "lr": rate},
        run={
            "rounds": rounds * made.longer, "local_steps": 8, "batch1": made.batch[0], "batch2": made.batch[1],
            "eval_every": 5, "seed": seed,
        },
    )  # fmt: skip
    case = {"kind": kind, **({} if made.several else {"label": label}), "lr": rate, "seed": seed}
    return Planned({**case, **({"trial": True} if trial else {})}, config)


def by_label(result: Result) -> Outcome:
    """AUROC of each label with its interval, and the bytes of a client per round."""
    assert result.traffic is not None
    lines = result.label_table()
    found = {line.name: [line.positives, *(round(float(value), 8) for value in line.auroc[:3])] for line in lines}
    return {"labels": found, "bytes": sum(result.traffic)}, {}


def work(planned: Planned) -> Outcome:
    return train(planned, more=by_label)


def run(do: Harness, labels: Sequence[str], seeds: int, rounds: int, data: Table) -> list[Row]:
    """Choose a rate for each kind of run on validation data of a seed that is not measured; then all runs."""
    tuned_on = {made.tuned_as: kind for kind, made in reversed(KINDS.items()) if made.longer == 1 and made.known == 1}
    trials = {
        same: {
            rate: [plan(kind, TUNED_LABEL, rate, TUNING_SEED, rounds, data, trial=True)] for rate in RATES[same[0]]
        }
        for same, kind in tuned_on.items()
    }
    tuned = harness.tune(do, trials, "auroc")
    chosen = {same: harness.best(found) for same, found in tuned.items()}
    planned = [
        plan(kind, label, chosen[made.tuned_as], seed, rounds, data)
        for seed in range(seeds)
        for kind, made in KINDS.items()
        for label in (labels[:1] if made.several else labels)
    ]
    return [*(row for found in tuned.values() for trial in found for row in trial.rows), *do(planned)]


def intervals(rows: Sequence[Row], kind: str, label: str) -> list[list[float]]:
    """Value, low and high of a label, one per seed; of a run of its own, the only one that it has."""
    own = [row for row in rows if row.case["kind"] == kind and row.case.get("label", label) == label]
    found = [row.found["labels"].get(label if KINDS[kind].several else "") for row in own]
    return [each[1:4] for each in found if each]


def markdown(rows: Sequence[Row], rounds: int) -> str:
    """The table, from rows alone."""
    runs = [row for row in rows if not row.case.get("trial")]
    first = next(row for row in runs if row.case["kind"] == ALL)
    own = list(group([row for row in runs if row.case["kind"] == OWN], "label"))
    body = [
        [name, f"{int(found[0]):,}", *(_cell(intervals(runs, kind, name)) for kind in KINDS)]
        for name, found in first.found["labels"].items()
    ]
    means = {
        kind: np.mean([[each[0] for each in intervals(runs, kind, label)] for label in own], 0) for kind in KINDS
    }
    body.append([f"mean of {', '.join(own)}", "", *(_spread(means[kind]) for kind in KINDS)])
    parts = [
        "# The 14 findings of ChestX-ray14 in one run",
        "FeDXL2 with AUROC of sigmoid scores, 8 sites, a CNN of 8 and 16 channels with group norm on images of 28 "
        f"pixels, {rounds} rounds of 8 steps of 28 + 28 examples, on a CPU. AUROC on the test data: the mean of "
        f"{len(group(runs, 'seed'))} seeds ± its standard deviation over them, and in brackets the 95 % interval, "
        "both ends averaged over the seeds (DeLong; for the mean of all labels a jackknife of the examples). "
        "*Half known*: each site knows 7 of the 14 labels. *48 + 8*: as many examples per step, 48 of S1 and "
        "8 of S2, because an example of S1 counts for one label and one of S2 for all.",
        as_markdown(body, ["label", "test positives", *KINDS]),
        costs(runs),
        "## How the learning rates were chosen",
        f"On validation data alone, by the AUROC of the best round, in runs of seed {TUNING_SEED}, which is not "
        f"measured above. 14 labels: their mean. One label: {TUNED_LABEL}; the other labels take the same rate.",
        *(
            tuning(kind, found)
            for kind, found in group([row for row in rows if row.case.get("trial")], "kind").items()
        ),
        f"On {machines(rows)}.",
        "![AUROC by label](labels.png)",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def costs(runs: Sequence[Row]) -> str:
    kinds = group(runs, "kind")

    def mean(kind: str, name: str) -> float:
        return float(np.mean([row.found[name] for row in kinds[kind]]))

    body = [
        [shown, *(f"{value:,.0f}" for value in (mean(ALL, n), mean(LONG, n), mean(OWN, n), 14 * mean(OWN, n)))]
        for n, shown in (("cpu", "CPU seconds"), ("bytes", "bytes of a client per round"))
    ]
    columns = ["", ALL, LONG, "one label, mean", "14 labels in 14 runs"]
    gain = 14 * mean(OWN, "cpu") / mean(LONG, "cpu")
    return (
        f"{as_markdown(body, columns)}\nCPU seconds are those of the process, with reading and evaluation. 14 runs "
        f"are 14 times the mean of those that were made. {LONGER} times the rounds take {gain:.1f} times less than "
        "14 runs."
    )


def tuning(kind: str, rows: Sequence[Row]) -> str:
    rates = [f"{row.case['lr']:g}" for row in rows]
    values = [row.validation("auroc") for row in rows]
    table = as_markdown([["validation AUROC", *(f"{value:.3f}" for value in values)]], [f"lr, {kind}", *rates])
    return f"{table}\nChosen: {rates[int(np.argmax(values))]}."


def _spread(found: Any) -> str:
    deviation = f" ± {np.std(found, ddof=1):.3f}" if len(found) > 1 else ""
    return f"{np.mean(found):.3f}{deviation}"


def _cell(found: Sequence[Sequence[float]]) -> str:
    if not found:
        return ""
    values, low, high = zip(*found, strict=True)
    return f"{_spread(values)} ({np.mean(low):.3f} to {np.mean(high):.3f})"


def draw(path: Path, rows: Sequence[Row]) -> None:
    """AUROC of every label in three kinds of runs."""
    plt = require_matplotlib()
    runs = [row for row in rows if not row.case.get("trial")]
    names = list(next(row for row in runs if row.case["kind"] == ALL).found["labels"])
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for shift, kind, marker in ((0.22, ALL, "o"), (0.0, LONG, "s"), (-0.22, OWN, "^")):
        known = {place: intervals(runs, kind, name) for place, name in enumerate(names)}
        known = {place: found for place, found in known.items() if found}
        middle, low, high = (
            np.array([np.mean([each[at] for each in found]) for found in known.values()]) for at in range(3)
        )
        ends = np.stack((middle - low, high - middle))
        axes.errorbar(middle, np.array(list(known)) + shift, xerr=ends, fmt=marker, label=kind, capsize=2)
    axes.axvline(0.5, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("AUROC on the test data")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def command(
    root: Annotated[Path, typer.Option(help="The folder with the published data files.")] = Path("data"),
    name: Annotated[str, typer.Option("--set", help="Which file of MedMNIST's form.")] = "chestmnist",
    labels: Annotated[str, typer.Option(metavar="LABEL,...", help="Labels with runs of their own.")] = ",".join(
        LABELS
    ),
    seeds: Seeds = 3,
    rounds: Annotated[int, typer.Option(help="Rounds of each run.")] = 20,
    jobs: Jobs = 1,
    folder: Folder = OUT,
) -> None:
    """14 labels in one run against runs of one label.

    The findings of ChestX-ray14. Half an hour on one core.
    """
    check(folder, seeds, jobs)
    require(rounds >= 1, f"rounds must be at least 1, got {rounds}")
    for label in (chosen := labels.split(",")):
        if label not in CHEST:
            raise unknown("label", label, CHEST)
    data: Mapping[str, Any] = {"set": name, "root": str(root)}
    with Harness(folder / "labels.jsonl", work, jobs) as do:
        rows = run(do, chosen, seeds, rounds, dict(data))
    draw(folder / "labels.png", rows)
    finish("labels", folder, markdown(rows, rounds))
