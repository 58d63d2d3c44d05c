"""The demo as a curious server and a curious site see it, and what the options against them cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedxl import sampling
from fedxl.config.experiment import Config, simulate
from fedxl.engine.drawing import NO_SECRETS, PoolDraws, Secrets
from fedxl.engine.simulator import Simulator
from fedxl.errors import UserError
from fedxl.experiments import demo
from fedxl.experiments.curious.attacks import (
    Success,
    Upload,
    judged,
    link_nearest,
    link_rows,
    owners_read,
    rows_by_seed,
)
from fedxl.files import write_json
from fedxl.models import weights_of
from fedxl.progress import progress
from fedxl.sampling import Indices, Purpose
from fedxl.training.hooks import Hooks
from fedxl.training.rounds import play_round
from fedxl.training.trainer import train

METRIC = f"pauc@{demo.MAX_FPR:g}"
SEEDS = demo.SEEDS[:3]  # of the attacks
OTHER = 1000  # added to a seed for draws that have nothing to do with those of the same seed
# The demo as it is, with all that is there against the curious, and, to compare, with other seeds and nothing else.
PLAIN, PRIVATE, RESEEDED = "as it is", "sorted, private draws", "other draws"
ARMS = (PLAIN, PRIVATE, RESEEDED)
BOTH = ("first", "second")
# What the server sees and does: uploads sorted, sites with private draws, how it links entries, and of which sides.
ATTACKS = {
    "the run's seed, uploads in the order of draws": (False, False, "seed", BOTH),
    "the run's seed, uploads sorted": (True, False, "seed", BOTH),
    "the run's seed, uploads sorted, private draws": (True, True, "seed", BOTH),
    "the nearest score": (True, True, "nearest score", BOTH),
    "the nearest u": (True, True, "nearest u", ("first",)),
    "the nearest score and u": (True, True, "nearest", ("first",)),
}


class Sides(NamedTuple):
    first: Upload | None  # None: the client holds nothing of this side
    second: Upload | None


class Round(NamedTuple):
    """What a client uploaded in a round, and how often it had taken part before."""

    visits: int
    sides: Sides


def secret_seeds(clients: int, seed: int) -> Secrets:
    """Seeds as a server and its sites would make them; here they follow from the seed, so that a study repeats."""
    rng = np.random.default_rng(seed)
    made = [int.from_bytes(rng.bytes(16), "big") | sampling.SECRET for _ in range(clients + 1)]
    return Secrets(dict(enumerate(made[1:])), made[0])


def config_of(seed: int, arm: str = PLAIN) -> Config:
    entry = demo.ENTRIES[0]
    order = {"order": "sorted"} if arm == PRIVATE else {}
    return demo.experiment(entry._replace(algorithm={**entry.algorithm, **order}), seed)


def run_cost(seed: int, arm: str, config: Config | None = None) -> dict[str, Any]:
    """Partial AUC on test data of a run of the demo."""
    simulation = simulate(config or config_of(seed, arm), lambda line: None)
    if arm != PLAIN:
        secrets = secret_seeds(simulation.num_clients, seed if arm == PRIVATE else OTHER + seed)
        simulation.engine = replace(simulation.engine, secrets=secrets)
    found = train(simulation, Hooks(say=lambda line: None), None)
    assert found.server is not None
    last = simulation.examiner.examine(found.server.weights, "test").metrics[METRIC]
    return {"chosen": found.metrics["test"][METRIC], "last": last}


def run_attacks(seed: int, config: Config | None = None) -> dict[str, Any]:
    """How many links of a curious server, and guesses of a curious site, are right: means over rounds and clients."""
    config = config or config_of(seed)
    clients = len(simulate(config, lambda line: None).engine.federation.parts)
    runs = {
        private: Played(config, secret_seeds(clients, seed) if private else NO_SECRETS) for private in (False, True)
    }
    server = {
        name: {side: _mean(_links(runs[private], side, in_order, how)) for side in Sides._fields if side in of}
        for name, (in_order, private, how, of) in ATTACKS.items()
    }
    site = {name: runs[private].guesses() for name, private in (("seed", False), ("server's secret", True))}
    return {"server": server, "site": site}


class Played:
    """A run, of which every upload and every draw from the pool is kept."""

    def __init__(self, config: Config, secrets: Secrets) -> None:
        simulation = simulate(config, lambda line: None)
        self.engine: Simulator = replace(simulation.engine, secrets=secrets)
        self.rounds: list[list[Round]] = []  # by round, then by client
        self.whose: list[tuple[Success, Success]] = []  # guesses of a curious site, S1's and S2's
        algorithm, settings = simulation.problem.algorithm, simulation.problem.settings
        server, everyone = algorithm.init(weights_of(simulation.problem.model)), range(simulation.num_clients)
        for number in range(algorithm.first_round, settings.rounds + 1):
            weights = algorithm.phase(number).pool_weights(server)
            if weights is not None:
                self.whose.append(self._guess(number, PoolDraws.of(weights)))
            visits = [self.engine.store.visits(client) for client in everyone]
            examples = [
                self.engine.drawing.draw(client, number, visits[client], None).examples for client in everyone
            ]
            server, updates = play_round(algorithm, self.engine, server, number, np.array(everyone))
            self.rounds.append([self._seen(updates, client, visits[client], examples[client]) for client in everyone])

    def _seen(self, updates: Any, client: int, visits: int, examples: Indices) -> Round:
        size1 = self.engine.reading.size1
        first, second = updates.first, updates.second
        columns = np.stack([leaf[client].double().numpy() for leaf in (first.a, first.u)], 1)
        return Round(
            visits,
            Sides(
                Upload(columns, examples[:, :size1].ravel()) if float(first.weight[client, 0]) else None,
                Upload(second.b[client].double().numpy()[:, None], examples[:, size1:].ravel())
                if float(second.weight[client, 0])
                else None,
            ),
        )

    def _guess(self, round: int, pool: PoolDraws) -> tuple[Success, Success]:
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

    def guesses(self) -> dict[str, Any]:
        return {side: _mean([[each[at]] for each in self.whose]) for at, side in enumerate(Sides._fields)}


def _links(run: Played, side: str, in_order: bool, how: str) -> list[list[Success]]:
    """Each client's upload of a round linked with that of the round before, by round. In round 0 there is no u."""
    purpose = Purpose.FIRST if side == "first" else Purpose.SECOND
    held = run.engine.drawing.first if side == "first" else run.engine.drawing.second
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
            found[-1].append(judged(links, before.examples, after.examples))
    return found


def _mean(found: Sequence[Sequence[Success]]) -> dict[str, Any]:
    """Over all, and by round."""
    rounds = [np.nanmean(each, 0) for each in found]
    right, chance = np.nanmean([one for each in found for one in each], 0)
    return {"right": float(right), "chance": float(chance), "by_round": [float(each[0]) for each in rounds]}


def study(path: Path, seeds: Sequence[int] = demo.SEEDS, attacked: Sequence[int] = SEEDS) -> dict[str, Any]:
    """All runs, those that the file holds already left out; it is written after each."""
    done = _read(path)
    todo = [("attacks", seed) for seed in attacked] + [(arm, seed) for seed in seeds for arm in ARMS]
    with progress("curious parties", len(todo)) as advance:
        for kind, seed in todo:
            table = done.setdefault(kind, {})
            if str(seed) not in table:
                table[str(seed)] = run_attacks(seed) if kind == "attacks" else run_cost(seed, kind)
                write_json(path, done)
            advance(1)
    return done


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        known = all(isinstance(found.get(name, {}), dict) for name in ("attacks", *ARMS))
    except (ValueError, AttributeError):
        known = False
    if not known:
        raise UserError(f"{path} holds no results of this study; name another folder")
    return found  # type: ignore[no-any-return]
