"""Advice follows from counts: facts by hand, every rule met once, and only settings that exist."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import fedxl
from fedxl import cox, from_times
from fedxl.algorithms import ALGORITHMS
from fedxl.data.examples import Holding
from fedxl.models import MODELS
from fedxl.options import accepted
from fedxl.risks import auroc, average_precision, partial_auc
from fedxl.training.advice import LINES, RULES, Facts, advise, facts_of
from fedxl.training.settings import Settings
from tests.cli.test_errors import CONFIG, command
from tests.conftest import make_clients

Counts = Sequence[tuple[int, int]]
ALIKE: Counts = [(50, 50)] * 4
MIXED: Counts = [(90, 10), (10, 90)] * 2
ONE_CLASS: Counts = [(50, 50), (50, 50), (100, 0), (0, 200)]


def facts(sizes: Counts, network: Sequence[str] = ("norm", "score_norm"), risk: Any = None) -> Facts:
    return facts_of([Holding(*size) for size in sizes], risk or partial_auc(), network)


def test_facts_are_counts():
    found = facts([(30, 70), (10, 0), (0, 290), (60, 140)])
    assert (found.sites, found.examples, found.one_class) == (4, 600, 2)
    assert found.one_class_share == pytest.approx(300 / 600)
    assert (found.rarest, found.rarest_total, found.rarest_fewest) == ("positive", 100, 10)
    assert found.unequal == 290 / 10
    assert found.skewed
    assert facts([(3, 1), (1, 3)]).apart == pytest.approx(0.5), "half of the positives would have to move"
    assert facts([(10, 0), (0, 20)]).apart == pytest.approx(1.0)
    assert facts([(10, 20), (20, 40)]).apart == pytest.approx(0.0), "sizes do not matter"
    ap = facts([(5, 0), (0, 9), (4, 4)], risk=average_precision())
    assert ap.one_class == 1, "a site with positives alone holds both sides of this risk's pairs, positives and all"


@pytest.mark.parametrize(
    ("sizes", "network", "settings"),
    [
        ([(50, 50)], ["norm"], {"algorithm.name": "sox", "run.weighting": "clients", "model.norm": "batch"}),
        (ONE_CLASS, ["norm", "score_norm"], {
            "algorithm.name": "fedxl2", "run.weighting": "samples", "model.norm": "group", "run.local_steps": 8,
            "algorithm.lr": 0.1,
        }),
        ([(50, 0), (0, 50)], [], {"algorithm.name": "fedxl2", "run.weighting": "clients"}),
        (ONE_CLASS, [], {
            "algorithm.name": "fedxl2", "run.weighting": "samples", "run.local_steps": 8, "algorithm.lr": 1.0,
        }),
        (MIXED, ["norm"], {
            "algorithm.name": "fedxl2", "run.weighting": "clients", "model.norm": "group", "run.local_steps": 8,
        }),
        (ALIKE, ["norm", "score_norm"], {
            "algorithm.name": "local_pair", "run.weighting": "clients", "model.norm": "batch",
            "model.score_norm": True, "run.local_steps": 32, "algorithm.lr": 0.1,
        }),
        (ALIKE, [], {"algorithm.name": "local_pair", "run.weighting": "clients", "algorithm.lr": 0.3}),
        ([(50, 50), (500, 500)], ["norm"], {"algorithm.name": "local_pair", "run.weighting": "samples"}),
    ],
)  # fmt: skip
def test_what_fits_which_federation(sizes, network, settings):
    found = advise(make_clients(list(sizes)), network=network)
    assert found.settings.items() >= settings.items()
    assert ("model.norm" in found.settings) == ("norm" in network)
    assert ("model.score_norm" in found.settings) == ("model.score_norm" in settings)
    assert len(found.lines) == 3
    assert not any("{" in line for line in found.lines), "every fact is filled in"


def test_numbers_that_led_to_it_are_named():
    lines = advise(make_clients(list(ONE_CLASS)), network=["norm"]).lines
    assert "fedxl.FeDXL2(...): 2 of 4 sites hold one class, with 60% of the examples" in lines[0]
    assert "the positive examples are the rarest side (200 of 500), and a site with 50 of them" in lines[1]
    assert lines[1].startswith('fit(..., weighting="samples"): ')
    assert 'the network with norm="group": ' in lines[1]
    assert lines[2].startswith("fit(..., local_steps=8), fedxl.FeDXL2(..., lr=0.1): ")
    assert fedxl.advise(make_clients(list(ONE_CLASS)), auroc()).settings["algorithm.name"] == "fedxl1", "linear f"


def test_what_the_network_has_is_seen_in_it_or_in_the_data():
    rows, images = make_clients(list(MIXED)), [(x.view(-1, 1, 1, 5), y) for x, y in make_clients(list(MIXED))]
    plain, normed = torch.nn.Linear(5, 1), torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    scored = fedxl.models.MODELS["resnet20"]((3, 32, 32), score_norm=True)
    cases = [(rows, None, []), (images, None, ["norm", "score_norm"]), (images, plain, []), (rows, normed, ["norm"])]
    for clients, model, options in [*cases, (rows, scored, ["norm", "score_norm"])]:
        assert sorted(advise(clients, model=model).facts.network) == options
    alike = advise(make_clients(list(ALIKE)))
    assert "norms its scores" not in str(alike), "no condition that is known to be false is a reason"
    assert "0% of the positives would have to move" in alike.lines[0]


def test_sites_are_called_by_their_names():
    clients = dict(zip(("north", "south"), make_clients([(3, 40), (40, 40)]), strict=True))
    assert "(north: 3)" in advise(clients).flags[0]


def test_sites_with_less_than_a_batch_are_flagged():
    clients = make_clients([(3, 40), (0, 40), (8, 40), (40, 7)])
    (first, second) = advise(clients, batch_size=(8, 8)).flags
    assert first == (
        "one site holds fewer positive examples than batch1 = 8, so a step reads some twice; "
        "the least is 3 (client 0: 3)"
    )
    assert "negative examples than batch2 = 8" in second
    assert "client 3: 7" in second
    assert advise(clients, batch_size=3).flags == []
    many = advise(make_clients([(1, 40)] * 9)).flags[0]
    assert many.startswith("9 sites hold fewer positive examples than batch1 = 32")
    assert many.endswith("client 5: 1, and others)")


def test_each_topic_has_an_answer_for_every_federation():
    topics = [topic for line in LINES for topic in line]
    assert RULES.keys() == set(topics)
    for topic in topics:
        last = RULES[topic][-1]
        assert last.when == "otherwise"
        assert all(last.applies(facts(sizes)) for sizes in (ALIKE, MIXED, ONE_CLASS, [(1, 1)]))


def test_rules_name_only_what_there_is():
    known = {
        "run": accepted(Settings),
        "algorithm": {**accepted(ALGORITHMS["fedxl2"]), "name": str},
        "model": accepted(MODELS["resnet18"]),
    }
    for rule in (rule for rules in RULES.values() for rule in rules):
        for setting, value in rule.settings.items():
            section, name = setting.split(".")
            assert name in known[section], setting
            if setting == "algorithm.name":
                for sizes in (ALIKE, ONE_CLASS):
                    for risk in (auroc(), partial_auc()):
                        assert value.format(**facts(sizes, risk=risk).words) in ALGORITHMS


def test_the_command_says_it_in_three_lines(tmp_path, monkeypatch, capsys):
    (tmp_path / "digits.toml").write_text(CONFIG)
    line = ["advise", str(tmp_path / "digits.toml"), "--set", "run.batch1=8", "--set", "run.batch2=8"]
    code, out, _ = command(monkeypatch, capsys, *line)
    assert (code, len(out.splitlines())) == (0, 3), "no site holds less than eight of a side"
    assert "6 of 16 sites hold one class" in out
    assert "the network has no norm to choose" in out
    code, out, _ = command(monkeypatch, capsys, *line, "--set", "data.partition=equal", "--json")
    found = json.loads(out)
    assert found["settings"]["algorithm.name"] == "local_pair"
    assert (found["facts"]["sites"], found["facts"]["one_class"]) == (16, 0)
    assert found["facts"]["network"] == []
    assert len(found["lines"]) == 3
    assert any("batch1 = 8" in flag for flag in found["flags"])
    code, _, err = command(monkeypatch, capsys, *line, "--set", "run.batch1=0")
    assert (code, len(err.strip().splitlines())) == (2, 1)
    code, _, err = command(monkeypatch, capsys, *line, "--set", "model.name=mlpp")
    assert "unknown model 'mlpp'" in err


def test_clients_may_be_given_as_for_fit():
    x, y = torch.zeros(6, 2), torch.tensor([1, 1, 1, 0, 0, 0])
    assert "one site holds all 6 examples" in str(fedxl.advise([(x, y)]))
    with pytest.raises(fedxl.UserError, match="a federation needs at least one client"):
        fedxl.advise([])


def test_times_of_events_want_pairs_across_sites_and_low_rates():
    times, events = [3.0, 1, 2], [1, 0, 1]
    splits = from_times([(np.ones((3, 2)), times, events), (np.ones((3, 2)), times, [0, 0, 0])])
    found = advise(splits)
    assert found.facts == advise(splits, cox()).facts, "times say which risk"
    assert found.settings["algorithm.name"] == "fedxl2"
    assert found.settings["algorithm.lr"] == 0.03
    assert "sites without an event: 1" in found.lines[0]


def test_positives_of_time_to_event_are_called_events():
    clients = [(np.ones((n, 2)), np.arange(n) + 1.0, np.arange(n) < events) for n, events in ((40, 3), (9, 9))]
    found = advise(fedxl.from_times(clients), fedxl.cox(), batch_size=(8, 8))
    assert "the events are the rarest side (12 of 49), and a site with 3 of them" in found.lines[1]
    assert found.flags == ["one site holds fewer events than batch1 = 8, so a step reads some twice; "
                           "the least is 3 (client 0: 3)"]  # fmt: skip
