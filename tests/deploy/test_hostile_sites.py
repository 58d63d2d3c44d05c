"""A site that is wrong or hostile, inside the federation: what it sends is refused, and the run is as without it."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedxl import UserError, sampling
from fedxl.algorithms import FeDXL2
from fedxl.deploy.protocol.envelope import Envelope, Failure
from fedxl.deploy.provision.settings import ServerSettings
from fedxl.deploy.server import serve as server
from fedxl.errors import DivergedError
from fedxl.training.run_writer import load_latest
from fedxl.training.settings import Hooks
from tests.deploy.federated import SITES, InProcess, config, deployed
from tests.deploy.test_site_evaluation import PERFECT, Judging
from tests.deploy.test_sites import assert_same

pytestmark = pytest.mark.usefixtures("impatient")

ATTACKED, LAST = 4, 7  # rounds
ABSENT = Failure("the node has died")
EXPERIMENTS = {
    "sigmoid": ("fedxl2", {}),
    "ap": ("fedxl2", {"risk": {"name": "ap"}}),
    "raw": ("fedxl1", {}),
    "batch norm": ("fedxl2", {"model": {"name": "cnn", "channels": 4}}),
    "local sgd": ("local_sgd", {}),
    "local pair": ("local_pair", {}),
    "codasca": ("codasca", {}),
}
# The experiment, which tensor of an update becomes what, and what the server says of it.
SIZE = "times as large as usual"
ATTACKS = {
    "b = 10": ("sigmoid", "scores.b.score", lambda t: 0 * t + 10, "its scores (second) are not all within [0, 1]"),
    "b = 1e30": (
        "sigmoid",
        "scores.b.score",
        lambda t: 0 * t + 1e30,
        "its scores (second) are not all within [0, 1]",
    ),
    "a = -0.5": ("sigmoid", "scores.a.score", lambda t: 0 * t - 0.5, "its scores (first) are not all within [0, 1]"),
    "y = 7": ("ap", "scores.b.target", lambda t: 0 * t + 7, "its labels (second) are not all 0 or 1"),
    "u = -1e30": ("sigmoid", "scores.u", lambda t: 0 * t - 1e30, "its inner estimates u are beyond"),
    "u at the pole of f": ("ap", "scores.u", lambda t: 0 * t - 1e-3, "its inner estimates u are beyond"),
    "weights x -3": ("sigmoid", "weights.params:float64", lambda t: -3 * t, f"change of the model is * {SIZE}"),
    "weights x -3, local sgd": ("local sgd", "weights.params:float64", lambda t: -3 * t, f"the model is * {SIZE}"),
    "G x 100": ("sigmoid", "G:float64", lambda t: 100 * t, f"its change of the model is * {SIZE}"),
    "G x 1000, local pair": ("local pair", "G:float64", lambda t: 1000 * t, f"change of the model is * {SIZE}"),
    "no part in the average": (
        "raw",
        "share.model",
        lambda t: 0 * t,
        "its share is not what the server assigned",
    ),
    "raw b = 1e30": ("raw", "scores.b.score", lambda t: 0 * t + 1e30, "are not all within [-10000, 10000]"),
    "raw b = 2000": ("raw", "scores.b.score", lambda t: 0 * t + 2000, "(second) lie more than 100 times the pool's"),
    "raw b x 100": ("raw", "scores.b.score", lambda t: 100 * t, f"its largest score, squared, is * {SIZE}"),
    "a NaN buffer": (
        "batch norm",
        "weights.buffers:float64",
        lambda t: t * math.nan,
        "buffers holds NaN or infinity",
    ),
    "a negative variance": ("batch norm", "weights.buffers:float64", lambda t: -t.abs(), "running_var is negative"),
    "buffers x 1e6": ("batch norm", "weights.buffers:float64", lambda t: 1e6 * t, f"change of buffers is * {SIZE}"),
    "a counter": ("batch norm", "weights.buffers:int64", lambda t: t + 10**9, f"change of counters is * {SIZE}"),
    "a control variate": ("codasca", "variates.params:float64", lambda t: 1e4 * t, f"its change of * {SIZE}"),
    "a dual variable": ("codasca", "scalars.alpha", lambda t: t + 1e6, f"its change of * {SIZE}"),
}


def experiment(name: str):
    algorithm, more = EXPERIMENTS[name]
    run = {"rounds": LAST, "local_steps": 8, "batch1": 8, "batch2": 8, "cohort": 0, "eval_every": 1}
    return replace(config(algorithm, **run), **more)


def spoiling(name: str, change):
    return lambda answer: Envelope(answer.facts, {**answer.tensors, name: change(answer.tensors[name])})


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """The same run, of which site a missed the attacked round."""

    @functools.cache
    def run(name: str):
        folder = tmp_path_factory.mktemp("without")
        carrier = InProcess(folder)
        carrier.faults = {(0, ATTACKED): ABSENT}
        return deployed(folder, experiment(name), carrier)

    return run


def said_of(reason: str, pattern: str) -> bool:
    """Whether a reason holds all parts of a pattern, in which * is anything."""
    return all(part in reason for part in pattern.split("*"))


def interrupted(folder: Path, name: str, carrier: InProcess):
    """The run up to and with the attacked round."""
    attacked = Hooks(
        say=lambda line: None,
        should_stop=lambda: any(facts.get("round") == ATTACKED for _, facts in carrier.sent),
    )
    return deployed(folder, experiment(name), carrier, attacked)


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_an_attack_is_refused_and_leaves_no_trace(tmp_path, without, attack):
    """To the last bit: in the result, in the checkpoint after the attack, and after a restart from it."""
    name, tensor, change, reason = ATTACKS[attack]
    carrier = InProcess(tmp_path)
    carrier.faults = {(0, ATTACKED): spoiling(tensor, change)}
    found = interrupted(tmp_path, name, carrier)
    assert found.interrupted
    [dropped] = dropped_in(found)
    assert dropped["site"] == "a"
    assert said_of(dropped["reason"], reason), dropped["reason"]

    expected = without(name)
    checkpoint, complaints = load_latest(tmp_path / "server" / "run" / "checkpoints")
    assert checkpoint
    assert not complaints
    assert checkpoint.info["round"] == ATTACKED
    poison = [path for path, leaf in checkpoint.tensors.items() if not leaf.double().abs().max() < 1e3]
    assert poison == (["server.pool.first.u"] if name == "raw" else []), "which a linear risk has no use for"

    again = deployed(tmp_path, experiment(name), carrier)
    assert not any("dropped" in record for record in again.history if record["round"] > ATTACKED)
    assert again.metrics["test"]["auroc"] == expected.metrics["test"]["auroc"]
    assert_same(again, expected)


def dropped_in(result) -> list[dict]:
    return [entry for record in result.history for entry in record.get("dropped", [])]


def attacked(folder: Path, name: str, site: int, *changes):
    """What is refused in a short run, in which one site changes so much of its update in round 3."""
    base, carrier = experiment(name), InProcess(folder)

    def spoil(answer: Envelope) -> Envelope:
        for tensor, change in changes:
            answer = spoiling(tensor, change)(answer)
        return answer

    carrier.faults = {(site, 3): spoil}
    return dropped_in(deployed(folder, replace(base, run={**base.run, "rounds": 3}), carrier))


@pytest.mark.parametrize("name", ["sigmoid", "local pair"])
def test_a_large_G_is_refused_however_few_steps_are_reported(tmp_path, name):
    """Steps that a site has not made would not shorten those that all others make along its G."""
    changes = ("G:float64", lambda t: 1000 * t), ("steps", torch.zeros_like)
    [dropped] = attacked(tmp_path, name, 0, *changes)
    assert said_of(dropped["reason"], f"its change of the model is * {SIZE}")


def test_the_weights_of_codasca_are_compared_by_their_change_alone(tmp_path):
    """Its scalars do not change much. Their values say nothing of how far an update moves the model."""
    [dropped] = attacked(tmp_path, "codasca", 0, ("weights.params:float64", lambda t: t + 0.5 * t.sign()))
    assert said_of(dropped["reason"], f"its change of the model is * {SIZE}")


def test_scores_that_are_only_lent_are_compared_too(tmp_path):
    """A site with one class does not count in the average, and its scores are in the pool all the same."""
    [dropped] = attacked(tmp_path, "raw", 3, ("scores.b.score", lambda t: 100 * t))
    assert dropped["site"] == "d"
    assert said_of(dropped["reason"], f"its largest score, squared, is * {SIZE}")


@pytest.mark.parametrize("surrogate", ["squared_hinge", "logistic"])
def test_scores_whose_estimates_are_unknown_are_never_drawn(tmp_path, surrogate):
    """NaN is what an example has that met nobody yet. One site that sends nothing else does not hold up the rest."""
    base, carrier, lines = experiment("sigmoid"), InProcess(tmp_path), list[str]()
    short = replace(base, run={**base.run, "rounds": 3}, risk={**base.risk, "surrogate": surrogate})
    carrier.faults = {(0, 3): spoiling("scores.u", lambda t: t * math.nan)}
    found = deployed(tmp_path, short, carrier, Hooks(say=lines.append), patience=1)
    assert not any("discarded" in line for line in lines)
    first = found.server.pool.first
    unknown = (first.owner == 0) & (first.age == 0)
    assert unknown.any()
    assert (first.weight[unknown] == 0).all()
    assert (first.weight[~unknown] > 0).all()
    assert not first.u.isnan().any()


def test_who_moves_weights_in_round_0_is_refused(tmp_path):
    carrier = InProcess(tmp_path)
    carrier.faults = {(0, 0): spoiling("weights.params:float64", lambda t: t * (1 + 1e-6))}
    found = deployed(
        tmp_path, replace(experiment("sigmoid"), run={**experiment("sigmoid").run, "rounds": 1}), carrier
    )
    [dropped] = found.history[0]["dropped"]
    assert dropped["reason"] == "it changes weights or G in the warm-up round, which only scores"


def test_an_attack_every_round_does_not_become_usual(tmp_path):
    carrier = InProcess(tmp_path)
    carrier.faults = {(0, r): spoiling("G:float64", lambda t: 1000 * t) for r in range(2, LAST + 1)}
    found = deployed(tmp_path, experiment("sigmoid"), carrier)
    dropped = [entry["round"] for entry in dropped_in(found)]
    assert dropped == list(range(2, LAST + 1))


@pytest.mark.parametrize("name", list(EXPERIMENTS))
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_honest_sites_are_never_refused(tmp_path, name, wire):
    base = experiment(name)
    short = replace(base, run={**base.run, "rounds": 3, "dtype": "float32"})
    found = deployed(tmp_path, short, wire=wire)
    assert not any("dropped" in record for record in found.history)


def test_influence_can_be_switched_off(tmp_path):
    carrier = InProcess(tmp_path)
    carrier.faults = {(0, ATTACKED): spoiling("G:float64", lambda t: 100 * t)}
    found = deployed(tmp_path, experiment("sigmoid"), carrier, influence=0)
    assert not any("dropped" in record for record in found.history)
    with pytest.raises(UserError, match="influence must be more than 1, or 0 for no limit"):
        ServerSettings(sites=("a",), influence=0.5)


@pytest.mark.parametrize("cohort", [1, 2])
def test_where_few_take_part_the_rounds_before_say_what_is_usual(tmp_path, cohort):
    """One or two updates cannot outvote each other; also after a restart."""
    carrier, base = InProcess(tmp_path), experiment("sigmoid")
    short = replace(base, run={**base.run, "cohort": cohort, "rounds": 3})
    deployed(tmp_path, short, carrier)
    members = sampling.cohort(base.run["seed"], ATTACKED, len(SITES), cohort)
    carrier.faults = {(int(members[0]), ATTACKED): spoiling("weights.params:float64", lambda t: t + 100)}
    found = deployed(tmp_path, replace(short, run={**short.run, "rounds": ATTACKED}), carrier)
    [dropped] = dropped_in(found)
    assert dropped["site"] == SITES[members[0]]
    assert SIZE in dropped["reason"]


def test_a_run_from_before_sizes_were_compared_goes_on(tmp_path, monkeypatch):
    carrier, short = (
        InProcess(tmp_path),
        replace(experiment("sigmoid"), run={**experiment("sigmoid").run, "rounds": 3}),
    )
    population = server.SiteEngine.population
    with monkeypatch.context() as patch:
        before = property(lambda engine: {**population.fget(engine), "usual": {}})
        patch.setattr(server.SiteEngine, "population", before)
        deployed(tmp_path, short, carrier)
    kept, _ = load_latest(tmp_path / "server" / "run" / "checkpoints")
    assert not any(path.startswith("population.usual") for path in kept.tensors)
    found = deployed(tmp_path, experiment("sigmoid"), carrier)
    whole = deployed(tmp_path / "whole", experiment("sigmoid"), InProcess(tmp_path / "whole"))
    assert found.metrics["test"] == whole.metrics["test"]


def test_a_state_that_sites_could_not_use_is_never_saved(tmp_path, monkeypatch):
    """Whatever the updates together come to: the round is held again."""
    aggregate, calls = FeDXL2.aggregate, []

    def poisoned(self, state, mean, updates):
        new = aggregate(self, state, mean, updates)
        calls.append(int(state.step))
        first = calls.count(16) == 1 and calls[-1] == 16  # the first time that round 3 is aggregated
        b = new.pool.second.entry
        b = b._replace(score=b.score * (1e30 if first else 1))
        return new._replace(pool=new.pool._replace(second=new.pool.second._replace(entry=b)))

    whole = deployed(tmp_path / "whole", experiment("sigmoid"), InProcess(tmp_path / "whole"))
    monkeypatch.setattr(FeDXL2, "aggregate", poisoned)
    lines: list[str] = []
    found = deployed(tmp_path, experiment("sigmoid"), InProcess(tmp_path), Hooks(say=lines.append))
    assert [line for line in lines if "updates discarded" in line] == [
        "round 3: all updates discarded, sites could not continue from the new state: "
        "its scores (second) are not all within [0, 1], as this risk's are"
    ]
    assert found.metrics["test"] == whole.metrics["test"]


def test_training_that_diverges_is_called_that(tmp_path):
    high = replace(config("local_sgd", cohort=0), model={"name": "linear"})
    high = replace(high, algorithm={**high.algorithm, "lr": 1e200, "weight_decay": 1.0})
    lines: list[str] = []
    with pytest.raises(DivergedError, match=r"training diverged in round 1: 4 of 4 sites .* lower learning rate"):
        deployed(tmp_path, high, hooks=Hooks(say=lines.append))
    told = [line for line in lines if "nothing from a" in line]
    assert told == [
        "round 1: nothing from a: diverged: weights.params holds NaN or infinity; a lower learning rate would help"
    ], "and it is not tried again"


def test_one_site_that_says_it_diverged_does_not_end_a_run(tmp_path):
    carrier = InProcess(tmp_path)
    carrier.faults = {(0, 1): Failure("diverged: so it says")}
    found = deployed(tmp_path, config("local_sgd", cohort=0, rounds=2, eval_every=1), carrier, minimum=4)
    assert [entry["reason"] for entry in found.history[0]["dropped"]] == ["diverged: so it says"]


class Boasting(Judging):
    """Site a claims other facts of itself."""

    def __init__(self, folder: Path, **claims) -> None:
        super().__init__(folder, ["metrics"] * 4)
        self.claims = claims

    def _handle(self, node, kind, request):
        answer = super()._handle(node, kind, request)
        boast = kind == "hello" and node == "100"
        return Envelope({**answer.facts, **self.claims}, {}) if boast else answer


LIMITS = dict.fromkeys(SITES, 3000)
CLAIMS = {
    "too many": ({"negatives": 10**9}, "examples; it is approved for at most 3000"),
    "a part": ({"positives": 2.5}, "its positives is 2.5, which is not an integer"),
    "true": ({"negatives": True}, "its negatives is True, which is not an integer"),
    "a shape": ({"shape": [1, 8.0, 8]}, "its length is 8.0, which is not an integer"),
    "words": ({"positives": "\x1b[2J\nall is well"}, r"is \x1b[2J\nall is well, which is not an integer"),
    "a name": ({"site": "\x1b]0;x\x07\u202ea"}, r"'\x1b]0;x\x07\u202ea' is not among the sites"),
    "a version": ({"version": "9\r\n9"}, r"a runs fedxl 9\r\n9, the server"),
}


@pytest.mark.parametrize("kind", list(CLAIMS))
def test_claims_of_a_hello_are_checked(tmp_path, kind):
    claims, reason = CLAIMS[kind]
    lines: list[str] = []
    with pytest.raises(UserError, match="no hello from a within") as error:
        deployed(
            tmp_path,
            config("local_sgd"),
            Boasting(tmp_path, **claims),
            Hooks(say=lines.append),
            limits=LIMITS,
            join=0.5,
        )
    [refused] = [line for line in lines if "refused a node's hello" in line]
    assert reason in refused
    assert reason in str(error.value)
    assert (refused + str(error.value)).isprintable()


def test_honest_sites_are_within_their_limits(tmp_path):
    counts = {name: site.count("all") for name, site in facts_of_sites(tmp_path / "first").items()}
    found = deployed(tmp_path / "second", config("local_sgd"), InProcess(tmp_path / "second"), limits=counts)
    assert found.best_round == 4


def facts_of_sites(folder: Path):
    deployed(folder, config("local_sgd", rounds=1))
    return server._begun(folder / "server" / "run" / "sites.json")[1]


TOLD_METRICS = {
    "too many": ({"positives": 2000.0, "negatives": 2000.0}, "a reports 4000 examples; it is approved for at most"),
    "a billion": ({"positives": 1e9}, "a reports 1000000001 examples; it is approved for at most 3000"),
    "a part": ({"positives": 1.5}, "it reports positives = 1.5"),
}


@pytest.mark.parametrize("kind", list(TOLD_METRICS))
def test_counts_of_an_evaluation_are_checked(tmp_path, kind):
    """Else who claims a billion examples chooses the best round."""
    claims, reason = TOLD_METRICS[kind]
    carrier = Judging(tmp_path, ["metrics"] * 4)
    carrier.spoil = lambda answer: Envelope({**answer.facts, "metrics": json.dumps(PERFECT | claims)}, {})
    found = deployed(tmp_path, config("fedxl2", rounds=2), carrier, limits=LIMITS, evaluate="sites")
    assert reason in found.history[0]["validation_by_site"]["a"]
    assert found.history[0]["validation_from"] == "metrics of b, c, d"


def test_more_scores_than_approved_examples_are_refused(tmp_path):
    limits = {name: site.count("all") for name, site in facts_of_sites(tmp_path / "first").items()}
    carrier = Judging(tmp_path / "second", ["scores"] * 4)
    carrier.spoil = lambda a: a._replace(tensors={key: torch.cat([t] * 100) for key, t in a.tensors.items()})
    found = deployed(tmp_path / "second", config("fedxl2", rounds=2), carrier, limits=limits, evaluate="sites")
    assert f"it is approved for at most {limits['a']}" in found.history[0]["validation_by_site"]["a"]


FORGED = "\x1b[2J\r\nround 9: all is well\u202e\u2028\x9b\x7f" + "x" * 1000


def test_a_sites_words_reach_no_log_as_they_are(tmp_path):
    lines: list[str] = []
    carrier = Judging(tmp_path, ["metrics"] * 4)
    carrier.faults = {
        (0, 1): lambda answer: Envelope({**answer.facts, "note": FORGED}, answer.tensors),
        (1, 1): Failure(FORGED),
        (2, 1): lambda answer: Envelope(answer.facts, {**answer.tensors, FORGED: torch.zeros(1)}),
    }
    carrier.spoil = lambda answer: Envelope({**answer.facts, "kind": "nothing", "why": FORGED}, {})
    found = deployed(
        tmp_path, config("fedxl2", cohort=0, rounds=2), carrier, Hooks(say=lines.append), evaluate="sites"
    )
    assert sum(r"\x1b[2J\r\nround 9: all is well\u202e" in line for line in lines) == 3
    assert all(line.isprintable() and len(line) < 500 for line in lines)
    recorded = [found.history[0]["validation_by_site"]["a"], *(e["reason"] for e in found.history[0]["dropped"])]
    assert all(words.isprintable() and len(words) <= 300 for words in recorded)


@pytest.mark.parametrize("facts", [{"version": FORGED}, {"config": json.dumps({"model": {"name": f"os:{FORGED}"}})}])
def test_a_servers_words_reach_no_sites_log_as_they_are(tmp_path, facts):
    told: list[str] = []

    class Hearing(InProcess):
        def _handle(self, node, kind, request):
            answer = super()._handle(
                node, kind, Envelope({**request.facts, **(facts if kind == "train" else {})}, {})
            )
            told.extend([answer.reason] if isinstance(answer, Failure) else [])
            return answer

    with pytest.raises(UserError, match="check that sites are running"):
        deployed(tmp_path, config("local_sgd"), Hearing(tmp_path), patience=1)
    assert len(told) == 3
    assert all(r"\x1b[2J" in words and words.isprintable() for words in told)
