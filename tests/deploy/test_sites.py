"""Sites and server without a network: parity with the simulator, faults, and what must not be taken."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedxl import UserError, tree, wire
from fedxl.algorithms.codasca import CODASCA, CODASCAClient, CODASCAServer
from fedxl.deploy.protocol import envelope
from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.deploy.protocol.message import FACTS_ALONE, encode, size
from fedxl.deploy.site import requests
from fedxl.models.layers import ScoreNorm
from fedxl.training.settings import Hooks
from tests.deploy.federated import (
    ALGORITHMS,
    SITES,
    InProcess,
    assert_same,
    config,
    copied,
    deployed,
    simulated,
    site_file,
)

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.mark.parametrize("weighting", ["clients", "samples"])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_sites_and_simulator_come_to_the_same_bits(tmp_path, algorithm, weighting):
    experiment = config(algorithm, weighting=weighting)
    found, expected = deployed(tmp_path, experiment), simulated(experiment)
    assert_same(found, expected)
    assert found.metrics["test"] == expected.metrics["test"]
    assert found.best_round == expected.best_round
    assert len(found.history) == 2


DEFENCES = {
    "fedxl2": {"clip_change": 1.0, "aggregation": "trimmed", "pool_u": "server", "pool_share": 0.34},
    "local_pair": {"aggregation": "trimmed"},
    "codasca": {"clip_change": 1.0, "aggregation": "krum", "hostile": 0.34},
}


@pytest.mark.parametrize("algorithm", list(DEFENCES))
def test_robust_merging_at_sites_is_what_it_is_simulated(tmp_path, algorithm):
    """Also after a restart: what is usual is in the checkpoint."""
    plain = config(algorithm, cohort=0)
    robust = replace(plain, algorithm={**plain.algorithm, **DEFENCES[algorithm]})
    deployed(tmp_path, replace(robust, run={**robust.run, "rounds": 2}))
    found, expected = deployed(tmp_path, robust), simulated(robust)
    assert_same(found, expected)
    different = zip(tree.leaves(found.weights), tree.leaves(simulated(plain).weights), strict=True)
    assert any(not torch.equal(one, other) for one, other in different), "and not what it is without"


def test_estimates_of_raw_scores_travel_in_double_precision(tmp_path):
    """The model is float32, a normalised risk's u float64; the server keeps what the simulator keeps."""
    experiment = config("fedxl2", dtype="float32")
    experiment = replace(
        experiment,
        risk={"name": "tpauc", "scores": "raw"},
        algorithm={**experiment.algorithm, "lr": 0.01},
    )
    found = deployed(tmp_path, experiment)
    assert_same(found, simulated(experiment))
    assert found.server.pool.first.u.dtype == torch.float64
    assert found.server.pool.first.entry.score.dtype == torch.float32


def test_a_round_that_is_asked_for_again_gives_the_same_bits(tmp_path):
    """A site answers, its answer is lost, and all is asked once more: it goes back to where it was."""
    carrier = InProcess(tmp_path)
    lost = {
        (number, 2): (lambda answer: Envelope({**answer.facts, "round": 99}, answer.tensors)) for number in range(4)
    }
    carrier.faults = dict(lost)
    experiment = config("fedxl2")
    found = deployed(tmp_path, experiment, carrier, minimum=3)
    assert_same(found, simulated(experiment))
    assert sum(facts["round"] == 2 for _, facts in carrier.sent if "round" in facts) == 6, "two tries of three sites"


def test_a_server_that_was_stopped_goes_on_where_it_was(tmp_path):
    experiment, carrier = config("fedxl2"), InProcess(tmp_path)
    stops = iter([False, False, True])
    hooks = Hooks(say=lambda line: None, should_stop=lambda: next(stops))
    assert deployed(tmp_path, experiment, carrier, hooks).interrupted
    # The next round is done by the sites, but the server dies before it has heard of it.
    carrier.faults = {(number, 3): "silence" for number in range(4)}
    with pytest.raises(UserError, match="it resumes from its last checkpoint"):
        deployed(tmp_path, experiment, carrier, minimum=3, patience=1, deadline=0.3)
    assert all(facts["base"] < 3 for _, facts in carrier.sent if facts.get("round") == 3)
    assert_same(deployed(tmp_path, experiment, InProcess(tmp_path)), simulated(experiment))


def nan_like(answer: Envelope, name: str) -> torch.Tensor:
    return answer.tensors[name] * math.nan


def test_who_fails_is_left_out_and_who_returns_is_used_again(tmp_path):
    experiment, carrier = config("fedxl2", cohort=0, rounds=5, eval_every=1), InProcess(tmp_path)
    carrier.faults = {
        (0, 2): Failure("the node has died"),
        (1, 2): lambda answer: Envelope(
            answer.facts, {**answer.tensors, "G:float64": answer.tensors["G:float64"] * math.nan}
        ),
    }
    found = deployed(tmp_path, experiment, carrier, minimum=2)
    dropped = [entry for record in found.history for entry in record.get("dropped", [])]
    assert [(entry["round"], entry["site"]) for entry in sorted(dropped, key=lambda e: e["site"])] == [
        (2, "a"),
        (2, "b"),
    ]
    assert {entry["reason"] for entry in dropped} == {"the node has died", "G holds NaN or infinity"}
    on_disk = (tmp_path / "server" / "run" / "metrics.jsonl").read_text()
    assert "the node has died" in on_disk
    base = {node: facts["base"] for node, facts in carrier.sent if facts.get("round") == 3}
    assert base == {"100": 1, "101": 1, "102": 2, "103": 2}, "both go back to the last round that was taken of them"
    last = {node: facts["visits"] for node, facts in carrier.sent if facts.get("round") == 5}
    assert last == {"100": 4, "101": 4, "102": 5, "103": 5}
    assert all(torch.isfinite(leaf).all() for leaf in tree.leaves(found.weights))


def test_who_was_left_out_is_told_though_the_server_stops_before_the_next_evaluation(tmp_path):
    experiment, carrier = config("local_sgd", cohort=0, eval_every=4), InProcess(tmp_path)
    carrier.faults = {(0, 1): Failure("no")}
    stops = iter([False, True])
    hooks = Hooks(say=lambda line: None, should_stop=lambda: next(stops))
    assert deployed(tmp_path, experiment, carrier, hooks, minimum=3).interrupted
    [row] = deployed(tmp_path, experiment, InProcess(tmp_path), minimum=3).history
    assert row["dropped"] == [{"round": 1, "site": "a", "reason": "no"}]
    assert [each["round"] for each in row["participants"]] == [1, 2, 3, 4]


def test_a_site_that_is_away_comes_back(tmp_path):
    class Travelling(InProcess):
        def nodes(self):
            rounds = [facts["round"] for _, facts in self.sent if "round" in facts]
            self.away = {"101"} if rounds and max(rounds) in (1, 2) else set()
            return super().nodes()

    carrier = Travelling(tmp_path)
    found = deployed(tmp_path, config("local_sgd", cohort=0, eval_every=1), carrier, minimum=3, wire="bfloat16")
    seen = [facts["round"] for node, facts in carrier.sent if node == "101" and "round" in facts]
    assert seen == [1, 4]
    assert [entry["reason"] for record in found.history for entry in record.get("dropped", [])] == [
        "it is not connected, or busy with an earlier request"
    ] * 2


class Losing(InProcess):
    """b is away in rounds 2, 3 and 5, or loses its approval then."""

    revoke = False

    def nodes(self):
        now = max((facts["round"] for _, facts in self.sent if "round" in facts), default=0)
        gone = now in (1, 2, 4)
        self.away = {"101"} if gone else set()
        self.limits = {name: 10**6 for name in SITES if not (gone and self.revoke and name == "b")}
        return super().nodes()


@pytest.mark.parametrize("revoke", [False, True])
def test_a_lost_site_is_waited_for_once_each_time_and_aloud_and_a_revoked_one_never(tmp_path, impatient, revoke):
    carrier, lines = Losing(tmp_path), list[str]()
    carrier.revoke = revoke
    experiment = config("local_sgd", cohort=0, rounds=6, eval_every=6)
    found = deployed(tmp_path, experiment, carrier, Hooks(say=lines.append), deadline=60.0)
    assert [line for line in lines if "waiting" in line] == ([] if revoke else ["waiting for b, at most 30 s"] * 2)
    assert impatient.now < 0.1 if revoke else 60 <= impatient.now < 61
    (row,) = found.history
    assert [entry["round"] for entry in row["dropped"]] == [2, 3, 5]
    assert {entry["site"] for entry in row["dropped"]} == {"b"}
    everybody = {round: list(SITES) if round not in (2, 3, 5) else ["a", "c", "d"] for round in range(1, 7)}
    assert row["participants"] == [{"round": n, "sites": names, "of": 4} for n, names in everybody.items()]


def test_who_was_in_every_round_is_known_even_if_the_server_dies_before_the_next_evaluation(tmp_path):
    """It is in the checkpoint, from which metrics.jsonl has it after the restart."""

    class Dies(InProcess):
        def send(self, envelopes, kind, seconds):
            if any(facts.get("round") == 4 for facts in (each.facts for each in envelopes.values())):
                raise KeyboardInterrupt
            return super().send(envelopes, kind, seconds)

    experiment = config("local_sgd", cohort=0, rounds=6, eval_every=6)
    with pytest.raises(KeyboardInterrupt):
        deployed(tmp_path, experiment, Dies(tmp_path))
    assert not list(tmp_path.rglob("metrics.jsonl"))
    (row,) = deployed(tmp_path, experiment).history
    assert [each["round"] for each in row["participants"]] == [1, 2, 3, 4, 5, 6]


def test_too_few_for_too_long_is_an_error_that_says_what_to_do(tmp_path):
    carrier = InProcess(tmp_path)
    carrier.faults = {(number, 1): Failure("no") for number in range(4)}
    lines: list[str] = []
    with pytest.raises(UserError, match=r"round 1 had fewer than 3 updates 1 times .*; check that sites are running"):
        deployed(tmp_path, config("local_sgd"), carrier, Hooks(say=lines.append), minimum=3, patience=1)
    assert any("nothing from" in line and line.endswith(": no") for line in lines)
    carrier.away = {"100"}
    with pytest.raises(UserError, match=r"no hello from a within 0\.1 s"):
        deployed(tmp_path / "other", config("local_sgd"), carrier, join=0.1)


GARBAGE = {
    "a name too many": (lambda t: {**t, "extra": torch.zeros(1)}, "it holds extra, which is unexpected"),
    "a name too few": (lambda t: {k: v for k, v in t.items() if k != "steps"}, "it lacks steps"),
    "a shape": (lambda t: {**t, "weights.params:float64": t["weights.params:float64"][:-1]}, "instead of float64"),
    "a type": (lambda t: {**t, "G:float64": t["G:float64"].float()}, "is float32"),
    "infinity": (lambda t: {**t, "weights.params:float64": t["weights.params:float64"] / 0}, "NaN or infinity"),
    "a count": (lambda t: {**t, "steps": torch.tensor(10**9)}, "it reports 1000000000 steps of 3"),
    "a share": (
        lambda t: {**t, "share.model": t["share.model"] * 100},
        "its share is not what the server assigned",
    ),
    "a mass": (
        lambda t: {**t, "share.mass": t["share.mass"] * 1.5},
        "its share is not what the server assigned",
    ),
    "another's number": (lambda t: {**t, "share.client": t["share.client"] + 1}, "its share is not what"),
    "the weights of scores": (lambda t: {**t, "scores.weight": torch.ones(12)}, "it holds scores.weight"),
    "too many scores": (
        lambda t: {**t, "scores.b.score": torch.zeros(1000, dtype=torch.float64)},
        "instead of float64 [15]",
    ),
    "fewer scores": (
        lambda t: {**t, **{n: t[n][:5] for n in ("scores.a.score", "scores.u")}},
        "instead of float64 [12]",
    ),
    "one score too many": (
        lambda t: {**t, "scores.b.score": torch.zeros(16, dtype=torch.float64)},
        "instead of float64 [15]",
    ),
    "u": (lambda t: {**t, "scores.u": t["scores.u"] + math.inf}, "its inner estimates u are beyond"),
}


@pytest.mark.parametrize("kind", list(GARBAGE))
def test_garbage_is_refused_with_a_reason(tmp_path, kind):
    spoil, reason = GARBAGE[kind]
    carrier = InProcess(tmp_path)
    carrier.faults = {(0, 1): lambda answer: Envelope(answer.facts, spoil(answer.tensors))}
    found = deployed(tmp_path, config("fedxl2", cohort=0, rounds=1, eval_every=1), carrier)
    [dropped] = found.history[0]["dropped"]
    assert dropped["site"] == "a"
    assert reason in dropped["reason"]


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_the_reply_to_train_has_a_limit_that_honest_ones_keep(tmp_path, name):
    sizes = []

    class Measuring(InProcess):
        def _handle(self, node, kind, request):
            reply = super()._handle(node, kind, request)
            sizes.append((kind, size(encode(reply)), self.most[node]))
            return reply

        def send(self, envelopes, kind, seconds):
            self.most = {node: each.most for node, each in envelopes.items()}
            return super().send(envelopes, kind, seconds)

    deployed(tmp_path, config(name, cohort=0, rounds=2), Measuring(tmp_path))
    assert {kind for kind, *_ in sizes} >= {"hello", "train"}
    for kind, length, most in sizes:
        if kind in ("hello", "train"):
            assert length <= most < FACTS_ALONE + 4 * length


def train_request(folder: Path, **facts) -> tuple[InProcess, Envelope]:
    """The last request of a run of one round to site a."""
    kept: list[Envelope] = []

    class Keeping(InProcess):
        def send(self, envelopes, kind, seconds):
            kept.extend(copied(envelopes["100"]) for _ in [0] if kind == "train" and "100" in envelopes)
            return super().send(envelopes, kind, seconds)

    carrier = Keeping(folder)
    deployed(folder, config("fedxl2", cohort=0, rounds=1), carrier)
    return carrier, Envelope({**kept[-1].facts, **facts}, kept[-1].tensors)


def test_a_site_takes_only_what_it_should(tmp_path):
    _, good = train_request(tmp_path)
    mine = site_file(tmp_path, 0)
    before = sorted(path.name for path in (mine.state / good.facts["run"]).iterdir())
    for facts, reason in [
        ({"version": "0.0"}, "they must be the same"),
        ({"run": "../../etc"}, "the run id is malformed"),
        ({"config": json.dumps({"model": {"name": "os:system"}})}, "does not allow the model 'os:system'"),
    ]:
        with pytest.raises(UserError, match=reason):
            requests.train(mine, Envelope({**good.facts, **facts}, good.tensors))
    with pytest.raises(wire.RefusedError, match="which is unexpected"):
        requests.train(mine, Envelope(good.facts, {**good.tensors, "more": torch.zeros(1)}))
    assert sorted(path.name for path in (mine.state / good.facts["run"]).iterdir()) == before


def test_a_site_receives_the_scores_that_it_reads_and_no_others(tmp_path):
    _, sent = train_request(tmp_path)
    steps, size = config("fedxl2").run["local_steps"], config("fedxl2").run["batch1"]
    assert sent.tensors["passive.a.score"].shape[:2] == (steps, size)
    for name in ("first.entry.score", "first.u", "second.entry.score", "second.entry.target"):
        assert sent.tensors[f"server.pool.{name}"].tolist() == [0.0], "an entry that says nothing"
    assert json.loads(sent.facts["facts_of_all"]) == {"one_class": 2.0}, "all that FeDXL needs to know of others"


@pytest.mark.parametrize("change", [lambda a: a[:-1], lambda a: a[:, :-1], lambda a: a.new_zeros(0, *a.shape[1:])])
def test_a_site_refuses_another_number_of_scores_than_it_reads(tmp_path, change):
    _, good = train_request(tmp_path)
    tensors = {**good.tensors, "passive.a.score": change(good.tensors["passive.a.score"])}
    with pytest.raises(wire.RefusedError, match=r"passive"):
        requests.train(site_file(tmp_path, 0), Envelope(good.facts, tensors))


@pytest.mark.parametrize(
    "facts",
    [
        "",
        "[]",
        '{"positive_share": 1' + "0" * 400 + "}",
        '{"positive_share": "many"}',
        '{"other": 1}',
        "[" * 2000,
        None,
    ],
)
def test_a_site_refuses_what_it_cannot_read_about_all_sites(tmp_path, facts):
    _, good = train_request(tmp_path, facts_of_all=facts)
    with pytest.raises(wire.RefusedError, match="all sites' data cannot be read"):
        requests.train(site_file(tmp_path, 0), good)


@pytest.mark.parametrize("facts", [{"round": "1"}, {"round": -1}, {"number": None}, {"base": 2.5}, {"visits": 2**40}])
def test_a_site_refuses_numbers_that_are_none(tmp_path, facts):
    _, good = train_request(tmp_path, **facts)
    with pytest.raises(wire.RefusedError, match=next(iter(facts))):
        requests.train(site_file(tmp_path, 0), good)


def test_a_lost_state_is_said_and_the_run_goes_on(tmp_path):
    _, good = train_request(tmp_path)
    mine = site_file(tmp_path, 0)
    answer = requests.train(mine, good)
    assert answer.facts["note"] == ""
    for file in (mine.state / good.facts["run"]).glob("round-*"):
        file.write_bytes(b"rubbish")
    assert "is lost" in requests.train(mine, good).facts["note"]


def test_a_codasca_site_that_lost_its_state_does_not_count_its_control_variate_twice(tmp_path, monkeypatch):
    """What it once told stays in the server's mean; begun anew at 0 it would be added a second time."""
    begun: list[tuple[CODASCAServer, CODASCAClient]] = []
    rejoin = CODASCA.rejoin

    def noted(self: CODASCA, server: CODASCAServer, rows: int) -> CODASCAClient:
        begun.append((server, rejoin(self, server, rows)))
        return begun[-1][1]

    monkeypatch.setattr(CODASCA, "rejoin", noted)
    carrier = InProcess(tmp_path)
    deployed(tmp_path, config("codasca", cohort=0, rounds=2), carrier)
    begun.clear()
    for file in carrier.sites["100"].state.glob("*/round-*"):
        file.unlink()
    lines: list[str] = []
    deployed(tmp_path, config("codasca", cohort=0, rounds=3), carrier, Hooks(say=lines.append))
    assert any("a: its state after round 2 is lost" in line for line in lines)
    server, client = begun[0]
    assert any(leaf.abs().max() > 0 for leaf in tree.leaves(server.c))
    assert all(map(torch.equal, tree.leaves(client.c), tree.leaves(server.c)))


def test_an_answer_that_came_while_another_was_worked_on_is_not_too_late(impatient):
    class Slow:
        here = (("one", Envelope({"n": 1}, {})),)

        def send(self, envelopes, kind, seconds):
            return {"one": 1, "two": 2, "three": 3}

        def forget(self, tickets):
            assert tickets == ["three"]

        def wait(self, seconds):
            impatient.sleep(seconds)

        def replies(self, tickets):
            here, self.here = self.here, ()
            yield from here

    carrier, found = Slow(), []
    for node, answer in envelope.exchange(carrier, {1: None, 2: None, 3: None}, "train", 0.5):
        found.append((node, answer))
        if node == 1:
            impatient.sleep(0.6)
            carrier.here = (("two", Envelope({"n": 2}, {})), ("three", Failure("the message has expired")))
    assert [node for node, _ in found] == [1, 2, 3]
    assert found[1][1].facts == {"n": 2}
    assert found[2][1] == Failure("no reply within 0.5 s")


def test_half_precision_halves_what_networks_weigh_on_the_wire():
    message = {"w": torch.randn(1000)}
    whole, half = wire.flatten(message), wire.flatten(message, "bfloat16")
    sizes = [sum(t.numel() * t.element_size() for t in sent.values()) for sent in (whole, half)]
    assert sizes == [4000, 2000]
    assert torch.equal(wire.restore(message, whole)["w"], message["w"])
    assert torch.allclose(wire.restore(message, half)["w"], message["w"], rtol=2**-8)


def test_half_precision_on_the_wire_loses_no_small_steps(tmp_path):
    """Weights that change by less than bfloat16 tells apart: what each round adds must still add up."""
    options = {"dtype": "float32", "rounds": 6, "cohort": 0}
    experiment = config("local_sgd", **options)
    experiment = replace(experiment, algorithm={**experiment.algorithm, "lr": 1e-3, "milestones": []})
    half = deployed(tmp_path / "half", experiment, InProcess(tmp_path / "half"), wire="bfloat16")
    whole = deployed(tmp_path / "whole", experiment, InProcess(tmp_path / "whole"))
    early = simulated(replace(experiment, run={**experiment.run, "rounds": 1})).weights.params
    for name, end in whole.weights.params.items():
        moved, apart = end - early[name], half.weights.params[name] - end
        assert apart.norm() < 0.1 * moved.norm(), name


def normed_scores() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1), ScoreNorm(1))


def test_normed_scores_need_both_classes_at_every_site(tmp_path):
    experiment = replace(config("fedxl2"), model={"name": "tests.deploy.test_sites:normed_scores"})
    for run in (lambda: deployed(tmp_path, experiment), lambda: simulated(experiment)):
        with pytest.raises(UserError, match="score_norm needs both classes at every client"):
            run()


def test_a_site_that_is_left_out_is_reported_once_and_so_is_its_return(tmp_path):
    carrier, lines = InProcess(tmp_path), list[str]()
    carrier.faults = {(3, round): Failure("it is tired") for round in (1, 2)}
    deployed(tmp_path, config("local_sgd", cohort=4), carrier, Hooks(say=lines.append))
    assert [line for line in lines if " d" in line and line.startswith("round")] == [
        "round 1: nothing from d: it is tired",
        "round 3: d is back after 2 rounds",
    ]


def test_a_node_must_be_who_its_key_says(tmp_path):
    lines: list[str] = []
    keys = {"100": "a", "101": "b", "103": "c", "102": "d"}
    with pytest.raises(UserError, match="no hello from c, d"):
        deployed(tmp_path, config("local_sgd"), hooks=Hooks(say=lines.append), keys=keys, join=5)
    assert any("it claims to be 'c', but its key belongs to 'd'" in line for line in lines)
    status = json.loads((tmp_path / "server" / "run" / "status.json").read_text())
    assert [status["sites"][name]["state"] for name in SITES] == [*["connected"] * 2, *["not connected yet"] * 2]
    assert any("its key belongs to 'd'" in each["reason"] and each["time"] for each in status["refusals"])


def test_a_server_that_dies_before_its_first_checkpoint_begins_anew(tmp_path):
    experiment, out = config("fedxl2"), tmp_path / "server" / "run"
    out.mkdir(parents=True)
    (out / "metrics.jsonl").write_text('{"round": 1}\n')
    assert_same(deployed(tmp_path, experiment), simulated(experiment))


def test_after_a_restart_a_round_waits_until_its_sites_are_met(tmp_path):
    """Hellos of some are slow: the round is not held without them."""

    class Slow(InProcess):
        calls = 0

        def replies(self, tickets):
            self.calls += 1
            ready = [t for t in tickets if not t.startswith("hello 103") or self.calls > 20]
            return super().replies(ready)

    experiment = config("fedxl2", cohort=0, rounds=1)
    deployed(tmp_path, experiment)
    again = deployed(tmp_path, config("fedxl2", cohort=0, rounds=2), Slow(tmp_path), minimum=2)
    assert all("dropped" not in record for record in again.history)
