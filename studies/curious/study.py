"""The demo as a curious server and a curious site see it, and what the options against them cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from fedxl import sampling
from fedxl.config.experiment import Config, simulate
from fedxl.engine.drawing import NO_SECRETS, Secrets, host_weights
from fedxl.engine.simulator import Simulator
from fedxl.experiments import demo
from fedxl.models import weights_of
from fedxl.reporting.text import as_markdown, mean_with_spread
from fedxl.risks.pairing import PoolWeights
from fedxl.sampling import Indices, Purpose
from fedxl.training.rounds import play_round
from fedxl.training.settings import Hooks
from fedxl.training.trainer import train
from studies import pictures, recorded
from studies.curious import origins
from studies.curious.attacks import Success, Upload, judge, link_nearest, link_rows, owners_read, rows_by_seed
from studies.harness import Harness, Outcome, Planned, Row, difference, group, machine, machines
from studies.options import OUT, Folder, Jobs, Rounds, check, finish, length, shorten

METRIC = f"pauc@{demo.MAX_FPR:g}"
SEEDS = demo.SEEDS[:3]  # of the attacks
OTHER = 1000  # added to a seed for draws that have nothing to do with those of the same seed
# The demo as it is, with all that is there against the curious, and, to compare, with other seeds and nothing else.
PLAIN, PRIVATE, RESEEDED = "as it is", "sorted, private draws", "other draws"
ARMS = (PLAIN, PRIVATE, RESEEDED)
SIDES = {"first": "S1", "second": "S2"}
# What the server sees and does: uploads sorted, sites with private draws, how it links entries, and of which sides.
SERVER = {
    "the run's seed, uploads in the order of draws": (False, False, "seed", tuple(SIDES)),
    "the run's seed, uploads sorted": (True, False, "seed", tuple(SIDES)),
    "the run's seed, uploads sorted, private draws": (True, True, "seed", tuple(SIDES)),
    "the nearest score": (True, True, "nearest score", tuple(SIDES)),
    "the nearest u": (True, True, "nearest u", ("first",)),
    "the nearest score and u": (True, True, "nearest", ("first",)),
}
SITE = {"seed": False, "server's secret": True}  # what the pool is drawn from, and whether draws are private
ABOUT = (
    "The demo's FeDXL2 (digits, 16 clients). A curious server links each pooled score of a client with one of the "
    "round before. A link is right if both are of one example; only scores whose example was read in both rounds "
    "count. Chance: a link drawn at random. A client of the demo reads each example about ten times per round."
)
OWNERS = (
    "The attacker sees the pool of each round and guesses the site of each entry, and of each whole upload. It knows "
    f"all owners of {origins.REFERENCES} rounds, the last before the attacked one unless a row says otherwise, and "
    f"asks the {origins.NEIGHBOURS} entries of these that are nearest by rank in their pool. Fewer scores and noise "
    'change what is seen, not the training. Without u: as with `pool_u = "server"`.'
)


class Sides(NamedTuple):
    first: Upload | None  # None: the client holds nothing of this side
    second: Upload | None


class Round(NamedTuple):
    """What a client uploaded in a round, and how often it had taken part before."""

    visits: int
    sides: Sides


def make_secrets(clients: int, seed: int) -> Secrets:
    """Seeds as a server and its sites would make them; here they follow from the seed, so that a study repeats."""
    rng = np.random.default_rng(seed)
    made = [int.from_bytes(rng.bytes(16), "big") | sampling.SECRET for _ in range(clients + 1)]
    return Secrets(dict(enumerate(made[1:])), made[0])


def config_of(case: Mapping[str, Any]) -> Config:
    entry = recorded.FEDXL2
    order = {"order": "sorted"} if case.get("draws") == PRIVATE else {}
    return shorten(recorded.experiment(entry._replace(algorithm={**entry.algorithm, **order}), case["seed"]), case)


def cases(seeds: Sequence[int], attacked: Sequence[int]) -> list[dict[str, Any]]:
    """Runs that are attacked, runs of each arm whose metrics are compared, and runs whose owners are guessed."""
    runs = [{"seed": seed} for seed in attacked] + [{"draws": arm, "seed": seed} for seed in seeds for arm in ARMS]
    return runs + [{"guess": "owner", "seed": seed} for seed in attacked]


def run_case(planned: Planned) -> Outcome:
    """Attacks on a run, guesses of owners or, if its case names draws, its metrics."""
    if "guess" in planned.case:
        return run_guesses(planned.case)
    return run_cost(planned.case) if "draws" in planned.case else run_attacks(planned.case)


def run_cost(case: Mapping[str, Any]) -> Outcome:
    """Partial AUC on test data of a run of the demo."""
    arm, seed = case["draws"], case["seed"]
    simulation = simulate(config_of(case), lambda line: None)
    if arm != PLAIN:
        secrets = make_secrets(simulation.num_clients, seed if arm == PRIVATE else OTHER + seed)
        simulation.engine = replace(simulation.engine, secrets=secrets)
    found = train(simulation, Hooks(say=lambda line: None), None)
    assert found.server is not None
    last = simulation.examiner.examine(found.server.weights, "test").metrics[METRIC]
    test = {"chosen": round(found.metrics["test"][METRIC], 8), "last": round(last, 8)}
    return {"test": test, "on": machine()}, {}


def run_attacks(case: Mapping[str, Any]) -> Outcome:
    """How many links of a curious server, and guesses of a curious site, are right: means over rounds and clients."""
    config = config_of(case)
    clients = len(simulate(config, lambda line: None).engine.data.parts)
    runs = {
        private: Played(config, make_secrets(clients, case["seed"]) if private else NO_SECRETS)
        for private in (False, True)
    }
    links = {
        f"{name}, {SIDES[side]}": _links(runs[private], side, in_order, how)
        for name, (in_order, private, how, sides) in SERVER.items()
        for side in sides
    }
    found = {
        "server": {name: _mean(each) for name, each in links.items()},
        "site": {
            f"{name}, {SIDES[side]}": _mean([[each[at]] for each in runs[private].guesses])
            for name, private in SITE.items()
            for at, side in enumerate(SIDES)
        },
    }
    curves = {name: np.array([np.nanmean(each, 0)[0] for each in links[name]]) for name in links if name[-2:] == "S1"}
    return {**found, "on": machine()}, curves


def run_guesses(case: Mapping[str, Any]) -> Outcome:
    """How many pooled scores, and whole uploads, are assigned to the site that they are of."""
    rounds = Played(config_of(case), NO_SECRETS).rounds
    found = {}
    for side, short in SIDES.items():
        uploads = [[getattr(client.sides, side) for client in each] for each in rounds]
        for name, view in origins.VIEWS.items():
            shares = origins.attack(uploads, view, case["seed"])._asdict()
            found[f"{name}, {short}"] = {key: round(value, 8) for key, value in shares.items()}
    return {"owner": found, "on": machine()}, {}


class Played:
    """A run, of which every upload and every draw from the pool is kept."""

    def __init__(self, config: Config, secrets: Secrets) -> None:
        simulation = simulate(config, lambda line: None)
        self.engine: Simulator = replace(simulation.engine, secrets=secrets)
        self.rounds: list[list[Round]] = []  # by round, then by client
        self.guesses: list[tuple[Success, Success]] = []  # of a curious site, whose S1 and S2 it reads
        algorithm, settings = simulation.problem.algorithm, simulation.problem.settings
        server, everyone = algorithm.init(weights_of(simulation.problem.model)), range(simulation.num_clients)
        for number in range(algorithm.first_round, settings.rounds + 1):
            weights = algorithm.phase(number).pool_weights(server)
            if weights is not None:
                self.guesses.append(self._guess(number, host_weights(weights)))
            visits = [self.engine.store.visits(client) for client in everyone]
            examples = [self.engine.drawing.draw(one, number, visits[one], None).examples for one in everyone]
            server, updates = play_round(algorithm, self.engine, server, number, np.array(everyone))
            self.rounds.append([self._seen(updates, client, visits[client], examples[client]) for client in everyone])

    def _seen(self, updates: Any, client: int, visits: int, examples: Indices) -> Round:
        size1 = self.engine.reading.size1
        (a, u, b), mass = updates.scores, updates.share.mass[client]
        columns = np.stack([leaf[client].double().numpy() for leaf in (a.score, u)], 1)
        return Round(
            visits,
            Sides(
                Upload(columns, examples[:, :size1].ravel()) if float(mass[0]) else None,
                Upload(b.score[client].double().numpy()[:, None], examples[:, size1:].ravel())
                if float(mass[1])
                else None,
            ),
        )

    def _guess(self, round: int, pool: PoolWeights) -> tuple[Success, Success]:
        """Client 0 guesses whose scores it reads, from the run's seed."""
        last = self.rounds[-1]
        owners = tuple(
            np.concatenate(
                [np.full(len(side.values), client) for client, it in enumerate(last) if (side := it.sides[at])]
            )
            for at in range(2)
        )
        drawing = self.engine.drawing
        known = (drawing.schedule, drawing.reading, 0, round, pool, (owners[0], owners[1]))
        pairs = zip(owners_read(*known), owners_read(*known, drawing.secrets.pool), owners, strict=True)
        first, second = (
            Success(float((guess == truth).mean()), float(np.bincount(owner).max() / len(owner)))
            for guess, truth, owner in pairs
        )
        return first, second


def _links(run: Played, side: str, in_order: bool, how: str) -> list[list[Success]]:
    """Each client's upload of a round linked with that of the round before, by round. In round 0 there is no u."""
    purpose = Purpose.FIRST if side == "first" else Purpose.SECOND
    held = [getattr(each, side) for each in run.engine.drawing.held]
    columns = {"nearest": slice(None), "nearest score": slice(0, 1), "nearest u": slice(1, 2)}
    found: list[list[Success]] = []
    for earlier, later in zip(run.rounds[1:], run.rounds[2:], strict=False):
        found.append([])
        for client, pair in enumerate(zip(earlier, later, strict=True)):
            one, other = (getattr(each.sides, side) for each in pair)
            if one is None or other is None:
                continue
            before, after = (one.sorted(), other.sorted()) if in_order else (one, other)
            if how == "seed":
                known = run.engine.schedule.seed, purpose, client
                sizes = len(before.values), len(held[client])
                links = link_rows(*(rows_by_seed(*known, it.visits, *sizes) for it in pair))
            else:
                links = link_nearest(before.values[:, columns[how]], after.values[:, columns[how]])
            found[-1].append(judge(links, before.examples, after.examples))
    return found


def _mean(found: Sequence[Sequence[Success]]) -> dict[str, float]:
    right, chance = np.nanmean([one for each in found for one in each], 0)
    return {"right": round(float(right), 8), "chance": round(float(chance), 8)}


def markdown(rows: Sequence[Row]) -> str:
    attacked, guessed = ([row.found for row in rows if who in row.found] for who in ("server", "owner"))
    parts = [
        "# Curious parties",
        ABOUT,
        f"On {machines(rows)}.",
        "## A server that follows an example",
        f"{len(attacked)} seeds.",
        successes(attacked, "server", "links by"),
        "## A site that asks whose scores it reads",
        "Site 0 works out whose each score is that it reads of the pool. Chance: it names whoever fills most of it.",
        successes(attacked, "site", "the pool is drawn from"),
        "## Whose a score is, by its value",
        OWNERS,
        successes(guessed, "owner", "what is seen", ("entries", "uploads", "chance")),
        "## What it costs",
        'Partial AUC (FPR <= 0.3) on test data, mean ± standard deviation. "Other draws" is the demo with other seeds'
        f" and nothing else: by so much do runs differ that differ in their draws alone. {costs(rows)}",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def successes(
    attacked: Sequence[Mapping[str, Any]], who: str, by: str, shares: Sequence[str] = ("right", "chance")
) -> str:
    """How many links or guesses are right, and how many would be by chance."""
    body = []
    for name in attacked[0][who]:
        what, _, side = name.rpartition(", ")
        cells = [mean_with_spread([found[who][name][key] for found in attacked]) for key in shares]
        body.append([what, side, *cells])
    return as_markdown(body, [by, "side", *shares])


def costs(rows: Sequence[Row]) -> str:
    """Each arm against the demo as it is, seed by seed: mean difference and its standard error."""
    arms = group([row for row in rows if "draws" in row.case], "draws")
    by_seed = {arm: {row.case["seed"]: row for row in own} for arm, own in arms.items()}
    seeds = sorted(set.intersection(*(set(own) for own in by_seed.values())))
    body = []
    for arm in ARMS:
        cells = [arm]
        for what in ("chosen", "last"):
            plain, own = ([by_seed[name][seed].test(what) for seed in seeds] for name in (PLAIN, arm))
            cells += [mean_with_spread(own), "" if arm == PLAIN else difference(own, plain)]
        body.append(cells)
    against = "against the demo as it is (standard error)"
    return f"{len(seeds)} seeds.\n\n{as_markdown(body, ['draws', 'chosen round', against, 'last round', against])}"


def draw(path: Path, rows: Sequence[Row], curves: Sequence[Mapping[str, Any]]) -> None:
    """How many links of S1 are right, round by round, for each attack."""
    lines = {
        name.removesuffix(", S1"): [
            pictures.Point(2 + place, mean) for place, mean in enumerate(np.mean([each[name] for each in curves], 0))
        ]
        for name in curves[0]
    }
    attacked = [row.found["server"] for row in rows if "server" in row.found]
    chance = float(np.mean([found[next(iter(curves[0]))]["chance"] for found in attacked]))
    panel = pictures.Panel("", "round", "links of S1 that are right", lines, reference={"chance": chance})
    pictures.lines(path, "A server that follows an example", [panel])


def command(
    seeds: Annotated[int, typer.Option(help="Seeds of the runs whose metrics are compared.")] = len(demo.SEEDS),
    attacked: Annotated[int, typer.Option(help="Seeds of the runs that are attacked.")] = len(SEEDS),
    rounds: Rounds = 0,
    jobs: Jobs = 1,
    folder: Folder = OUT,
) -> None:
    """What a curious server or site finds out.

    On the demo, and what it costs to prevent it. Five minutes on one core.
    """
    check(folder, min(seeds, attacked), jobs)
    todo = cases(demo.SEEDS[:seeds], demo.SEEDS[:attacked])
    with Harness(folder / "curious.jsonl", run_case, jobs) as do:
        rows = do([Planned({**case, **length(rounds)}) for case in todo])
        curves = [do.arrays(row) for row in rows if "server" in row.found]
    if all(curves):
        draw(folder / "curious.png", rows, curves)
    finish("curious", folder, markdown(rows))
