"""Differential privacy at sites: noise from their own seeds, one answer a round, and what a simulation gives."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedxl import UserError, tree
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.site import requests
from fedxl.deploy.storage import SEED_FILE, kept_seed
from fedxl.engine.drawing import Secrets
from fedxl.training.run_writer import load_checkpoint
from tests.deploy import test_secure_sites as secure_sites
from tests.deploy.federated import SITES, InProcess, assert_same, config, copied, deployed, simulated

pytestmark = pytest.mark.usefixtures("impatient")
PRIVATE = {"level": "free", "pool_u": "server", "dp_clip": 0.2, "dp_noise": 2.0, "dp_score_noise": 1.0}


class Keeping(InProcess):
    """Remembers what the first site was asked."""

    def send(self, envelopes, kind, seconds):
        if kind == "train" and "100" in envelopes:
            self.__dict__.setdefault("asked", []).append(copied(envelopes["100"]))
        return super().send(envelopes, kind, seconds)


def experiment(**run):
    plain = config("fedxl2", **run)
    return replace(plain, algorithm={**plain.algorithm, **PRIVATE}, risk={"name": "pauc", "scores": "sigmoid"})


def test_sites_draw_noise_of_their_own_and_come_to_what_is_simulated_with_it(tmp_path):
    carrier = InProcess(tmp_path)
    lost = lambda reply: Envelope({**reply.facts, "round": 99}, reply.tensors)  # noqa: E731
    carrier.faults = {(number, 1): lost for number in range(4)}  # so that round 1 is requested once more
    private = experiment(rounds=2)
    found = deployed(tmp_path, private, carrier, minimum=3)
    run = json.loads((tmp_path / "server" / "run" / "sites.json").read_text())["run"]
    seeds = {number: kept_seed(site.state / run / SEED_FILE) for number, site in enumerate(carrier.sites.values())}
    assert len(set(seeds.values())) == len(SITES)
    known = simulated(private)
    assert_same(found, simulated(private, Secrets(noise=seeds)))
    apart = tree.norm(tree.map(torch.sub, found.weights.params, known.weights.params))
    assert float(apart) > 5e-3, "who knows the run's seed knows nothing of the noise"
    spent = json.loads((tmp_path / "server" / "run" / "metrics.jsonl").read_text().splitlines()[-1])["privacy"]
    assert spent == known.history[-1]["privacy"]


def test_a_site_gives_one_answer_under_one_noise(tmp_path):
    carrier = Keeping(tmp_path)
    deployed(tmp_path, experiment(cohort=0, rounds=1), carrier)
    mine, asked = carrier.sites["100"], carrier.asked[-1]
    first, again = (requests.train(mine, copied(asked)) for _ in range(2))
    for tensor_name, tensor in first.tensors.items():
        torch.testing.assert_close(again.tensors[tensor_name], tensor, rtol=0, atol=0, equal_nan=True)
    name = next(name for name in asked.tensors if name.startswith("server.weights.params"))
    moved = Envelope(asked.facts, {**asked.tensors, name: asked.tensors[name] + 1e-3})
    fewer = Envelope({**asked.facts, "visits": 0}, asked.tensors)
    for other in (moved, fewer):
        with pytest.raises(UserError, match="round 1 has been answered to another request"):
            requests.train(mine, other)
    with pytest.raises(UserError, match="round 2 is beyond the rounds that epsilon was stated for"):
        requests.train(mine, Envelope({**asked.facts, "round": 2}, asked.tensors))
    (mine.state / asked.facts["run"] / "answered.json").write_text("[")
    with pytest.raises(UserError, match=r"answered\.json"):
        requests.train(mine, asked)


def test_a_site_reads_on_whatever_the_server_says_and_takes_or_does_not_take(tmp_path):
    """Epsilon counts on every example being read in its turn. Visits that the server forges change nothing."""
    carrier = Keeping(tmp_path)
    deployed(tmp_path, experiment(cohort=0, rounds=3), carrier)
    mine = carrier.sites["100"]
    read = []
    for asked in carrier.asked[-3:]:
        forged = Envelope({**asked.facts, "visits": 0, "run": "f" * 16}, asked.tensors)
        requests.train(mine, forged)
        found = load_checkpoint(mine.state / ("f" * 16), asked.facts["round"])
        read.append(int(found.tensors["rounds.0"]))
    assert read == [1, 2, 3]


def again(asked, **changes):
    """The same request in another run."""
    return copied(Envelope({**asked.facts, "run": "f" * 16, **changes}, asked.tensors))


def test_a_site_answers_no_round_below_one_that_it_has_answered(tmp_path):
    """Asked backwards, each answer would be the first of the run by the count of those before it: the same batch."""
    carrier = Keeping(tmp_path)
    deployed(tmp_path, experiment(cohort=0, rounds=3), carrier)
    mine, first = carrier.sites["100"], again(carrier.asked[-1])
    told = requests.train(mine, first)
    for asked in carrier.asked[-2::-1]:
        with pytest.raises(UserError, match="has answered round 3 of this private run; of earlier ones"):
            requests.train(mine, again(asked))
    repeated = requests.train(mine, first)
    for name, tensor in told.tensors.items():
        torch.testing.assert_close(repeated.tensors[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_what_decides_on_the_reading_stays_for_as_long_as_a_private_run_lasts(tmp_path):
    """Another number or seed is another order, and fewer steps go back in the same one."""
    carrier = Keeping(tmp_path)
    deployed(tmp_path, experiment(cohort=0, rounds=2), carrier)
    mine, (first, second) = carrier.sites["100"], carrier.asked[-2:]
    requests.train(mine, again(first))
    told = json.loads(second.facts["config"])

    def changed(section, **more):
        return json.dumps({**told, section: {**told[section], **more}})

    shorter = {name: leaf[:2] if name.startswith("passive") else leaf for name, leaf in second.tensors.items()}
    for change, tensors in (
        ({"number": 1}, second.tensors),
        ({"config": changed("run", local_steps=2)}, shorter),
        ({"config": changed("run", seed=6)}, second.tensors),
        ({"config": changed("algorithm", dp_noise=3.0)}, second.tensors),
    ):
        with pytest.raises(UserError, match="this private run began with other settings, another number"):
            requests.train(mine, again(second._replace(tensors=tensors), **change))
    requests.train(mine, again(second, config=changed("run", rounds=9)))


def test_secure_sums_compare_the_draws_that_the_site_made_not_those_that_the_server_names(tmp_path, monkeypatch):
    """A server that says 0 visits in every round gets other examples each time, and the site knows it."""
    monkeypatch.setattr(secure_sites.os, "fsync", lambda descriptor: None)

    class Forgetful(secure_sites.Secure):
        def send(self, envelopes, kind, seconds):
            if kind == "train":
                envelopes = {
                    node: each._replace(facts={**each.facts, "visits": 0}) for node, each in envelopes.items()
                }
            return super().send(envelopes, kind, seconds)

    plain = experiment(cohort=0, rounds=2)
    summed = replace(plain, algorithm={**plain.algorithm, "fixed_point": 64})
    carrier = Forgetful(tmp_path)
    assert deployed(tmp_path, summed, carrier, secure=True).history[-1]["round"] == 2
    run = json.loads((tmp_path / "server" / "run" / "sites.json").read_text())["run"]
    for site in carrier.sites.values():
        assert json.loads((site.state / run / "secure.json").read_text())["added"] == {"1": 1, "2": 2}


def test_an_answer_from_another_state_is_refused(tmp_path):
    """The same request, but what the site knew is gone: two answers under one noise."""
    carrier = Keeping(tmp_path)
    deployed(tmp_path, experiment(cohort=0, rounds=3), carrier)
    mine, asked = carrier.sites["100"], carrier.asked[-2]
    for file in (mine.state / asked.facts["run"]).glob("checkpoints/*"):
        file.unlink()
    with pytest.raises(UserError, match="has been answered to another request"):
        requests.train(mine, asked)


def test_a_site_believes_no_share_in_a_class_that_it_lacks(tmp_path):
    """It would score and train on stand-ins, which nothing accounts for."""
    carrier = InProcess(tmp_path)
    asked = []
    carrier.faults = {(3, 1): lambda reply: asked.append(reply) or reply}
    sent = []
    send = carrier.send

    def kept(envelopes, kind, seconds):
        if kind == "train" and "103" in envelopes:
            sent.append(copied(envelopes["103"]))
        return send(envelopes, kind, seconds)

    carrier.send = kept
    deployed(tmp_path, config("fedxl2", cohort=0, rounds=1), carrier)
    for part in ("share.factors", "share.mass"):
        forged = copied(sent[-1])
        forged.tensors[part] = torch.ones_like(forged.tensors[part])
        with pytest.raises(UserError, match="counts examples of S1, of which this site has none"):
            requests.train(carrier.sites["103"], forged)
