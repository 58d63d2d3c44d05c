"""Real hospitals: a stroke trial, heart disease and breast cancer, split as patients were treated; beside FLamby.

All methods have the same five learning rates, rounds and seeds. A method's rate is chosen on validation data, as the
mean over all seeds, in trials that train on the rest. Then it trains on all training data, with every rate, to its
last round: what the chosen rate comes to is its result. It needs the published files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import typer

from fedxl import metrics
from fedxl.config.experiment import Config, Table, load_data
from fedxl.errors import unknown
from fedxl.evaluation.calibration import Platt
from fedxl.reporting.text import as_markdown, mean_and_spread, mean_with_spread, over_seeds
from fedxl.sampling import Floats
from fedxl.training.result import Result
from studies import harness, pictures
from studies.harness import Case, Harness, Outcome, Planned, Row, group, machines, train
from studies.options import OUT, Folder, Jobs, Rounds, Seeds, check, finish, length, shorten
from studies.paper.tables import resample
from studies.proximal import FedProx

RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
RATES_OF_MANY = (0.1, 0.3, 1.0, 3.0, 10.0)  # of 466 hospitals, which have a few patients each
LOCAL = 0.1  # the local rate under a server's Adam, which scales changes by their size: the server's rate is tuned
LOW = 0.1  # a run is low if its test metric is further than this below the mean of its method's best rate
ROUNDS, STEPS, DECAY = 30, 8, 1e-3
HELD = 0.2  # the share of training patients that trials validate on
DRAWS = 1000
OURS, CENTRAL = "FeDXL", "centralised"


class Cell(NamedTuple):
    """A data set, and who its clients are."""

    title: str
    data: Table
    risk: str
    metrics: tuple[str, ...]  # of test data; the first one chooses learning rates, on validation data
    batch: tuple[int, int]
    central: tuple[int, int]  # in one place
    clients: str
    rates: tuple[float, ...] = RATES

    @property
    def metric(self) -> str:
        return self.metrics[0]


BRCA, HEART, STROKE = "Fed-TCGA-BRCA", "Fed-Heart-Disease", "International Stroke Trial"
OF_BRCA = Cell(BRCA, {"name": "tcga_brca"}, "cox", ("cindex",), (8, 16), (48, 96), "6 regions")
OF_HEART = Cell(
    HEART, {"name": "heart"}, "auroc", ("auroc", "accuracy"), (16, 16), (64, 64), "4 hospitals, scaled by hospital"
)
CELLS = {
    "tcga_brca": OF_BRCA,
    "tcga_brca_sites": OF_BRCA._replace(data={**OF_BRCA.data, "clients": "sites"}, clients="37 tissue source sites"),
    "heart": OF_HEART,
    "heart_together": OF_HEART._replace(
        data={**OF_HEART.data, "by_site": False}, clients="4 hospitals, scaled together"
    ),
    "ist": Cell(STROKE, {"name": "ist"}, "auroc", ("auroc",), (8, 16), (256, 768), "466 hospitals", RATES_OF_MANY),
}
NAMES = {"cindex": "C-index", "auroc": "AUROC", "accuracy": "accuracy"}


class Method(NamedTuple):
    algorithm: Table
    tuned: str = "lr"


ADAM = {"server_update": "adam", "lr": LOCAL}
# Averages of Cox models whose risk sets are local are what FedAvg is there.
WITH_TIMES = {
    OURS: Method({"name": "fedxl2"}),
    "FeDXL, server Adam": Method({"name": "fedxl2", **ADAM}, "server_lr"),
    "FedAvg (Local Pair)": Method({"name": "local_pair"}),
    "FedAdam": Method({"name": "local_pair", **ADAM}, "server_lr"),
    "FedProx": Method({"name": "studies.proximal:PairProx"}),
    CENTRAL: Method({"name": "sox"}),
}
WITH_CLASSES = {
    OURS: Method({"name": "fedxl2"}),
    "FeDXL, server Adam": Method({"name": "fedxl2", **ADAM}, "server_lr"),
    "Local Pair": Method({"name": "local_pair"}),
    "FedAvg (Local SGD)": Method({"name": "local_sgd"}),
    "FedAdam": Method({"name": "local_sgd", **ADAM}, "server_lr"),
    "FedProx": Method({"name": "studies.proximal:FedProx"}),
    "CODASCA": Method({"name": "codasca"}),
    CENTRAL: Method({"name": "sox"}),
    f"{CENTRAL}, cross entropy": Method({"name": "sgd"}),
}
# J. O. du Terrail et al., FLamby, NeurIPS 2022: the pooled test metric in the results that its repository stores
# (github.com/owkin/FLamby), mean and standard deviation of the seeds 42 to 46.
PUBLISHED: Mapping[str, tuple[str, Mapping[str, tuple[float, float]]]] = {
    BRCA: (
        "cindex",
        {
            "FedAdam, FedYogi": (0.842, 0.017), "FedAdagrad": (0.834, 0.007), "FedAvg": (0.735, 0.175),
            "FedProx": (0.717, 0.162), "pooled training": (0.704, 0.114), "Scaffold": (0.699, 0.035),
        },
    ),
    HEART: (
        "accuracy",
        {
            "pooled training": (0.795, 0.003), "Cyclic": (0.785, 0.012),
            "FedAdam, FedYogi, FedAdagrad": (0.779, 0.015), "FedAvg, FedProx, Scaffold": (0.748, 0.027),
        },
    ),
}  # fmt: skip


def methods(cell: Cell) -> Mapping[str, Method]:
    return WITH_TIMES if cell.risk == "cox" else WITH_CLASSES


def plan(
    name: str, label: str, rate: float, seed: int, rounds: int = 0, root: str = "data", trial: bool = False
) -> Planned:
    """A run that trains on all training data, or a trial that validates on some of it."""
    cell, method = CELLS[name], methods(CELLS[name])[label]
    batch = cell.central if label.startswith(CENTRAL) else cell.batch
    case = {"data": name, "method": label, "lr": rate, "seed": seed, **length(rounds)}
    config = Config(
        data={**cell.data, "validation": HELD if trial else 0.0, "root": root},
        model={"name": "linear"},
        risk={"name": cell.risk},
        algorithm={**method.algorithm, method.tuned: rate, "weight_decay": DECAY},
        run={
            "rounds": ROUNDS, "local_steps": STEPS, "batch1": batch[0], "batch2": batch[1], "eval_every": ROUNDS,
            "weighting": "samples", "select": cell.metric, "seed": seed,
        },
    )  # fmt: skip
    return Planned({**case, **({"trial": True} if trial else {})}, shorten(config, case), trial)


def work(folder: Path, planned: Planned) -> Outcome:
    """Train, or compare methods that were trained."""
    case = planned.case
    if "against" in case:
        return compare(Harness(folder / "sites.jsonl", train), case)
    return train(planned, more=partial(more, planned))


def more(planned: Planned, result: Result) -> Outcome:
    """When test patients were last seen, or how often their class is right, where the study shows that."""
    test = result.scores["test"]
    if test.time is not None:
        return {}, {"times": test.time}
    if "accuracy" not in CELLS[planned.case["data"]].metrics:
        return {}, {}
    assert planned.config is not None
    known = load_data(planned.config).train
    with torch.no_grad():
        scores = result.model(known.x).flatten().double().numpy()
    right = (Platt.fit(scores, known.y[:, 0].numpy())(test.flat[0]) >= 0.5) == test.flat[1]
    return {"accuracy": round(float(right.mean()), 8)}, {}


def compare(of: Harness, case: Case) -> Outcome:
    """The interval of FeDXL's mean over seeds less another method's; None if there are no scores of them."""
    drawn = []
    for method, rate in zip((OURS, case["against"]), case["lr"], strict=True):
        runs = [plan(case["data"], method, rate, seed, case.get("rounds", 0)) for seed in range(case["seeds"])]
        drawn.append(redraw([of.arrays(Row(each.key, {}, {})) for each in runs], CELLS[case["data"]].metric))
    if not all(map(len, drawn)):
        return {"interval": None}, {}
    return {"interval": [round(float(end), 6) for end in metrics.interval(drawn[0] - drawn[1])]}, {}


def redraw(runs: Sequence[Mapping[str, Floats]], metric: str) -> Floats:
    """The mean of a metric over seeds on bootstrapped test patients, the same for all methods.

    Empty unless there are scores of every seed.
    """
    if metric != "cindex":
        return resample(runs, metric)
    if not all("times" in run for run in runs):
        return np.empty(0)
    events, times = runs[0]["labels"] > 0, runs[0]["times"]
    later = (times > times[events, None]) | ((times == times[events, None]) & ~events)  # [events, n]
    wins = np.mean([_wins(run["scores"], events) for run in runs], 0) * later
    rng, count = np.random.default_rng(0), len(times)
    drawn = rng.multinomial(count, np.full(count, 1 / count), DRAWS).astype(np.float64)
    won, pairs = (np.einsum("de,en,dn->d", drawn[:, events], each, drawn, optimize=True) for each in (wins, later))
    return np.asarray(won / pairs)


def _wins(scores: Floats, events: npt.NDArray[np.bool_]) -> Floats:
    """[events, n] 1 where the event has the higher score, one half where both are the same."""
    apart = scores[events, None] - scores
    return np.asarray((np.sign(apart) + 1) / 2)


def run(do: Harness, names: Sequence[str], seeds: int, rounds: int, root: str) -> list[Row]:
    """The trials and runs of all methods, and how FeDXL compares with each, at the rates that trials choose."""
    rows = []
    for name in names:

        def every(label: str, rate: float, trial: bool, name: str = name) -> list[Planned]:
            return [plan(name, label, rate, seed, rounds, root, trial) for seed in range(seeds)]

        labels = methods(CELLS[name])
        trials = {label: {rate: every(label, rate, True) for rate in CELLS[name].rates} for label in labels}
        tuned = harness.tune(do, trials, CELLS[name].metric)
        rows += [row for found in tuned.values() for trial in found for row in trial.rows]
        rows += do([each for label in labels for rate in CELLS[name].rates for each in every(label, rate, False)])
        chosen = {label: harness.best(found) for label, found in tuned.items()}
        rows += do(
            [
                Planned(
                    {"data": name, "against": label, "lr": [chosen[OURS], rate], "seeds": seeds, **length(rounds)}
                )
                for label, rate in chosen.items()
                if label != OURS
            ]
        )
    return rows


class Line(NamedTuple):
    """A method in a cell."""

    label: str
    by_rate: dict[float, list[Row]]
    rate: float  # that trials chose
    interval: tuple[float, float] | None  # of FeDXL's test metric less this one's

    @property
    def rows(self) -> list[Row]:
        return self.by_rate[self.rate]

    def top(self, metric: str) -> float:
        """The mean test metric of the best rate; NaN if a seed diverged at every rate."""
        means = [float(np.mean(values(rows, metric))) for rows in self.by_rate.values()]
        return max((mean for mean in means if np.isfinite(mean)), default=np.nan)


def lines_of(rows: Sequence[Row]) -> list[Line]:
    """The methods of a cell."""
    metric = CELLS[rows[0].case["data"]].metric
    compared = {row.case["against"]: row.found["interval"] for row in rows if "against" in row.case}
    trials = group([row for row in rows if row.case.get("trial")], "method")
    found = []
    for label, own in group(runs_of(rows), "method").items():
        tried = [
            harness.Trial(rate, float(np.mean([row.validation(metric) for row in each])), each)
            for rate, each in group(trials[label], "lr").items()
        ]
        found.append(Line(label, group(own, "lr"), harness.best(tried), compared.get(label)))
    return found


def runs_of(rows: Sequence[Row]) -> list[Row]:
    """Those that trained on all training data."""
    return [row for row in rows if "method" in row.case and not row.case.get("trial")]


def values(rows: Sequence[Row], metric: str) -> list[float]:
    """A metric of the test data; NaN for runs that diverged."""
    return [row.found.get(metric, np.nan) if metric == "accuracy" else row.test(metric) for row in rows]


def markdown(rows: Sequence[Row]) -> str:
    runs = runs_of(rows)
    parts = [
        "# Real hospitals",
        f"Linear models, {runs[0].case.get('rounds', ROUNDS)} rounds of {STEPS} steps, weight decay {DECAY:g}, "
        "clients weighted by their patients. All methods have the same five learning rates (FedAdam and server Adam: "
        f"of the server; the local rate is {LOCAL:g}). Trials choose: they validate on {HELD:.0%} of the training "
        "patients, which a seed draws, and the mean over seeds decides. Then each method trains on all of them "
        f"to the last round. Test data: {over_seeds(len(group(runs, 'seed')))}. In brackets the 95 % "
        f"interval of the difference between means over seeds, over {DRAWS:,} bootstrapped sets of test patients, "
        "the same for both methods; it does not cover the draw of the seeds.",
        "FLamby's numbers are those that its repository stores (du Terrail et al., NeurIPS 2022): the pooled test "
        "metric, mean ± standard deviation over its five seeds. It reads ages of breast cancer as they are; here "
        "they are scaled. Its federated runs on heart disease scale features at each hospital, its pooled training "
        "scales them together.",
        f"FedProx adds {FedProx.mu:g} / 2 times the squared distance from the round's first model, untuned.",
        f"On {machines(runs)}.",
    ]
    for name, own in group(rows, "data").items():
        parts += describe_cell(CELLS[name], lines_of(own))
    parts.append("![Test metric by learning rate](sites.png)")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def describe_cell(cell: Cell, found: Sequence[Line]) -> list[str]:
    """The methods with their chosen rates, and with all rates."""
    ours = next(line for line in found if line.label == OURS)
    body = []
    for line in found:
        edge = "*" if line.rate in (cell.rates[0], cell.rates[-1]) else ""
        cells = [mean_with_spread(values(line.rows, metric)) for metric in cell.metrics]
        body.append([line.label, *cells, _lead(ours, line, cell.metric), f"{line.rate:g}{edge}"])
    metric, published = PUBLISHED.get(cell.title, ("", {}))
    for label, (mean, spread) in published.items():
        told = [f"{mean:.3f} ± {spread:.3f}" if each == metric else "" for each in cell.metrics]
        body.append([f"FLamby: {label}", *told, "", ""])
    rates = sorted(found[0].by_rate)
    by_rate = [
        [line.label, *(_by_rate(line.by_rate[rate], cell.metric, line.top(cell.metric)) for rate in rates)]
        for line in found
    ]
    theirs = f" FLamby's clients are {CELLS['tcga_brca'].clients}." if cell == CELLS["tcga_brca_sites"] else ""
    return [
        f"## {cell.title}, {cell.clients}",
        as_markdown(body, ["method", *(NAMES[each] for each in cell.metrics), f"{OURS} - method", "lr"]),
        f"{_edges(cell, found)}{theirs} Test {NAMES[cell.metric]} by learning rate, in brackets that of the lowest "
        f"seed, and how many seeds are low, more than {LOW:g} below the mean of their method's best rate:",
        as_markdown(by_rate, ["method", *(f"{rate:g}" for rate in rates)]),
    ]


def _edges(cell: Cell, found: Sequence[Line]) -> str:
    """Whose rate is the smallest or the largest of the grid."""
    ends = {"smallest": cell.rates[0], "largest": cell.rates[-1]}
    at = {name: [line.label for line in found if line.rate == rate] for name, rate in ends.items()}
    told = "; ".join(f"the {name} rate of all, for {', '.join(labels)}" for name, labels in at.items() if labels)
    return f"*: {told}. A rate beyond it may be better." if told else "No method's rate is at an end of the grid."


def _lead(ours: Line, line: Line, metric: str) -> str:
    if line is ours:
        return ""
    apart = float(np.mean(values(ours.rows, metric)) - np.mean(values(line.rows, metric)))
    if line.interval is None:
        return f"{apart:+.4f}"
    low, high = line.interval
    return f"{apart:+.4f} ({low:+.4f} to {high:+.4f})"


def _by_rate(rows: Sequence[Row], metric: str, top: float) -> str:
    found = values(rows, metric)
    low = sum(not value >= top - LOW for value in found)
    if not np.isfinite(found).all():
        return f"{sum(np.isnan(found))} diverged, {low} low"
    told = f"{np.mean(found):.4f} ({min(found):.4f})"
    return f"{told}, {low} low" if low else told


def draw(path: Path, rows: Sequence[Row]) -> None:
    """The test metric of every method by learning rate, a panel per cell."""
    panels = []
    for name, own in group(rows, "data").items():
        cell = CELLS[name]
        lines = {
            line.label: [
                pictures.Point(place, *mean_and_spread(values(line.by_rate[rate], cell.metric)))
                for place, rate in enumerate(sorted(line.by_rate))
            ]
            for line in lines_of(own)
        }
        metric, published = PUBLISHED.get(cell.title, ("", {}))
        best = max((mean for mean, _ in published.values()), default=0.0)
        reference = {"FLamby's best": best} if metric == cell.metric else {}
        ticks, up = [f"{rate:g}" for rate in cell.rates], f"test {NAMES[cell.metric]}"
        panels.append(pictures.Panel(f"{cell.title}, {cell.clients}", "learning rate", up, lines, ticks, reference))
    pictures.lines(path, "Real hospitals, by learning rate", panels, OURS)


def command(
    root: Annotated[Path, typer.Option(help="The folder with the published data files.")] = Path("data"),
    only: Annotated[str, typer.Option(metavar="NAME,...", help=f"{', '.join(CELLS)}.")] = ",".join(CELLS),
    seeds: Seeds = 5,
    rounds: Rounds = 0,
    jobs: Jobs = 1,
    folder: Folder = OUT,
) -> None:
    """Real hospitals: stroke, heart disease and breast cancer.

    Every federated method and all data in one place, tuned alike, beside FLamby's own results.
    """
    check(folder, seeds, jobs)
    for name in (chosen := only.split(",")):
        if name not in CELLS:
            raise unknown("data set", name, CELLS)
    with Harness(folder / "sites.jsonl", partial(work, folder), jobs) as do:
        rows = run(do, chosen, seeds, rounds, str(root))
    draw(folder / "sites.png", rows)
    finish("sites", folder, markdown(rows))
