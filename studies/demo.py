"""The demo with one thing changed: its optimiser, who takes part in a round, and how its settings were chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from fedxl.config.experiment import Config
from fedxl.errors import unknown
from fedxl.experiments import demo
from fedxl.files import write_json
from fedxl.reporting.text import as_markdown
from studies import harness, recorded
from studies.harness import Harness, Planned, Row, cell, difference, group, machines, train, with_error
from studies.options import OUT, Folder, Jobs, Rounds, Seeds, check, finish, length, shorten

SELECT = f"pauc@{demo.MAX_FPR:g}"
METRICS = {"auroc": "AUROC", SELECT: "partial AUC (FPR <= 0.3)"}
TUNED_ON = 100
USUAL, SMALLER, TINY = (0.1, 0.3, 1.0), (0.03, 0.1, 0.3), (0.003, 0.01, 0.03)


class Variant(NamedTuple):
    """FeDXL2 of the demo with other settings, and what is tried of one of them."""

    algorithm: Mapping[str, Any] = {}
    risk: Mapping[str, Any] | None = None  # None: the demo's
    tuned: str = "lr"
    tried: Sequence[float] = USUAL

    def config(self, value: float, seed: int) -> Config:
        base = recorded.FEDXL2
        changed = demo.Entry("", {**base.algorithm, **self.algorithm, self.tuned: value}, base.risk)
        config = recorded.experiment(changed, seed)
        return config if self.risk is None else Config(**{**config.tables(), "risk": dict(self.risk)})


VARIANTS = {
    "FeDXL2, as in the demo": Variant(),
    "local momentum": Variant({"descent": "momentum"}, tried=SMALLER),
    "local Adam": Variant({"descent": "adam"}, tried=TINY),
    "server momentum (FedAvgM)": Variant({"server_update": "momentum"}, tried=SMALLER),
    "server Adam (FedAdam)": Variant({"server_update": "adam"}, tuned="server_lr", tried=TINY),
    "CVaR one-way, FPR <= 0.3": Variant(risk={"name": "cvar_pauc", "fpr": 0.3}),
}


def optimisers(seeds: Seeds = 3, rounds: Rounds = 0, jobs: Jobs = 1, folder: Folder = OUT) -> None:
    """Optimisers and CVaR risks on the demo.

    FeDXL2 with one setting changed, tuned alike. Three minutes on one core.
    """
    check(folder, seeds, jobs)

    def plan(name: str, value: float, seed: int) -> Planned:
        case = {"variant": name, VARIANTS[name].tuned: value, "seed": seed, **length(rounds)}
        return Planned(case, shorten(VARIANTS[name].config(value, seed), case))

    with Harness(folder / "optimisers.jsonl", train, jobs) as do:
        trials = {name: {value: [plan(name, value, TUNED_ON)] for value in v.tried} for name, v in VARIANTS.items()}
        tuned = harness.tune(do, trials, SELECT)
        chosen = {name: harness.best(found) for name, found in tuned.items()}
        rows = do([plan(name, value, seed) for name, value in chosen.items() for seed in demo.SEEDS[:seeds]])
    finish("optimisers", folder, optimisers_table(rows))


def optimisers_table(rows: Sequence[Row]) -> str:
    body = []
    for name, own in group(rows, "variant").items():
        tuned = VARIANTS[name].tuned
        body.append([name, f"{tuned} {own[0].case[tuned]:g}", *(cell(own, metric) for metric in METRICS)])
    parts = [
        "# Optimisers and CVaR risks on the demo",
        "FeDXL2 with the demo's settings, one of them changed, on the demo's 16 sites of digits. Three values of the "
        f"learning rate for each, chosen by validation data of seed {TUNED_ON}. Test data, "
        f"mean ± standard deviation over the seeds {', '.join(str(seed) for seed in group(rows, 'seed'))}.",
        f"On {machines(rows)}.",
        as_markdown(body, ["variant", "chosen", *METRICS.values()]).strip(),
    ]
    return "\n\n".join(parts) + "\n"


CLIENTS, COHORT, ROUNDS = 16, 4, 48
HOURS, OFTEN, RARELY = 24, 12, 3
RARE = (0, 1, 2, 3)  # clients that hold positives, and are rarely there
METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # the demo's entry, and what is changed
    "FeDXL2": ("FeDXL2", {}),
    "FeDXL2, pool of 4 rounds": ("FeDXL2", {"pool_rounds": 4}),
    "Local Pair": ("Local Pair", {}),
}
WAYS = ("uniform", "trace")


def day() -> dict[str, list[list[int]]]:
    """Who is awake in which hour: half of the day, one client after the other; the rare ones for three hours."""
    begins = [round(client * HOURS / CLIENTS) for client in range(CLIENTS)]
    lengths = [RARELY if client in RARE else OFTEN for client in range(CLIENTS)]
    return {
        "rounds": [
            [client for client in range(CLIENTS) if (hour - begins[client]) % HOURS < lengths[client]]
            for hour in range(HOURS)
        ]
    }


def participation(seeds: Seeds = 8, rounds: Rounds = ROUNDS, jobs: Jobs = 1, folder: Folder = OUT) -> None:
    """The demo with four of 16 clients per round.

    Drawn from all clients, or from those that a trace says are awake. Five minutes on one core.
    """
    check(folder, seeds, jobs)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "trace.json", day())

    def plan(method: str, way: str, seed: int) -> Planned:
        entry, options = METHODS[method]
        config = recorded.experiment(recorded.ENTRIES[entry], seed)
        config.algorithm.update(options)
        where = {"participation": "trace", "trace": str(folder / "trace.json")} if way == "trace" else {}
        config.run.update(cohort=COHORT, rounds=rounds, eval_every=min(2, rounds), **where)
        return Planned({"method": method, "participation": way, "seed": seed}, config)

    with Harness(folder / "participation.jsonl", train, jobs) as do:
        rows = do([plan(method, way, seed) for method in METHODS for way in WAYS for seed in demo.SEEDS[:seeds]])
    finish("participation", folder, participation_table(rows))


def participation_table(rows: Sequence[Row]) -> str:
    body = []
    for method, own in group(rows, "method").items():
        ways = {way: [row.test(SELECT) for row in found] for way, found in group(own, "participation").items()}
        for way, values in ways.items():
            apart = "" if way == "uniform" else difference(values, ways["uniform"])
            body.append([method, way, with_error(values), apart])
    parts = [
        "# Who takes part",
        f"The demo (digits, {CLIENTS} clients, six of one class) with {COHORT} clients per round for {ROUNDS} rounds "
        "and the demo's hyper-parameters, which were tuned with all clients in every round: partial AUC on test data "
        "of the round that validation data choose, mean ± standard error over seeds, and the difference to uniform "
        "cohorts of the same seeds.",
        f"The trace has {HOURS} rounds and begins again after the last. A client is available for {OFTEN} of them, "
        f"one client after the other; clients {RARE[0]} to {RARE[-1]}, who hold positives, for {RARELY}.",
        f"On {machines(rows)}.",
        as_markdown(body, ["method", "participation", METRICS[SELECT], "against uniform"]).strip(),
    ]
    return "\n\n".join(parts) + "\n"


TUNING_SEEDS = (100, 101, 102, 103, 104)  # none of which the demo uses
RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def settings(
    algorithms: Annotated[str, typer.Option(metavar="NAME,...", help="Some only.")] = "",
    rounds: Rounds = 0,
    jobs: Jobs = 1,
    folder: Folder = OUT,
) -> None:
    """How the demo's learning rates were chosen.

    The same rates for every algorithm, all else its default, on validation data only.
    """
    check(folder, len(RATES), jobs)
    names = {str(entry.algorithm["name"]): entry for entry in demo.ENTRIES}

    def plan(name: str, lr: float, seed: int) -> Planned:
        case = {"algorithm": name, "lr": lr, "seed": seed, **length(rounds)}
        entry = names[name]._replace(algorithm={"name": name, "lr": lr})
        return Planned(case, shorten(demo.experiment(entry, seed), case))

    wanted = algorithms.split(",") if algorithms else list(names)
    for name in wanted:
        if name not in names:
            raise unknown("algorithm", name, names)
    planned = {name: {lr: [plan(name, lr, seed) for seed in TUNING_SEEDS] for lr in RATES} for name in wanted}
    with Harness(folder / "settings.jsonl", train, jobs) as do:
        tuned = harness.tune(do, planned, SELECT)
    found = {name: {trial.choice: trial.value for trial in trials} for name, trials in tuned.items()}
    body = [[name, *(f"{by_rate[lr]:.4f}" for lr in RATES)] for name, by_rate in found.items()]
    about = f"Validation partial AUC by learning rate, mean over {len(TUNING_SEEDS)} seeds; all else is the default."
    table = as_markdown(body, ["algorithm", *(f"{lr:g}" for lr in RATES)])
    finish("settings", folder, f"# The demo's settings\n\n{about}\n\n{table}")
