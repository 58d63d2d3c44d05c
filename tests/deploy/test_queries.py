"""Queries at sites: the same bits as in the simulator, and counts of queries that cannot be true are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedxl.config.experiment import Config, build_algorithm
from fedxl.deploy.protocol.envelope import Envelope, RunHeader
from fedxl.deploy.provision.folders import init
from fedxl.deploy.provision.settings import SiteFile, SiteSettings, read_server, read_site
from fedxl.deploy.server.directory import SiteFacts, relevant_queries
from fedxl.deploy.site import requests
from fedxl.errors import RefusedError, UserError
from tests.deploy.federated import SITES, InProcess, assert_same, deployed, secrets_of, simulated

pytestmark = pytest.mark.usefixtures("impatient")


def items(queries: int, seed: int) -> tuple[Any, Any, Any, Any]:
    """Features, grades, queries and sites; every query is at two sites, some without a relevant item."""
    rng = np.random.default_rng(seed)
    query = np.repeat(np.arange(queries), 8)
    x = rng.normal(size=(len(query), 3))
    grade = np.digitize(x[:, 0] + 0.3 * rng.normal(size=len(query)), [0.8, 1.5])
    grade[query % 5 == 4] = 0
    return x, grade, query + 10 * seed, (query + np.arange(len(query)) % 2) % 4


def letor(folder: Path) -> dict[str, Any]:
    """One file a site, and files to evaluate on."""
    for name, data in {"train": items(24, 1), "validation": items(9, 7), "test": items(9, 17)}.items():
        lines = [
            f"{grade} qid:{query} " + " ".join(f"{at + 1}:{value:.4f}" for at, value in enumerate(row))
            for row, grade, query, _ in zip(*data, strict=True)
        ]
        if name != "train":
            (folder / f"{name}.letor").write_text("\n".join(lines))
            continue
        for site in range(4):
            mine = [line for line, of in zip(lines, data[3], strict=True) if of == site]
            (folder / f"site{site}.txt").write_text("\n".join(mine))
    held = {f"{name}_path": str(folder / f"{name}.letor") for name in ("validation", "test")}
    return {"name": "letor", "path": str(folder / "site*.txt"), **held}


def table(folder: Path) -> dict[str, Any]:
    """One table of all sites, with names of queries."""
    x, grade, query, site = items(40, 3)
    rows = [
        ",".join([*map(str, row.round(4)), str(g), f"query {q}", SITES[s]])
        for row, g, q, s in zip(x, grade, query, site, strict=True)
    ]
    path = folder / "items.csv"
    path.write_text("\n".join(["one,two,three,grade,query,site", *rows]))
    return {"name": "table", "path": str(path), "label": "grade", "query": "query", "site": "site", "seed": 0}


DATA = {"letor": letor, "table": table}
LOCAL = {"name": "local_pair", "lr": 0.2}
POOLED = {"name": "fedxl2", "lr": 0.2}
NDCG = {"name": "ndcg", "top": 3, "queries": 2}


def experiment(
    data: dict[str, Any], algorithm: dict[str, Any], risk: str | dict[str, Any] = "listwise", **run: Any
) -> Config:
    return Config(
        data=data,
        model={"name": "mlp", "hidden": [8]},
        risk={"name": risk, "queries": 2} if isinstance(risk, str) else risk,
        algorithm=algorithm,
        run={
            "rounds": 3, "local_steps": 2, "batch1": 4, "batch2": 6, "cohort": 3, "eval_every": 2, "dtype": "float64",
            "checkpoint_every": 1, "executor": "loop", "device": "cpu", "seed": 5, **run,
        },
    )  # fmt: skip


def carrier(folder: Path, data: dict[str, Any], **settings: Any) -> InProcess:
    sites = InProcess(folder)
    algorithms = ("local_pair", "local_sgd", "fedxl2")
    allowed = {"models": ("mlp",), "risks": ("listwise", "ndcg", "auroc"), "algorithms": algorithms}
    for number, name in enumerate(SITES):
        known = SiteSettings(name=name, part=number, device="cpu", summary=True, fewest=1, **{**allowed, **settings})
        sites.sites[str(100 + number)] = SiteFile(known, data, folder / name)
    return sites


@pytest.mark.parametrize(
    ("kind", "algorithm", "weighting", "risk"),
    [
        ("letor", LOCAL, "samples", "listwise"),
        ("table", LOCAL, "clients", "listwise"),
        ("letor", {"name": "local_sgd", "loss": "squared", "lr": 0.1}, "samples", "listwise"),
        ("table", LOCAL, "samples", NDCG),
    ],
)
def test_sites_and_simulator_come_to_the_same_bits(tmp_path, kind, algorithm, weighting, risk):
    data = DATA[kind](tmp_path)
    wanted = experiment(data, algorithm, risk, weighting=weighting)
    found, expected = deployed(tmp_path, wanted, carrier(tmp_path, data)), simulated(wanted)
    assert_same(found, expected)
    assert found.metrics["test"] == expected.metrics["test"]
    assert 0 < found.metrics["test"]["ndcg@10"] < 1


def test_sites_evaluate_and_their_metrics_are_weighted_by_queries(tmp_path):
    data = letor(tmp_path)
    wanted = experiment(data, LOCAL, cohort=0)
    found = deployed(tmp_path, wanted, carrier(tmp_path, data, evaluate="metrics"), evaluate="sites")
    # Held-back queries are dealt out whole, so the mean over queries is that of all data in one place.
    expected = simulated(wanted).metrics["test"]
    for name in ("ndcg@5", "ndcg@10", "risk"):
        assert found.metrics["test"][name] == pytest.approx(expected[name], abs=1e-12)
    assert found.metrics["test"]["positives"] == expected["positives"]


def test_what_sites_may_not_say_of_an_evaluation(tmp_path):
    """One lies about its queries, one would send scores without any."""
    data = letor(tmp_path)
    sites = carrier(tmp_path, data, evaluate="metrics")
    with_scores = replace(sites.sites["101"].settings, evaluate="scores")
    sites.sites["101"] = replace(sites.sites["101"], settings=with_scores)
    handle = sites._handle

    def lying(node: int, kind: Any, request: Envelope) -> Any:
        reply = handle(node, kind, request)
        lie = kind == "evaluate" and node == "100"
        return reply._replace(facts={**reply.facts, "queries": 10**6}) if lie else reply

    sites._handle = lying  # type: ignore[method-assign]
    found = deployed(tmp_path, experiment(data, LOCAL, rounds=1, eval_every=1), sites, evaluate="sites")
    by_site = found.history[-1]["validation_by_site"]
    assert "1000000 queries" in by_site["a"]
    assert "without their queries or times give no metric of these" in by_site["b"]
    assert set(by_site["c"]) >= {"ndcg@10", "risk"}


def test_risk_and_data_must_agree_on_queries(tmp_path):
    data = letor(tmp_path)
    plain = replace(experiment(data, LOCAL), risk={"name": "auroc"})
    with pytest.raises(UserError, match="the data of a are items of queries"):
        deployed(tmp_path, plain, carrier(tmp_path, data))
    digits = {"name": "digits", "clients": 4, "seed": 3}
    with pytest.raises(UserError, match="the data of a name none"):
        deployed(tmp_path / "plain", experiment(digits, LOCAL), carrier(tmp_path / "plain", digits))
    with pytest.raises(UserError, match="within queries, and the validation data name none"):
        deployed(tmp_path / "own", experiment(digits, LOCAL), carrier(tmp_path / "own", data))


def test_draws_in_secret_are_a_sites_alone(tmp_path):
    data = letor(tmp_path)
    wanted = experiment(data, LOCAL, NDCG, weighting="clients")
    found = deployed(tmp_path, wanted, carrier(tmp_path, data, private_draws=True), private_draws=True)
    assert_same(found, simulated(wanted, secrets_of(tmp_path / "server" / "run", tmp_path)))


def test_scores_of_one_query_do_not_meet_across_sites(tmp_path):
    """A server does not begin such a run, and a site would refuse it."""
    data = letor(tmp_path)
    told = "scores of one query meet in simulations alone"
    with pytest.raises(UserError, match=told) as error:
        deployed(tmp_path, experiment(data, POOLED), carrier(tmp_path, data))
    assert "\n" not in str(error.value)
    tables = {name: table for name, table in experiment(data, POOLED).tables().items() if name != "data"}
    facts = {**RunHeader("0" * 8, json.dumps(tables), "{}").facts, "wire": "float32", "round": 1}
    with pytest.raises(UserError, match=told):
        requests.train(carrier(tmp_path, data).sites["100"], Envelope(facts, {}))


def test_a_site_tells_how_many_queries_it_holds_and_not_which(tmp_path):
    site = carrier(tmp_path, letor(tmp_path)).sites["100"]
    facts = requests.hello(site).facts
    assert isinstance(facts["queries"], int)
    assert facts["queries"] > 0
    assert "lists" not in facts
    with pytest.raises(UserError, match="say standardise = false"):
        requests.hello(replace(site, data={"name": "letor", "path": str(tmp_path / "site0.txt")}))


def test_new_folders_allow_what_the_experiment_needs(tmp_path):
    init(["a", "b"], tmp_path / "f", config=experiment(letor(tmp_path), LOCAL))
    build_algorithm(read_server(tmp_path / "f" / "server" / "server.toml").config)
    assert read_site(tmp_path / "f" / "sites" / "a" / "site.toml").settings.private_draws


@pytest.mark.parametrize(("told", "positives"), [(0, 3), (4, 3), (-1, 0), (1, 0), (1.0, 3), (True, 3), ("1", 3)])
def test_counts_that_cannot_be_true_are_refused(told, positives):
    with pytest.raises(RefusedError):
        relevant_queries(told, positives)


def test_a_site_that_claims_many_queries_fills_no_memory():
    many = 10**13
    facts = SiteFacts(positives=many, negatives=1, shape=(3,), relevant=many)
    assert len(facts.queries(relevant=True)) == many
