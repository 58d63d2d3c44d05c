"""Sites that drift within a round: G that is held, and clients with one class that lend or train. Digits, a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedxl.config.experiment import Config, Table
from fedxl.experiments import demo
from fedxl.reporting.text import as_markdown
from studies.harness import Harness, Planned, Row, cell, group, machines, train
from studies.options import OUT, Folder, Jobs, Rounds, Seeds, check, finish, length, shorten

SELECT = f"pauc@{demo.MAX_FPR:g}"
FIRST = 200  # seed; none of the demo's, nor of its tuning
RATES = (0.3, 1.0)
TRAIN: Table = {"name": "fedxl2", "one_class": "train", "guard": False}
LEND: Table = {"name": "fedxl2", "one_class": "lend"}
FORMS: Mapping[str, Table] = {
    "FeDXL": {"name": "fedxl2"},
    "FeDXL, not held": {"name": "fedxl2", "hold": 0.0},
    "FeDXL, free": {"name": "fedxl2", "level": "free"},
    "Local Pair": {"name": "local_pair"},
    "Local Pair, not held": {"name": "local_pair", "hold": 0.0},
}
SKEWED: Mapping[str, Table] = {
    "equal shards": {"partition": "equal"},
    "alpha 0.3": {"partition": "dirichlet", "alpha": 0.3},
    "alpha 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "8 one-class sites": {"partition": "one_class", "one_class": 8},
    "12 one-class sites": {"partition": "one_class", "one_class": 12},
}
WAYS = {"lends": LEND, "trains": TRAIN}
NEGATIVES = (5.0, 20.0, 60.0)  # how many times as many negatives a site without positives holds as another
WITHOUT = (6, 10)  # of 16 sites, those without positives


def cases(seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        for lr in RATES:
            for where in SKEWED:
                yield from ({"sites": where, "method": form, "lr": lr, "seed": seed} for form in FORMS)
            for skew in NEGATIVES:
                for without in WITHOUT:
                    for weighting in ("clients", "samples"):
                        lone = {"skew": skew, "without": without, "weighting": weighting}
                        yield from ({**lone, "way": way, "lr": lr, "seed": seed} for way in WAYS)


def config_of(case: Mapping[str, Any]) -> Config:
    if "sites" in case:
        data, algorithm, weighting = SKEWED[case["sites"]], FORMS[case["method"]], "samples"
    else:
        data, algorithm = {"skew": case["skew"], "one_class": case["without"]}, WAYS[case["way"]]
        weighting = case["weighting"]
    usual = demo.experiment(demo.Entry("", {**algorithm, "lr": case["lr"]}), case["seed"])
    return Config(**{
        **usual.tables(), "data": {"name": "digits", **data}, "run": {**usual.run, "weighting": weighting},
    })  # fmt: skip


def drift(seeds: Seeds = 3, rounds: Rounds = 0, jobs: Jobs = 1, folder: Folder = OUT) -> None:
    """Held G, and who trains on one class, on digits.

    Ten minutes on one core.
    """
    check(folder, seeds, jobs)
    found = [{**case, **length(rounds)} for case in cases(range(FIRST, FIRST + seeds))]
    with Harness(folder / "drift.jsonl", train, jobs) as do:
        rows = do([Planned(case, shorten(config_of(case), case)) for case in found])
    finish("drift", folder, drift_table(rows))


def drift_table(rows: Sequence[Row]) -> str:
    skewed = group([row for row in rows if "sites" in row.case], "sites", "method")
    first = [[where, *(best(skewed[where, form]) for form in FORMS)] for where in SKEWED]
    lone = group([row for row in rows if "way" in row.case], "skew", "without", "weighting", "way")
    second = [
        [f"{without} of 16", share(skew, without), by, *(best(lone[skew, without, by, way]) for way in WAYS)]
        for skew in NEGATIVES for without in WITHOUT for by in ("clients", "samples")
    ]  # fmt: skip
    parts = [
        "# Sites that drift within a round",
        "The demo's images, network and rounds of eight steps. Test partial AUC (FPR <= 0.3), mean ± standard "
        f"deviation over {len(group(rows, 'seed'))} seeds, of the learning rate "
        f"({', '.join(f'{lr:g}' for lr in RATES)}) with the best mean on validation data. On {machines(rows)}.",
        "Label skew, clients weighted by samples. FeDXL and Local Pair in their defaults, with G not held, and FeDXL "
        "in the paper's form:",
        as_markdown(first, ["sites", *FORMS]).strip(),
        "Sites without positives, which hold this part of the negatives. They lend their scores, or train (without a "
        'guard). With `one_class = "auto"` they train where that part is above one half, as in all these rows:',
        as_markdown(second, ["sites without positives", "of the negatives", "weighting", *WAYS]).strip(),
    ]
    return "\n\n".join(parts) + "\n"


def share(skew: float, without: int) -> str:
    return f"{skew * without / (skew * without + 16 - without):.0%}"


def best(rows: Sequence[Row]) -> str:
    """The test metric of the rate that validation data choose."""
    by_rate = group(rows, "lr").values()
    return cell(max(by_rate, key=lambda own: float(np.mean([row.validation(SELECT) for row in own]))), SELECT)
