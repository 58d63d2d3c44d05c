"""The 14 findings of ChestX-ray14 in one run, against runs of one label: python benchmarks/labels.py --root data

It needs chestmnist.npz, or a file of the same form, and writes docs/results/labels.md, .json and .png. Learning rates
are chosen on validation data, in runs of a seed that is not measured. What is in labels.json, with the same settings,
is not made again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedxl.config.experiment import Config, execute
from fedxl.data.medmnist import CHEST
from fedxl.evaluation.intervals import Interval, delong
from fedxl.evaluation.label_table import LabelRow, label_table
from fedxl.files import read_json, write_atomically, write_json
from fedxl.training.hooks import Hooks

OUT = Path(__file__).resolve().parents[1] / "docs" / "results"
LONGER = 2  # times the rounds, for one more run of all labels
BATCH = {"first": (48, 8)}  # as many examples a step, most of them of S1: an S2 example counts for every label
MANY, FEW = (10.0, 30.0, 100.0, 300.0, 1000.0), (1.0, 3.0, 10.0, 30.0, 100.0)
# Learning rates. The runs of one label have both batches, so that what the batch does is told apart from the labels.
GRID = {"all": MANY, "one": FEW, "first": MANY, "one_first": FEW}
TUNED = {"all": "all", "one": "effusion", "first": "first", "one_first": "effusion_first"}  # which run chooses each
TUNING_SEED = 100
Tuned = dict[str, dict[str, float]]  # validation AUROC of the best round, by kind of run and rate


class Run(NamedTuple):
    """What a run comes to on the test data."""

    rows: list[LabelRow]
    cpu: float  # seconds of the process, evaluation and reading of data included
    bytes: int  # that a client receives and sends in a round


def config(args: argparse.Namespace, name: str, seed: int, rate: float) -> Config:
    """name: all, half (known), long, first (another batch), or a label, with that batch if it ends in _first."""
    of, _, other = name.partition("_")
    several, known = of not in CHEST, 0.5 if name == "half" else 1.0
    rounds, label = args.rounds * (LONGER if name == "long" else 1), "all" if several else of
    first, second = BATCH.get(other or name, (28, 28))
    risk: dict[str, Any] = {"name": "auroc", "scores": "sigmoid"}
    return Config(
        data={
            "name": "medmnist", "set": args.set, "root": args.root, "label": label, "clients": 8,
            **({"known": known} if known < 1 else {}),
        },
        model={"name": "cnn", "channels": 8, "norm": "group"},
        risk={**risk, "labels": list(CHEST)} if several else risk,
        algorithm={"name": "fedxl2", "lr": rate},
        run={
            "rounds": rounds, "local_steps": 8, "batch1": first, "batch2": second, "eval_every": 5, "device": "cpu",
            "seed": seed,
        },
    )  # fmt: skip


def tune(args: argparse.Namespace, found: Tuned) -> Tuned:
    """Validation AUROC with each rate of the grids; no test result is looked at."""
    for kind, grid in GRID.items():
        values = found.setdefault(kind, {})
        for rate in grid:
            if f"{rate:g}" not in values:
                result = execute(config(args, TUNED[kind], TUNING_SEED, rate), hooks=Hooks(say=lambda line: None))
                values[f"{rate:g}"] = result.metrics["validation"]["auroc"]
                print("tuning", kind, f"{rate:g}", values[f"{rate:g}"], "round", result.best_round, flush=True)
    return found


def chosen(tuned: Tuned) -> dict[str, float]:
    """The rate with the highest validation AUROC."""
    return {kind: float(max(values, key=lambda rate: values[rate])) for kind, values in tuned.items()}


def measured(settings: Config) -> Run:
    began = time.process_time()
    result = execute(settings, hooks=Hooks(say=lambda line: None))
    spent = time.process_time() - began
    assert result.traffic is not None
    if result.by_label:
        rows = label_table(result.by_label["test"])
    else:
        scores, labels = result.scored["test"].scores, result.scored["test"].labels
        positives = int(labels.sum())
        name = str(settings.data["label"])
        rows = [LabelRow(name, positives, len(labels) - positives, delong(scores, labels))]
    return Run(rows, spent, sum(result.traffic))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default="data")
    parser.add_argument("--set", default="chestmnist")
    parser.add_argument("--labels", nargs="*", default=["effusion", "cardiomegaly", "mass"], choices=CHEST)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    tuned, runs = made_before(args)
    rates = chosen(tune(args, tuned))
    for seed in range(args.seeds):
        for name in ("all", *args.labels, "half", "long", "first", *(f"{label}_first" for label in args.labels)):
            if len(runs.setdefault(name, [])) > seed:
                continue
            kind = "one" if name.partition("_")[0] in CHEST else "first" if name == "first" else "all"
            rate = rates["one_first" if name.endswith("_first") else kind]
            runs[name].append(measured(config(args, name, seed, rate)))
            print(seed, name, f"{runs[name][-1].cpu:.1f} s", flush=True)
        report(argparse.Namespace(**{**vars(args), "seeds": seed + 1}), tuned, runs)


def report(args: argparse.Namespace, tuned: Tuned, runs: dict[str, list[Run]]) -> None:
    content = {name: [run._asdict() for run in several] for name, several in runs.items()}
    write_json(
        OUT / "labels.json", {"rounds": args.rounds, "seeds": args.seeds, "validation": tuned, "runs": content}
    )
    write_atomically(OUT / "labels.md", text(args, tuned, runs).encode())
    picture(runs, OUT / "labels.png")


def made_before(args: argparse.Namespace) -> tuple[Tuned, dict[str, list[Run]]]:
    path = OUT / "labels.json"
    found = read_json(path) if path.exists() else {}
    grids = {kind: [f"{rate:g}" for rate in grid] for kind, grid in GRID.items()}
    same = all(list(values) == grids.get(kind) for kind, values in found.get("validation", {}).items())
    if found.get("rounds") != args.rounds or not same:
        return {}, {}

    def row(name: str, positives: int, negatives: int, auroc: list[Any]) -> LabelRow:
        return LabelRow(name, positives, negatives, Interval(*(np.nan if x is None else x for x in auroc)))

    return found["validation"], {
        name: [Run([row(*line) for line in run["rows"]], run["cpu"], run["bytes"]) for run in several]
        for name, several in found["runs"].items()
    }


def values(runs: list[Run], label: str) -> list[Interval]:
    return [row.auroc for run in runs for row in run.rows if row.name == label]


def common(runs: list[Run], labels: Sequence[str]) -> list[float]:
    """The mean over these labels, by seed."""
    return [float(np.mean([row.auroc.value for row in run.rows if row.name in labels])) for run in runs]


def text(args: argparse.Namespace, tuned: Tuned, runs: dict[str, list[Run]]) -> str:
    together, half, longer, first = runs["all"], runs["half"], runs["long"], runs["first"]
    alone = {name: runs[name] for name in args.labels}
    alone_first = {name: runs[f"{name}_first"] for name in args.labels}
    lines = [
        "# The 14 findings of ChestX-ray14 in one run",
        "",
        f"Written by `python benchmarks/labels.py --set {args.set} --seeds {args.seeds} --rounds {args.rounds}`.",
        "",
        "FeDXL2 with AUROC of sigmoid scores, 8 sites, a CNN of 8 and 16 channels with group norm on images of 28",
        f"pixels, {args.rounds} rounds of 8 steps of 28 + 28 examples, on a CPU.",
        f"AUROC on the test data: the mean of {args.seeds} seeds ± its standard deviation over them, and in brackets",
        "the 95 % interval, both ends averaged over the seeds (DeLong; for the mean of all labels a jackknife of the",
        "examples). *Half known*: each site knows 7 of the 14 labels.",
        "",
        f"| label | test positives | 14 labels in one run | 48 + 8 | {LONGER} times the rounds | half known "
        "| its own run | its own run, 48 + 8 |",
        "|---|---:|---|---|---|---|---|---|",
    ]
    for row in together[0].rows:
        own = [_cell(values(each[row.name], row.name)) if row.name in each else "" for each in (alone, alone_first)]
        cells = [_cell(values(each, row.name)) for each in (together, first, longer, half)]
        lines.append(f"| {row.name} | {row.positives:,} | {' | '.join(cells + own)} |")
    means = [common(each, args.labels) for each in (together, longer, half, first)]
    own_mean, first_mean = (
        [float(np.mean(values)) for values in zip(*(common(each[name], [name]) for name in each), strict=True)]
        for each in (alone, alone_first)
    )
    cells = [_spread(each) for each in (means[0], means[3], means[1], means[2], own_mean, first_mean)]
    lines.append(f"| mean of {', '.join(args.labels)} | | {' | '.join(cells)} |")
    gaps = [f"{np.mean(each) - np.mean(own_mean):+.3f}" for each in means]
    lines += [
        "",
        f"For the {len(alone)} labels with runs of their own, the AUROC of a run of 14 labels differs from theirs by",
        f"{gaps[0]} with the same steps, by {gaps[1]} with {LONGER} times the rounds, and by {gaps[2]} with the same",
        "steps if each site knows half of the labels.",
        "",
        "*48 + 8*: a step has as many examples, 48 of S1 and 8 of S2, because an example of S1 counts for one label",
        "and one of S2 for all. With a rate of its own it was better on validation data, in the run that chose it,",
        f"{max(tuned['first'].values()):.3f} against {max(tuned['all'].values()):.3f}. On the test data of the other "
        f"seeds the mean of all labels is {np.mean(common(first, ['mean'])):.3f} against "
        f"{np.mean(common(together, ['mean'])):.3f}.",
    ]
    return "\n".join([*lines, *_costs(runs, alone), *_tuning(tuned), "", "![AUROC by label](labels.png)", ""])


def _costs(runs: dict[str, list[Run]], alone: dict[str, list[Run]]) -> list[str]:
    one, long, single = _mean(runs["all"]), _mean(runs["long"]), [_mean(each) for each in alone.values()]
    cost, sent = np.mean([each[0] for each in single]), np.mean([each[1] for each in single])
    return [
        "",
        f"| | 14 labels in one run | {LONGER} times the rounds | one label, mean | 14 labels in 14 runs |",
        "|---|---:|---:|---:|---:|",
        f"| CPU seconds | {one[0]:.0f} | {long[0]:.0f} | {cost:.0f} | {14 * cost:.0f} |",
        f"| bytes of a client in a round | {one[1]:,.0f} | {long[1]:,.0f} | {sent:,.0f} | {14 * sent:,.0f} |",
        "",
        "CPU seconds are those of the process, with reading and evaluation. 14 runs are 14 times the mean of those",
        f"that were made. {LONGER} times the rounds take {14 * cost / long[0]:.1f} times less than 14 runs.",
        "",
        "A step of a label's own run has 28 positives of it, and one of 14 labels has two.",
    ]


def _tuning(tuned: Tuned) -> list[str]:
    rates = chosen(tuned)
    lines = [
        "",
        "## How the learning rates were chosen",
        "",
        f"On validation data alone, by the AUROC of the best round, in runs of seed {TUNING_SEED}, which is not",
        f"measured above. 14 labels: their mean. One label: {TUNED['one']}; the other labels take the same rate.",
        "An earlier version of this page had test results of 10 and 140 for 14 labels, and of 10 for one label.",
        "",
    ]
    titles = {"all": "14 labels", "one": "one label", "first": "14 labels, 48 + 8", "one_first": "one label, 48 + 8"}
    for kind, title in titles.items():
        lines += [
            f"| learning rate, {title} | {' | '.join(tuned[kind])} |",
            "|---" * (len(tuned[kind]) + 1) + "|",
            f"| validation AUROC | {' | '.join(f'{value:.3f}' for value in tuned[kind].values())} |",
            "",
            f"Chosen: {rates[kind]:g}.",
            "",
        ]
    return lines[:-1]


def _spread(found: Sequence[float]) -> str:
    deviation = f" ± {np.std(found, ddof=1):.3f}" if len(found) > 1 else ""
    return f"{np.mean(found):.3f}{deviation}"


def _cell(found: list[Interval]) -> str:
    low, high = (np.mean([getattr(each, end) for each in found]) for end in ("low", "high"))
    return f"{_spread([each.value for each in found])} ({low:.3f} to {high:.3f})"


def _mean(runs: list[Run]) -> tuple[float, float]:
    return float(np.mean([run.cpu for run in runs])), float(np.mean([run.bytes for run in runs]))


def picture(runs: dict[str, list[Run]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [row.name for row in runs["all"][0].rows]
    figure, axes = plt.subplots(figsize=(8, 5))
    kinds = {
        "14 labels in one run": ("all", "o"),
        f"{LONGER} times the rounds": ("long", "s"),
        "a run of its own": ("", "^"),
    }
    for shift, (title, (kind, marker)) in zip((0.22, 0.0, -0.22), kinds.items(), strict=True):
        known = {name: values(runs.get(kind or name, []), name) for name in names}
        places = [place for place, name in enumerate(names) if known[name]]
        middle = np.array([np.mean([each.value for each in known[names[place]]]) for place in places])
        low, high = (
            np.array([np.mean([getattr(each, end) for each in known[names[p]]]) for p in places])
            for end in ("low", "high")
        )
        ends = np.stack((middle - low, high - middle))
        axes.errorbar(middle, np.array(places) + shift, xerr=ends, fmt=marker, label=title, capsize=2)
    axes.axvline(0.5, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("AUROC on the test data")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=3, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
