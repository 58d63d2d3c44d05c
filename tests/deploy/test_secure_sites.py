"""Secure sums of sites without a network: the same bits as a plain sum, with sites lost at every step."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedxl import UserError, tree
from fedxl.config.experiment import Config
from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.deploy.provision import keys
from fedxl.deploy.server.secure import SecureEngine
from fedxl.deploy.site import requests, secure
from fedxl.training.settings import Hooks
from tests.deploy import test_backbone as backbone
from tests.deploy.federated import SITES, InProcess, assert_same, config, deployed, simulated

pytestmark = pytest.mark.usefixtures("impatient", "forgetful")
AUTHORITY = keys.new_authority()
KEYS = [keys.new_key() for _ in SITES]


@pytest.fixture
def forgetful(monkeypatch) -> None:
    """A disk that need not survive a power cut: the steps of a sum are written down one by one."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def exact(algorithm: str, bits: int = 64, **run: Any) -> Config:
    plain = config(algorithm, **run)
    return replace(plain, algorithm={**plain.algorithm, "fixed_point": bits})


def lending(**run: Any) -> Config:
    found = exact("fedxl2", **run)
    return replace(found, algorithm={**found.algorithm, "one_class": "lend"})


def certify(folder: Path, name: str, key: keys.Key, authority: keys.Authority = AUTHORITY) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    certificate = keys.site_certificate(name, key.public_key(), authority)
    (folder / "site.key").write_bytes(keys.private_pem(key))
    (folder / "site.crt").write_bytes(keys.certificate_pem(certificate))
    (folder / "ca.crt").write_bytes(keys.certificate_pem(AUTHORITY.certificate))


@pytest.fixture(autouse=True)
def _known_seed(monkeypatch):
    """Secure sums need draws that the server does not know. Here they are those of the run, to be compared."""
    monkeypatch.setattr(requests, "kept_seed", lambda path: config("fedxl2").run["seed"])


class Secure(InProcess):
    """Sites with keys. `lost` are steps that a site does not come to: (step, site, round)."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **{"private_draws": True, **settings})
        for name, key in zip(SITES, KEYS, strict=True):
            certify(folder / name, name, key)
        self.lost: set[tuple[str, int, int]] = set()
        self.round = 0
        self.seen: list[tuple[int, str, Envelope]] = []  # all that the server received

    def _handle(self, node: int, kind: Any, request: Envelope) -> Envelope | Failure | None:
        self.round = request.facts.get("round", self.round)
        step = request.facts.get("secure", "") if kind == "secure" else kind
        where = (step, int(node) - 100, self.round)
        if where in self.lost:
            self.lost.remove(where)
            return Failure("the node has died")
        reply = super()._handle(node, kind, request)
        if isinstance(reply, Envelope):
            self.seen.append((int(node) - 100, step, reply))
        return reply


@pytest.mark.parametrize(("algorithm", "bits"), [("fedxl1", 32), ("fedxl2", 64), ("local_pair", 64)])
def test_a_secure_run_comes_to_the_bits_of_a_simulation_that_sums_whole_numbers(tmp_path, algorithm, bits):
    experiment = exact(algorithm, bits, rounds=2)
    assert_same(deployed(tmp_path, experiment, Secure(tmp_path), secure=True), simulated(experiment))


def test_plain_sites_come_to_them_too_and_floats_come_close(tmp_path):
    experiment = exact("fedxl2", rounds=2)
    found = simulated(experiment)
    assert_same(deployed(tmp_path, experiment), found)
    floats = tree.leaves(simulated(config("fedxl2", rounds=2)).weights)
    for one, other in zip(tree.leaves(found.weights), floats, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_a_site_that_is_lost_at_any_step_stops_nothing(tmp_path):
    """The sum is that of the sites whose updates have arrived, to the last bit."""
    experiment, lines = exact("local_sgd", cohort=0, rounds=5), list[str]()
    carrier, reference = Secure(tmp_path / "secure"), InProcess(tmp_path / "plain")
    steps = ("keys", "shares", "train", "consent", "unmask")
    carrier.lost = {(step, 1, round) for round, step in enumerate(steps, start=1)}
    # Who is lost at the last two steps is in the sum.
    reference.faults = {(1, round): Failure("the node has died") for round in (1, 2, 3)}
    found = deployed(tmp_path / "secure", experiment, carrier, Hooks(say=lines.append), secure=True)
    assert_same(found, deployed(tmp_path / "plain", experiment, reference))
    assert not carrier.lost, "it was lost each time"
    assert sum("b: " in line and "the node has died" in line for line in lines) == 5
    assert not any("discarded" in line for line in lines), "and the first attempts were enough"


def test_with_too_few_left_the_round_is_repeated_with_new_masks(tmp_path):
    """Of four sites three must be left."""
    experiment, lines = exact("local_sgd", cohort=0, rounds=4), list[str]()
    carrier = Secure(tmp_path)
    steps = ("shares", "train", "consent", "unmask")
    carrier.lost = {(step, site, round) for round, step in enumerate(steps, start=1) for site in (1, 2)}
    found = deployed(tmp_path, experiment, carrier, Hooks(say=lines.append), secure=True)
    assert_same(found, simulated(experiment))
    repeated = [line for line in lines if "discarded" in line or "no secure sum" in line]
    assert len(repeated) == 4
    assert all("2 sites have sent" in line and "and 3 must" in line for line in repeated)
    mine = [reply for number, _, reply in carrier.seen if number == 3]
    sent = [reply.tensors["masked"].numpy() for reply in mine if reply.facts.get("round") == 3]
    assert len(sent) == 2, "the site came to the same update again"
    assert (sent[0] != sent[1]).all()
    told = [reply.facts["keys"]["mask"] for reply in mine if "keys" in reply.facts]
    assert len(set(told)) == len(told) == 8


def test_a_round_under_another_number_is_not_added_again(tmp_path, monkeypatch):
    """Examples follow from the visits. A server that forgets to count them would get the same updates twice."""
    carrier, lines, usable = Secure(tmp_path), list[str](), SecureEngine._usable

    def forgetful(self: SecureEngine, phase: Any, server: Any, round: int, updates: Any) -> bool:
        if round == 1:
            self.visits = {name: count - 1 for name, count in self.visits.items()}
        return usable(self, phase, server, round, updates)

    monkeypatch.setattr(SecureEngine, "_usable", forgetful)
    with pytest.raises(UserError, match="fewer than"):
        deployed(
            tmp_path,
            exact("local_sgd", cohort=0, rounds=2),
            carrier,
            Hooks(say=lines.append),
            secure=True,
            patience=1,
        )
    assert sum("has added the same examples in another round than 2" in line for line in lines) == 4


def test_a_server_that_died_after_the_sum_asks_for_the_same_sites_again(tmp_path, monkeypatch):
    """d was lost in round 1 and is back. The others answer for the sum without it, and for no other."""
    carrier, lines, merged = Secure(tmp_path), list[str](), SecureEngine._merged
    carrier.lost = {("train", 3, 1)}
    experiment = exact("local_sgd", cohort=0, rounds=2)

    def dies(self: SecureEngine, *rest: Any) -> Any:
        monkeypatch.setattr(SecureEngine, "_merged", merged)
        raise KeyboardInterrupt

    monkeypatch.setattr(SecureEngine, "_merged", dies)
    with pytest.raises(KeyboardInterrupt):
        deployed(tmp_path, experiment, carrier, secure=True)
    found = deployed(tmp_path, experiment, carrier, Hooks(say=lines.append), secure=True)
    assert found.history[-1]["round"] == 2
    assert not any("discarded" in line or "be added in round" in line for line in lines)


def test_sites_without_draws_of_their_own_add_nothing(tmp_path):
    """Two runs of one experiment would have the same updates, and another sum if a site is missing in one."""
    carrier, lines = Secure(tmp_path, private_draws=False), list[str]()
    with pytest.raises(UserError, match="fewer than"):
        deployed(
            tmp_path,
            exact("local_sgd", cohort=0, rounds=1),
            carrier,
            Hooks(say=lines.append),
            secure=True,
            patience=1,
        )
    assert any("secure sums need private_draws = true" in line for line in lines)


def test_a_cohort_with_one_site_that_counts_is_told_before_the_first_round(tmp_path):
    with pytest.raises(UserError, match=r"only one site of round .* counts in the average"):
        deployed(tmp_path, lending(cohort=2, rounds=12), Secure(tmp_path), secure=True)
    assert not (tmp_path / "server" / "run" / "checkpoints").exists()


def test_sites_let_the_server_have_one_sum_of_a_round(tmp_path, monkeypatch):
    """With a second one, without d, the difference would be what d has come to."""
    carrier, sums, lines = Secure(tmp_path), list[frozenset[int]](), list[str]()

    def unusable(self: SecureEngine, *rest: Any) -> bool:
        sums.append(frozenset(self.sum.masked) if self.sum else frozenset())
        carrier.lost = {("train", 3, 1)}
        return False

    monkeypatch.setattr(SecureEngine, "_usable", unusable)
    with pytest.raises(UserError, match="fewer than 1 updates 2 times"):
        deployed(
            tmp_path,
            exact("local_sgd", cohort=0, rounds=1),
            carrier,
            Hooks(say=lines.append),
            secure=True,
            patience=2,
        )
    assert sums == [frozenset(range(4))]
    assert sum("has agreed to another sum in round 1" in line for line in lines) == 3


def test_the_server_receives_nothing_of_one_sites_weights_and_G(tmp_path, monkeypatch):
    """All that it receives is compared with what each site had come to."""
    own: dict[tuple[int, int], np.ndarray] = {}
    plain, disclosed = {}, secure.disclosed

    def noted(site: Any, request: Envelope, algorithm: Any, phase: Any, server: Any, update: Any) -> Any:
        sent = disclosed(site, request, algorithm, phase, server, update)
        key = (request.facts["number"], request.facts["round"])
        plain[key] = [leaf.flatten().numpy() for leaf in tree.leaves((update.weights, update.G))]
        if "masked" in sent:
            one = tree.map(lambda leaf: leaf[None], update)
            own[key] = secure.flat(secure.codes(64, algorithm, server, one)).numpy()
        return sent

    monkeypatch.setattr(requests.secure, "disclosed", noted)
    carrier, sums = Secure(tmp_path), dict[int, np.ndarray]()
    merged = SecureEngine._merged

    def summed(self: SecureEngine, server: Any, updates: Any) -> Any:
        sums[carrier.round] = self.total.numpy()
        assert self.sum is None or set(self.sum.masked) == {n for n, round in own if round == carrier.round}
        return merged(self, server, updates)

    monkeypatch.setattr(SecureEngine, "_merged", summed)
    deployed(tmp_path, lending(cohort=0, rounds=2), carrier, secure=True)
    assert {round for _, round in own} == {1, 2}
    for round in (1, 2):
        codes = [codes for (_, each), codes in own.items() if each == round]
        assert len(codes) == 3, "one site holds one class, and lends its scores only"
        assert np.array_equal(sums[round], np.sum(codes, axis=0)), "the sum is that of the codes, exactly"
    for number, step, reply in carrier.seen:
        assert not any(name.startswith(("weights", "G")) for name in reply.tensors)
        if step != "train":
            assert not reply.tensors
            continue
        round = reply.facts["round"]
        values = np.concatenate([t.double().flatten().numpy() for n, t in reply.tensors.items() if n != "masked"])
        mine = np.concatenate(plain[number, round])
        assert not np.isin(mine[mine != 0], values).any(), "no number of its weights is among what it sent"
        if "masked" in reply.tensors:
            masked = reply.tensors["masked"].numpy()
            for codes in (own[number, round], sums[round]):
                assert not (masked == codes).any()
                like = np.corrcoef(masked.astype(float), codes.astype(float))[0, 1]
                assert abs(like) < 5 / np.sqrt(len(codes)), "it does not even lean towards them"
        else:
            assert round == 0 or (number, round) not in own


def test_a_sum_that_no_honest_sites_come_to_is_refused_and_the_round_repeated(tmp_path):
    experiment, lines = exact("local_sgd", cohort=0, rounds=1), list[str]()
    carrier = Secure(tmp_path)

    def forged(reply: Envelope) -> Envelope:
        return Envelope(reply.facts, {**reply.tensors, "masked": reply.tensors["masked"] + 2**62 + 2**61})

    carrier.faults = {(1, 1): forged}
    found = deployed(tmp_path, experiment, carrier, Hooks(say=lines.append), secure=True)
    assert any("their sum cannot be used: the sum of the changes is out of the range" in line for line in lines)
    assert_same(found, simulated(experiment))


def test_a_server_that_sends_sites_different_models_gets_noise(tmp_path):
    """All but one get a model that learns nothing, so that the sum would be the update of that one."""

    class Unfair(Secure):
        def _handle(self, node: int, kind: Any, request: Envelope) -> Any:
            if kind == "train" and node != "101":
                dead = {name: t * 0 if "weights.params" in name else t for name, t in request.tensors.items()}
                assert any(not torch.equal(dead[name], t) for name, t in request.tensors.items())
                request = request._replace(tensors=dead)
            return super()._handle(node, kind, request)

    carrier, lines = Unfair(tmp_path), list[str]()
    experiment = exact("local_sgd", cohort=0, rounds=1)
    with pytest.raises(UserError, match="fewer than 1 updates"):
        deployed(tmp_path, experiment, carrier, Hooks(say=lines.append), secure=True, patience=1)
    assert any("the sum of the changes is out of the range" in line for line in lines)


def test_shares_that_do_not_fit_are_found(tmp_path):
    class Lying(Secure):
        def _handle(self, node: int, kind: Any, request: Envelope) -> Any:
            reply = super()._handle(node, kind, request)
            if node == "100" and request.facts.get("secure") == "unmask" and isinstance(reply, Envelope):
                return Envelope({**reply.facts, "shares": {**reply.facts["shares"], "1": "00" * 66}}, {})
            return reply

    lines = list[str]()
    with pytest.raises(UserError, match="fewer than 1 updates"):
        deployed(
            tmp_path, exact("local_sgd", rounds=1, cohort=0), Lying(tmp_path), Hooks(say=lines.append), secure=True,
            patience=1,
        )  # fmt: skip
    assert any("the shares of site 1's s" in line and "do not fit together" in line for line in lines)


def test_a_site_may_insist_on_it_and_on_how_many_and_on_whom(tmp_path):
    experiment = exact("local_sgd", rounds=1, cohort=0)
    with pytest.raises(UserError, match="takes part only in secure sums"):
        deployed(tmp_path / "a", experiment, Secure(tmp_path / "a", secure=True), patience=1)
    with pytest.raises(UserError, match=r"takes part in sums of 5 sites or more \(sum_of\), not of 4"):
        deployed(tmp_path / "b", experiment, Secure(tmp_path / "b", sum_of=5), secure=True, patience=1)
    with pytest.raises(UserError, match=r"would be 25% of the sum; its site.toml allows 20% \(own_part\)"):
        deployed(tmp_path / "e", experiment, Secure(tmp_path / "e", own_part=0.2), secure=True, patience=1)
    shown = [keys.fingerprint(key.public_key()) for key in KEYS]
    with pytest.raises(UserError, match="the key of site d is not among this site's peers"):
        deployed(tmp_path / "c", experiment, Secure(tmp_path / "c", peers=shown[:3]), secure=True, patience=1)
    found = deployed(tmp_path / "d", experiment, Secure(tmp_path / "d", peers=shown, secure=True), secure=True)
    assert_same(found, simulated(experiment))


def test_a_server_cannot_put_its_own_keys_in_place_of_a_sites(tmp_path):
    """A certificate of another authority, the server's own certificate, or another site's."""
    server = keys.server_certificate("localhost", KEYS[1].public_key(), AUTHORITY)
    forgeries = {
        "other": ("not signed by a site of this federation", keys.new_authority()),
        "server": ("not signed by a site", AUTHORITY),
        "twice": ("one site takes part twice", AUTHORITY),
    }
    for name, (reason, authority) in forgeries.items():
        carrier = Secure(tmp_path / name)
        certify(tmp_path / name / "b", "a" if name == "twice" else "b", KEYS[1], authority)
        if name == "server":
            (tmp_path / name / "b" / "site.crt").write_bytes(keys.certificate_pem(server))
        lines = list[str]()
        experiment = exact("local_sgd", rounds=1, cohort=0)
        with pytest.raises(UserError, match="fewer than 1 updates"):
            deployed(tmp_path / name, experiment, carrier, Hooks(say=lines.append), secure=True, patience=1)
        assert any(reason in line for line in lines), (name, lines)


def test_what_cannot_work_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"set fixed_point = 64 \(or 32\) in \[algorithm\]"):
        deployed(tmp_path / "a", config("fedxl2"), Secure(tmp_path / "a"), secure=True)
    with pytest.raises(UserError, match='needs wire = "float32"'):
        deployed(tmp_path / "b", exact("fedxl2"), Secure(tmp_path / "b"), secure=True, wire="bfloat16")
    with pytest.raises(UserError, match="fixed_point is not for CODASCA"):
        deployed(tmp_path / "c", exact("codasca"), Secure(tmp_path / "c"), secure=True)
    with pytest.raises(UserError, match="only one site of round 1 counts in the average"):
        deployed(tmp_path / "d", exact("local_sgd", cohort=1), Secure(tmp_path / "d"), secure=True)
    with pytest.raises(UserError, match=r"needs site\.key, site\.crt and ca\.crt"):
        deployed(tmp_path / "e", exact("local_sgd"), InProcess(tmp_path / "e"), secure=True, patience=1)


def test_a_site_remembers_on_its_disk_what_it_has_answered(tmp_path):
    """A server that asks again, in another way, after any crash: nothing is answered twice."""
    carrier = Secure(tmp_path)
    asked = list[tuple[int, Envelope]]()
    handle = carrier._handle

    def noted(node: int, kind: Any, request: Envelope) -> Any:
        if kind in ("secure", "train"):
            asked.append((node, request))
        return handle(node, kind, request)

    carrier._handle = noted  # type: ignore[method-assign]
    deployed(tmp_path, exact("local_sgd", cohort=0, rounds=1), carrier, secure=True)
    site = carrier.sites["100"]
    (file,) = site.state.rglob(secure.FILE)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    state = json.loads(file.read_text())["state"]
    assert (state["seed"], state["mask_key"], state["seal_key"], state["held"]) == ("", "", "", {})
    steps = {str(request.facts["secure"]): request for node, request in asked if node == "100"}
    reasons = {"keys": "part in that secure sum before", **dict.fromkeys(("shares", "consent", "unmask"), "once")}
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=reason):
            secure.step(site, steps[name])
    train = next(request for node, request in asked if node == "100" and "base" in request.facts)
    with pytest.raises(ValueError, match="once: the last one was unmask"):
        requests.train(site, train)
    with pytest.raises(ValueError, match="no such step"):
        secure.step(site, Envelope({**steps["keys"].facts, "secure": "masks"}, {}))
    with pytest.raises(ValueError, match="the run id is malformed"):
        secure.step(site, Envelope({**steps["keys"].facts, "run": "../up"}, {}))
    begun = Envelope({**steps["keys"].facts, "session": "0" * 32}, {})
    secure.step(site, begun)
    with pytest.raises(ValueError, match="knows nothing of that secure sum"):
        secure.step(site, steps["unmask"])


def test_sums_are_secret_with_a_frozen_backbone_too(tmp_path):
    torch.manual_seed(7)
    torch.save(backbone.network((64,), 1).state_dict(), tmp_path / "pretrained.pt")
    model = {"name": backbone.NAME, "weights": str(tmp_path / "pretrained.pt"), "train": ["2"]}
    experiment, carrier = replace(exact("fedxl2"), model=model), Secure(tmp_path, models=(backbone.NAME,))
    assert_same(deployed(tmp_path, experiment, carrier, secure=True), simulated(experiment))
