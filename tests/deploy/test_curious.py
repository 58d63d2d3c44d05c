"""A curious server follows an example through the rounds, a curious site asks whose scores it reads.

Each succeeds where draws follow from the run's seed, and is no better than chance where they do not. What remains is
what the scores themselves tell.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fedxl.algorithms import build
from fedxl.algorithms.pool import Pooling
from fedxl.deploy.protocol import envelope
from fedxl.deploy.protocol.envelope import Envelope, Failure, Kind
from fedxl.deploy.server import directory
from fedxl.deploy.site import requests
from fedxl.engine.drawing import Drawing, Schedule
from fedxl.risks import partial_auc
from fedxl.risks.pairing import PoolWeights
from fedxl.sampling import Purpose
from studies.curious.attacks import (
    Success,
    Upload,
    judge,
    link_nearest,
    link_rows,
    owners_read,
    rows_by_seed,
)
from tests.conftest import Clock
from tests.deploy.federated import InProcess, config, deployed

ROUNDS, STEPS, BATCH = 5, 4, 8
SEEN = STEPS * BATCH  # scores of a side in an upload
SCHEDULE = Schedule(STEPS, BATCH, BATCH, seed=5)


class Told(NamedTuple):
    """A request and its reply, as the server has them, and what a site reads of the pool, as the site has it."""

    visits: int
    upload: dict[str, torch.Tensor]
    passive: dict[str, torch.Tensor]


class Listening(InProcess):
    """Keeps what passes by."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.told: dict[tuple[int, int], Told] = {}  # by site and round

    def _handle(self, node: int, kind: Kind, request: Envelope) -> Envelope | Failure | None:
        reply = super()._handle(node, kind, request)
        if kind == "train" and isinstance(reply, Envelope):
            read = {name: leaf for name, leaf in request.tensors.items() if name.startswith("passive.")}
            key = (int(node) - 100, request.facts["round"])
            self.told[key] = Told(request.facts["visits"], dict(reply.tensors), read)
        return reply


class Run(NamedTuple):
    told: dict[tuple[int, int], Told]
    drawn: dict[tuple[int, int], dict[float, int]]  # by site and round: which row each score of S1 is of: the truth
    counts: list[tuple[int, int]]  # positives and negatives of each site, which all parties may know


def listened(folder: Path, monkeypatch: pytest.MonkeyPatch, private: bool) -> Run:
    """A deployed run, and inside of its sites a spy that knows which example each score is of."""
    drawn: dict[tuple[int, int], dict[float, int]] = {}
    draw, upload, last = Drawing.draw, Pooling.upload, {}

    def spy_draw(self: Drawing, client: int, round: int, visits: int, pool: Any) -> Any:
        draws = draw(self, client, round, visits, pool)
        last["key"], last["rows"] = (self.first_number + client, round), draws.rows.ravel()
        return draws

    def spy_upload(self: Pooling, scores: Any) -> Any:
        drawn[last["key"]] = dict(zip(scores.a.score.flatten().tolist(), last["rows"].tolist(), strict=True))
        return upload(self, scores)

    rng = np.random.default_rng(0)
    with monkeypatch.context() as spied:
        spied.setattr(Drawing, "draw", spy_draw)
        spied.setattr(Pooling, "upload", spy_upload)
        spied.setattr(os, "urandom", rng.bytes)  # so that the test always says the same
        carrier = Listening(folder, private_draws=private, sorted_scores=private)
        plain = config("fedxl2", cohort=0, rounds=ROUNDS, local_steps=STEPS, batch1=BATCH, batch2=BATCH)
        options = {**plain.algorithm, "pool_rounds": 1, **({"order": "sorted"} if private else {})}
        deployed(folder, replace(plain, algorithm=options), carrier, private_draws=private)
    hellos = [requests.hello(site).facts for site in carrier.sites.values()]
    return Run(carrier.told, drawn, [(facts["positives"], facts["negatives"]) for facts in hellos])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[bool, Run]:
    """The same federation with today's defaults, and with all that is there against the curious."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()  # as in `impatient`, for a fixture that lives longer
        for module in (envelope, directory):
            patch.setattr(module, "time", clock)
        return {private: listened(tmp_path_factory.mktemp("f"), patch, private) for private in (False, True)}


def seen(run: Run, site: int, round: int) -> Upload:
    """S1 of an upload as the server sees it, and the truth about it."""
    told = run.told[site, round].upload
    values = torch.stack((told["scores.a.score"], told["scores.u"]), 1).numpy()
    rows = run.drawn[site, round]
    return Upload(values, np.array([rows[float(a)] for a in told["scores.a.score"]]))


def pairs(run: Run) -> Iterator[tuple[int, int]]:
    """Sites with positives, and rounds whose upload is linked with the one before. In round 0 there is no u yet."""
    return ((site, round) for site, (held, _) in enumerate(run.counts) if held for round in range(2, ROUNDS + 1))


def by_seed(run: Run, site: int, round: int) -> np.ndarray:
    """The rows that the server believes to be uploaded, from the run's seed, the site's number and its counts."""
    visits, held = run.told[site, round].visits, run.counts[site][0]
    return rows_by_seed(SCHEDULE.seed, Purpose.FIRST, site, visits, SEEN, held)


def followed(run: Run, nearest: bool) -> Success:
    found = []
    for site, round in pairs(run):
        before, after = seen(run, site, round - 1), seen(run, site, round)
        links = (
            link_nearest(before.values, after.values)
            if nearest
            else link_rows(by_seed(run, site, round - 1), by_seed(run, site, round))
        )
        found.append(judge(links, before.examples, after.examples))
    return Success(*np.mean(found, 0))


def test_with_the_runs_seed_a_server_follows_every_example(runs):
    run = runs[False]
    for site, round in pairs(run):
        upload = seen(run, site, round)
        np.testing.assert_array_equal(upload.examples, by_seed(run, site, round), "it knows which row each is of")
    assert followed(run, nearest=False).right == 1.0


def test_with_sorted_uploads_and_private_draws_it_is_no_better_than_chance(runs):
    run = runs[True]
    right, chance = followed(run, nearest=False)
    assert chance < 0.06
    assert right < 2 * chance
    known = [np.mean(seen(run, *pair).examples == by_seed(run, *pair)) for pair in pairs(run)]
    assert np.mean(known) < 0.06, "nor does it know any row"
    for site, round in pairs(run):
        assert set(by_seed(run, site, round)) != set(seen(run, site, round).examples), "nor which rows were read"


def test_what_remains_is_what_scores_tell_by_themselves(runs):
    """A score and its u move slowly. Whoever looks for the nearest ones finds some of the examples again."""
    for run in runs.values():
        right, chance = followed(run, nearest=True)
        assert 2 * chance < right < 0.9


def test_what_a_site_sends_is_in_ascending_order(runs):
    for told in runs[True].told.values():
        for name in ("scores.a.score", "scores.b.score"):
            assert bool((told.upload[name].diff() >= 0).all())
    drawn = [bool((told.upload["scores.b.score"].diff() >= 0).all()) for told in runs[False].told.values()]
    assert not any(drawn)


def recognised(run: Run, reader: int, side: int) -> Success:
    """How many of the pooled scores that a site reads it attributes to the right site. It knows seed and counts."""
    holders = [[site for site, held in enumerate(run.counts) if held[at]] for at in range(2)]
    owners = tuple(np.repeat(each, SEEN) for each in holders)
    own = build("fedxl2", partial_auc()).reading(BATCH, BATCH)
    sent, read = (("scores.a.score", "passive.a.score"), ("scores.b.score", "passive.b.score"))[side]
    found = []
    for round in range(1, ROUNDS + 1):
        whose = {float(value): site for site in holders[side] for value in run.told[site, round - 1].upload[sent]}
        truth = [whose[float(value)] for value in run.told[reader, round].passive[read].flatten()]
        pool = PoolWeights(len(owners[0]), len(owners[1]))
        guess = owners_read(SCHEDULE, own, reader, round, pool, owners)[side]  # type: ignore[arg-type]
        found.append(np.mean(guess.ravel() == np.array(truth)))
    return Success(float(np.mean(found)), 1 / len(holders[side]))


@pytest.mark.parametrize("side", [0, 1], ids=["S1", "S2"])
@pytest.mark.parametrize("reader", [0, 3], ids=["a site with both classes", "a site with one"])
def test_a_site_knows_whose_scores_it_reads_unless_the_server_draws_them_in_secret(runs, reader, side):
    assert recognised(runs[False], reader, side).right == 1.0
    right, chance = recognised(runs[True], reader, side)
    assert abs(right - chance) < 0.12
