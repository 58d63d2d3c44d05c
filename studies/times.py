"""What bins of times cost, and what they hide: Fed-TCGA-BRCA with exact times and with bins.

The cost is the concordance on test data, beside that with exact times. What they hide is measured by an attack:
whoever knows a patient's hospital and the day of the event, from an obituary for example, looks for the pooled scores
that go with this time. The patient is found if nobody else at the hospital had the event in the same bin. Patients
without an event are looked for by the day on which they were last seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import typer

from fedxl.config.experiment import Config, load_data
from fedxl.data.examples import Examples
from fedxl.reporting.text import as_markdown, mean_with_spread
from fedxl.risks.timetable import Timetable, timetable
from fedxl.sampling import Indices
from studies.harness import Harness, Planned, Row, group, machines, train
from studies.options import OUT, Folder, Jobs, Rounds, Seeds, check, finish, length, shorten
from studies.sites import CELLS, OURS
from studies.sites import plan as plan_of

BINS = (0, 5, 10, 20, 50, 100)
PLACES = {"tcga_brca": "6 regions", "tcga_brca_sites": "37 hospitals"}
RATE = 0.03


def command(
    root: Annotated[str, typer.Option(help="The folder of the published files of tcga_brca.")] = "data",
    seeds: Seeds = 5,
    rounds: Rounds = 0,
    jobs: Jobs = 1,
    folder: Folder = OUT,
) -> None:
    """What bins of times cost, and what they hide from who knows a patient's time. Minutes on one core."""
    check(folder, seeds, jobs)
    cells = [(name, bins, seed) for name in PLACES for bins in BINS for seed in range(seeds)]
    with Harness(folder / "times.jsonl", train, jobs) as do:
        rows = do([plan(name, bins, seed, rounds, root) for name, bins, seed in cells])
    alone = {name: identified(load_data(config_of(name, root=root)).train) for name in PLACES}
    finish("times", folder, text(rows, alone))


def plan(name: str, bins: int, seed: int, rounds: int = 0, root: str = "data") -> Planned:
    config = config_of(name, seed, rounds, root)
    config.risk.update(time_bins=bins)
    case = {"data": name, "bins": bins, "seed": seed, **length(rounds)}
    return Planned(case, shorten(config, case))


def config_of(name: str, seed: int = 0, rounds: int = 0, root: str = "data") -> Config:
    config = plan_of(name, OURS, RATE, seed, rounds, root).config
    assert config is not None
    return config


def table_of(data: Examples, bins: int) -> Timetable:
    return timetable([held.times for held in data.holdings() if held.times is not None], True, bins)


class Alone(NamedTuple):
    """What an attack by times finds: who is alone at their hospital with their bin."""

    events: float  # the share of events without another event in their bin
    company: float  # the median number of events in an event's bin, with itself
    censored: float  # the share of patients without an event and without another such patient in their bin


def identified(data: Examples) -> dict[int, Alone]:
    """By the number of bins."""
    assert data.time is not None
    assert data.site is not None
    event, time = data.y[:, 0].numpy() > 0, data.time.numpy()
    found = {}
    for bins in BINS:
        key = data.site.astype(np.int64) * 10**6 + table_of(data, bins).number(time)
        company, others = (_company(own) for own in (key[event], key[~event]))
        found[bins] = Alone(float((company == 1).mean()), float(np.median(company)), float((others == 1).mean()))
    return found


def _company(keys: Indices) -> Indices:
    """How many have the key of each."""
    _, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return np.asarray(counts[which])


def text(rows: Sequence[Row], alone: dict[str, dict[int, Alone]]) -> str:
    body = []
    for name, own in group(rows, "data").items():
        for bins, runs in group(own, "bins").items():
            events, company, censored = alone[name][bins]
            scores = mean_with_spread([run.test(CELLS[name].metric) for run in runs])
            body.append([PLACES[name], str(bins) if bins else "exact", scores, f"{events:.2f}", f"{company:g}"])
            body[-1].append(f"{censored:.2f}")
    heads = ["clients", "bins", "test C-index", "events alone in their bin", "median events in a bin"]
    heads.append("censored patients alone")
    return "\n\n".join(
        [
            "# Times in bins",
            f"Fed-TCGA-BRCA, FeDXL with cox, learning rate {RATE:g}, mean ± standard deviation over the seeds "
            f"{', '.join(str(seed) for seed in group(rows, 'seed'))}. Bins begin at public times, twenty per decade, "
            "so that there are fewer of them than asked for where events lie close. The last three columns are of "
            "the training data: how often a patient's hospital and time tell which pooled score is the patient's.",
            as_markdown(body, heads),
            f"On {machines(rows)}.",
        ]
    )
