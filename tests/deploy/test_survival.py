"""Time to event at sites: the simulator's bits, bins that are public, and sites that tell nothing of times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedxl.config.experiment import Config
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.provision.settings import SiteFile, SiteSettings
from fedxl.deploy.server.directory import read_times
from fedxl.deploy.site import requests
from fedxl.errors import RefusedError, UserError
from fedxl.evaluation.noise import variance
from fedxl.prediction import predictor
from fedxl.prediction.export import export
from fedxl.reporting import document
from fedxl.risks.timetable import EDGES
from fedxl.training.run_folder import read_run
from tests.deploy.federated import SITES, InProcess, assert_same, deployed, secrets_of, simulated

pytestmark = pytest.mark.usefixtures("impatient")
COX = {"name": "cox", "time_bins": 10}
POOLED = {"name": "fedxl2", "lr": 0.2}


def table(folder: Path) -> dict[str, Any]:
    """One table of all sites; nobody at site d has an event."""
    rng = np.random.default_rng(5)
    x, site = rng.normal(size=(160, 3)).round(4), rng.integers(0, 4, 160)
    days = np.ceil(rng.exponential(400 * np.exp(-x[:, 0])))
    status = (rng.random(160) < 0.6) & (site != 3)
    rows = [
        f"{a},{b},{c},{t:.0f},{int(e)},{SITES[s]}" for (a, b, c), t, e, s in zip(x, days, status, site, strict=True)
    ]
    path = folder / "patients.csv"
    path.write_text("\n".join(["one,two,three,days,status,site", *rows]))
    return {"name": "table", "path": str(path), "time": "days", "event": "status", "site": "site", "seed": 0}


def experiment(folder: Path, algorithm: dict[str, Any] = POOLED, risk: dict[str, Any] = COX, **run: Any) -> Config:
    return Config(
        data=table(folder),
        model={"name": "mlp", "hidden": [4]},
        risk=dict(risk),
        algorithm=dict(algorithm),
        run={
            "rounds": 4, "local_steps": 3, "batch1": 4, "batch2": 6, "eval_every": 2, "dtype": "float64",
            "executor": "loop", "device": "cpu", "seed": 5, "checkpoint_every": 1, **run,
        },
    )  # fmt: skip


class Hospitals(InProcess):
    """Sites that tell times in bins, unless settings say otherwise."""

    def __init__(self, folder: Path, found: Config, **settings: Any) -> None:
        allowed: dict[str, Any] = {
            "models": ("mlp",),
            "risks": ("cox", "concordance"),
            "summary": True,
            "times": "bins",
            "fewest": 1,
        }
        allowed |= {"algorithms": ("fedxl1", "fedxl2", "local_pair"), "device": "cpu", **settings}
        super().__init__(folder)
        self.tensors: list[tuple[str, int, dict[str, Any]]] = []  # of requests and replies, by node and round
        self.sites = {
            str(100 + number): SiteFile(
                SiteSettings(name=name, part=number, **allowed), dict(found.data), folder / name
            )
            for number, name in enumerate(SITES)
        }

    def _handle(self, node: str, kind: Any, request: Envelope) -> Any:
        reply = super()._handle(node, kind, request)
        if kind == "train" and isinstance(reply, Envelope):
            round = int(request.facts["round"])
            self.tensors += [(node, round, dict(request.tensors)), (f"from {node}", round, dict(reply.tensors))]
        return reply


def targets(tensors: dict[str, Any], side: str) -> dict[str, Any]:
    """What stands beside the pooled scores of a side ("a" or "b") in a request or a reply, by name."""
    mark = f".{side}.target."
    return {name.rpartition(".")[2]: leaf.flatten() for name, leaf in tensors.items() if mark in name}


@pytest.mark.parametrize(
    ("algorithm", "risk"),
    [
        (POOLED, COX),
        ({**POOLED, "order": "sorted", "uploads": 2, "pool_u": "server"}, {**COX, "ties": "breslow"}),
        ({"name": "fedxl1", "lr": 0.2}, {"name": "concordance", "time_bins": 5}),
        ({"name": "local_pair", "lr": 0.2}, {"name": "cox"}),
    ],
    ids=lambda part: "-".join(map(str, part.values())),
)
@pytest.mark.parametrize("weighting", ["clients", "samples"])
def test_sites_and_simulator_come_to_the_same_bits(tmp_path, algorithm, risk, weighting):
    found = experiment(tmp_path, algorithm, risk, weighting=weighting)
    carrier = Hospitals(tmp_path, found, private_draws=True)
    outcome = deployed(tmp_path, found, carrier, evaluate="server", private_draws=True)
    secrets = secrets_of(tmp_path / "server" / "run", tmp_path, SITES)
    assert_same(outcome, simulated(found, secrets))
    assert "cindex" in outcome.metrics["validation"]


def test_nothing_but_counts_between_public_times_leaves_a_site(tmp_path):
    found = experiment(tmp_path)
    carrier = Hospitals(tmp_path, found)
    (hello, silent) = (
        requests.hello(replace(site, settings=replace(site.settings, times=times))).facts["times"]
        for site, times in ((carrier.sites["100"], "bins"), (carrier.sites["100"], "none"))
    )
    assert silent == ""
    told = json.loads(hello)
    assert told.keys() == {"cells", "events", "every"}
    deployed(tmp_path, found, carrier)
    asked = [facts for _, facts in carrier.sent if "round" in facts]
    tables = {facts["number"]: json.loads(facts["facts_of_all"])["pairs"] for facts in asked}
    assert np.isin(tables[0]["at"], EDGES).all()
    assert len(tables[0]["at"]) <= 10
    assert all(table == tables[0] for table in tables.values()), "no site learns what others hold"
    met = 0
    for _, _, tensors in carrier.tensors:
        first, second = targets(tensors, "a"), targets(tensors, "b")
        met += len(first) > 0
        for found in (first, second):
            assert not found or found.keys() >= {"time", "stratum"}
            assert not found or bool((found["stratum"] <= 0).all()), "a score would name its site; -1: an empty pool"
        if first:  # all that stands beside a score of S1 follows from its bin
            columns = torch.stack([leaf.double() for leaf in first.values()], -1)
            assert len(columns.unique(dim=0)) == len(first["time"].unique())
        if second:
            assert second.keys() == {"time", "event", "stratum"}
    assert met > 20, "of requests and replies"


def test_what_stands_beside_scores_links_no_patient_over_rounds(tmp_path):
    """Scores hardly move here, so they say who is who. The attack sees what stands beside them, not the scores."""
    found = experiment(tmp_path, {"name": "fedxl2", "lr": 1e-13, "order": "sorted"}, rounds=2)
    carrier = Hospitals(tmp_path, found)
    deployed(tmp_path, found, carrier)
    uploads: dict[str, dict[int, dict[str, Any]]] = {}
    for node, round, tensors in carrier.tensors:
        if node.startswith("from"):
            uploads.setdefault(node, {})[round] = tensors
    right = chance = 0.0
    for rounds in uploads.values():
        who, seen = [], []
        for round in (1, 2):
            (score,) = (leaf for name, leaf in rounds[round].items() if name.endswith(".a.score"))
            beside = targets(rounds[round], "a")
            who.append(score.flatten().round(decimals=8).tolist())
            seen.append(list(zip(*(leaf.tolist() for leaf in (beside.pop("time"), *beside.values())), strict=True)))
        for person, view in zip(who[1], seen[1], strict=True):
            alike = [p for p, v in zip(who[0], seen[0], strict=True) if v == view]
            binned = [p for p, v in zip(who[0], seen[0], strict=True) if v[0] == view[0]]
            right += alike.count(person) / max(1, len(alike))
            chance += binned.count(person) / max(1, len(binned))
    assert right == chance > 0, "of two events in one bin the attack guesses"


@pytest.mark.parametrize(
    ("settings", "risk", "algorithm", "line"),
    [
        ({"times": "none"}, COX, POOLED, 'a does not share event times; .* may say times = "bins" in \\[site\\]'),
        ({}, {"name": "cox"}, POOLED, r"real sites share times in public bins: set time_bins in \[risk\]"),
        ({}, {**COX, "stratified": True}, POOLED, "stratified: risk sets lie within a site.*; use local_pair"),
    ],
    ids=["none", "exact", "stratified"],
)
def test_a_run_that_would_show_times_ends_in_one_line(tmp_path, settings, risk, algorithm, line):
    found = experiment(tmp_path, algorithm, risk)
    with pytest.raises(UserError, match=line):
        deployed(tmp_path, found, Hospitals(tmp_path, found, **settings))


def test_local_pair_needs_no_times_of_others(tmp_path):
    found = experiment(tmp_path, {"name": "local_pair", "lr": 0.2}, {"name": "cox"})
    carrier = Hospitals(tmp_path, found, times="none")
    deployed(tmp_path, found, carrier)
    assert all(
        json.loads(facts["facts_of_all"]).get("pairs") is None for _, facts in carrier.sent if "round" in facts
    )


def test_a_site_refuses_a_server_that_wants_more_of_times(tmp_path):
    """A server of another kind might ask all the same."""
    found = experiment(tmp_path)

    class Greedy(Hospitals):
        change: Any = staticmethod(lambda pairs: pairs)

        def _handle(self, node: str, kind: Any, request: Envelope) -> Any:
            if kind == "train":
                facts = json.loads(request.facts["facts_of_all"])
                facts["pairs"] = self.change(facts["pairs"])
                request = request._replace(facts={**request.facts, "facts_of_all": json.dumps(facts)})
            return super()._handle(node, kind, request)

    def finer(pairs: Any) -> Any:
        return {**pairs, "at": [pairs["at"][0], *(at + 0.5 for at in pairs["at"][1:])]}

    for change, line in (
        (finer, "real sites share times in public bins"),
        (lambda pairs: {**pairs, "mass": "x"}, "what it says of all sites' data cannot be read"),
    ):
        carrier = Greedy(tmp_path / line[:5].strip(), found)
        carrier.change = change
        with pytest.raises(UserError, match="round 0 had fewer than") as caught:
            deployed(tmp_path / line[:5].strip(), found, carrier)
        assert line in str(caught.value)
    closed = Hospitals(tmp_path, found, times="none")
    opened = Hospitals(tmp_path, found)

    class Asked(Hospitals):
        """Told in hello, and forbidden since."""

        def _handle(self, node: str, kind: Any, request: Envelope) -> Any:
            self.sites = (opened if kind == "hello" else closed).sites
            return super()._handle(node, kind, request)

    with pytest.raises(UserError, match="this site does not share event times"):
        deployed(tmp_path / "asked", found, Asked(tmp_path / "asked", found))


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, "x" * 30_000, json.dumps({"cells": [1], "events": [2], "every": [2]})]
)
def test_a_site_that_tells_rubbish_of_times_is_refused(text):
    with pytest.raises(RefusedError, match="its counts of times"):
        read_times(text, 1, 2)


@pytest.mark.parametrize("kind", ["scores", "curve"])
def test_scores_without_times_are_no_evaluation(tmp_path, kind):
    found = experiment(tmp_path, {"name": "local_pair", "lr": 0.2}, {"name": "cox"}, rounds=2)
    outcome = deployed(tmp_path, found, Hospitals(tmp_path, found, evaluate=kind), evaluate="sites")
    told = outcome.history[-1]["validation_by_site"]
    assert all('its site.toml may say evaluate = "metrics"' in str(each) for each in told.values())


def test_sums_of_sites_give_survival_at_horizons(tmp_path):
    """Sites that show metrics of validation data add sums over public bins; against Breslow of all scores."""
    found = experiment(tmp_path, rounds=2)
    outcome = deployed(tmp_path, found, Hospitals(tmp_path, found, evaluate="metrics"), evaluate="sites")
    told = outcome.history[-1]["validation_hazard"]
    assert np.isin(told["grid"], EDGES).all()
    assert not outcome.scores, "no score has left a site"
    wanted = simulated(found).scores["validation"]
    (scores, events), times = wanted.flat, wanted.time
    for at, count, at_risk in zip(told["grid"], told["events"], told["at_risk"], strict=True):
        later = [edge for edge in told["grid"] if edge > at]
        within = (times >= at) & (times < min(later, default=np.inf))
        assert count == (events[within] > 0).sum()
        assert at_risk == pytest.approx(np.exp(scores[times >= at]).sum(), rel=1e-9)
    folder = tmp_path / "server" / "run"
    x = np.random.default_rng(0).normal(size=(20, 3))
    horizons = tuple(told["grid"][2:9:3])
    exact = simulated(found).predict(x, horizons=horizons).survival
    near = outcome.predict(x, horizons=horizons).survival
    assert np.abs(near - exact).max() < 0.02, "ten bins in place of all times"
    assert exact.std(0).max() > 0.03
    np.testing.assert_allclose(predictor.load(folder, horizons=horizons).predict(x).survival, near, rtol=1e-12)
    usual = predictor.load(folder).predict(x)
    assert 0 < len(usual.horizons) <= 3
    assert set(usual.horizons) <= set(told["grid"])
    export(folder, tmp_path / "model", onnx=False)
    np.testing.assert_allclose(predictor.load(tmp_path / "model").predict(x).survival, usual.survival, rtol=1e-12)
    with pytest.raises(UserError, match=r"the sums of sites end at .*, before the horizon 100000\.0"):
        predictor.load(folder, horizons=[1e5])


@pytest.mark.parametrize(
    "change",
    [{"grid": [1.0]}, {"events": "x"}, {"centre": 1.0}, {"at_risk": -1.0}, {"events": 5.0}, {"more": 1}, None],
    ids=str,
)
def test_a_site_that_makes_up_its_hazard_is_not_heard(tmp_path, change):
    found = experiment(tmp_path, rounds=2)

    class Odd(Hospitals):
        def _handle(self, node: str, kind: Any, request: Envelope) -> Any:
            reply = super()._handle(node, kind, request)
            if kind == "evaluate" and node == "100" and "hazard" in reply.facts:
                told = json.loads(reply.facts["hazard"])
                for name, value in (change or {}).items():
                    told[name] = [*told.get(name, [0])[:-1], value] if isinstance(told.get(name), list) else value
                reply = reply._replace(facts={**reply.facts, "hazard": json.dumps(told if change else None)})
            return reply

    outcome = deployed(tmp_path, found, Odd(tmp_path, found, evaluate="metrics"), evaluate="sites")
    last = outcome.history[-1]
    assert "its reply is invalid" in last["validation_by_site"]["a"]
    assert sum(last["validation_hazard"]["events"]) == last["validation"]["positives"]


def test_sums_leave_a_site_only_if_it_shares_bins_and_metrics(tmp_path):
    found = experiment(tmp_path, {"name": "local_pair", "lr": 0.2}, {"name": "cox"}, rounds=2)
    outcome = deployed(tmp_path, found, Hospitals(tmp_path, found, evaluate="metrics"), evaluate="sites")
    assert "validation_hazard" not in outcome.history[-1], "without time_bins there are no public times"
    found = experiment(tmp_path, rounds=2)
    silent = deployed(tmp_path / "silent", found, Hospitals(tmp_path / "silent", found), evaluate="sites")
    assert "validation_hazard" not in silent.history[-1]
    carrier = Hospitals(tmp_path / "closed", found, evaluate="metrics")
    closed = Hospitals(tmp_path / "closed", found, evaluate="metrics", times="none").sites

    class Closed(Hospitals):
        def _handle(self, node: str, kind: Any, request: Envelope) -> Any:
            self.sites = closed if kind == "evaluate" else carrier.sites
            return super()._handle(node, kind, request)

    outcome = deployed(tmp_path / "closed", found, Closed(tmp_path / "closed", found), evaluate="sites")
    assert "validation_hazard" not in outcome.history[-1]
    assert outcome.history[-1]["validation"]["cindex"] > 0


def test_sites_tell_their_concordance(tmp_path):
    found = experiment(tmp_path, rounds=2)
    outcome = deployed(tmp_path, found, Hospitals(tmp_path, found, evaluate="metrics"), evaluate="sites")
    told = outcome.history[-1]["validation_by_site"]
    assert 0 <= told["a"]["cindex"] <= 1


def test_counts_of_sites_give_concordance_with_bounds_survival_and_a_report(tmp_path):
    found = experiment(tmp_path, rounds=2)
    outcome = deployed(tmp_path, found, Hospitals(tmp_path, found, evaluate="curve", fewest=1), evaluate="sites")
    row, exact = outcome.history[-1], simulated(found)
    assert row["validation_from"] == "curves of a, b, c, d"
    assert not outcome.scores, "no score has left a site"
    (counted,) = outcome.histograms["validation"].values()
    assert all(np.isin(each.times, EDGES).all() for each in counted.values())
    value, bound = row["validation"]["cindex"], row["validation_bounds"]["cindex"]
    true = exact.metrics["validation"]["cindex"]
    assert 0 < abs(value - true) <= bound < 0.3, "few patients in ten bins of time"
    folder = tmp_path / "server" / "run"
    survival = predictor.load(folder, horizons=(100, 300)).predict(np.zeros((3, 3))).survival
    of_scores = exact.predict(np.zeros((3, 3)), horizons=(100, 300)).survival
    np.testing.assert_allclose(survival, of_scores, atol=0.05)
    text = document.write(tmp_path / "report.html", [read_run(folder)]).read_text()
    assert "sites disclosed counts in" in text
    assert "Survival by predicted risk" in text


def test_noise_hides_counts_of_times_and_each_patient_is_in_one(tmp_path):
    """All epsilon is for one count of each patient, however many bins of time there are."""
    found = experiment(tmp_path, rounds=1, eval_every=1)
    carrier = Hospitals(tmp_path, found, evaluate="curve", epsilon=50.0, epsilon_total=200.0, bins=16)
    outcome = deployed(tmp_path, found, carrier, evaluate="sites", bins=16)
    (counted,) = outcome.histograms["validation"].values()
    assert {each.noise for each in counted.values()} == {variance(50.0)}


def test_counts_of_other_times_are_refused(tmp_path):
    found = experiment(tmp_path, rounds=1, eval_every=1)

    class Wider(Hospitals):
        def _handle(self, node: str, kind: Any, request: Envelope) -> Any:
            reply = super()._handle(node, kind, request)
            if kind == "evaluate" and node == "101":
                reply = reply._replace(tensors={k: torch.cat((t, t), 1) for k, t in reply.tensors.items()})
            return reply

    outcome = deployed(tmp_path, found, Wider(tmp_path, found, evaluate="curve", fewest=1), evaluate="sites")
    told = outcome.history[-1]["validation_by_site"]
    assert str(told["b"]).startswith("its reply is invalid")
    assert "cindex" in told["a"]
