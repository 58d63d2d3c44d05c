"""Time to event: values and gradients against loops over patients, and what a pairing says of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from fedxl import UserError, concordance, cox
from fedxl.errors import RefusedError
from fedxl.risks.pairing import Entry
from fedxl.risks.survival import MOST_BEHIND, AtEvent, AtRisk
from fedxl.risks.timetable import binned, read_binned, read_timetable, times_of, timetable


def patients(count: int = 40, decimals: int = 0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, events and times; with few decimals many are tied."""
    rng = np.random.default_rng(seed)
    time = np.maximum(rng.exponential(5, count).round(decimals), 10.0**-decimals)
    event = rng.random(count) < 0.6
    return torch.from_numpy(rng.normal(size=count)), torch.from_numpy(event).long(), torch.from_numpy(time)


def partial_likelihood(h, event, time, ties: str) -> float:
    """Negative, per event, by its definition: events of one time leave the risk set together or one after another."""
    total, count = 0.0, 0
    for t in sorted(set(time[event > 0])):
        tied = [i for i in range(len(h)) if event[i] and time[i] == t]
        at_risk = sum(math.exp(h[j]) for j in range(len(h)) if time[j] >= t)
        theirs = sum(math.exp(h[j]) for j in tied)
        for k, i in enumerate(tied):
            left = at_risk - (k / len(tied) * theirs if ties == "efron" else 0)
            total, count = total + math.log(left) - h[i], count + 1
    return total / count


@pytest.mark.parametrize("decimals", [0, 6], ids=["tied", "untied"])
@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_cox_is_the_partial_likelihood(ties, decimals):
    h, event, time = patients(decimals=decimals)
    expected = partial_likelihood(h.numpy(), event.numpy(), time.numpy(), ties)
    assert float(cox(ties=ties).value(h, event, time=time)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("decimals", [0, 6], ids=["tied", "untied"])
def test_concordance_is_the_mean_over_pairs_that_can_be_compared(decimals):
    h, event, time = patients(decimals=decimals)
    losses = [
        math.log1p(math.exp(-float(h[i] - h[j])))
        for i in range(len(h))
        for j in range(len(h))
        if event[i] and (time[j] > time[i] or (time[j] == time[i] and not event[j]))
    ]
    assert float(concordance().value(h, event, time=time)) == pytest.approx(np.mean(losses), abs=1e-12)


@pytest.mark.parametrize("build", [cox, concordance])
def test_nobody_to_compare_has_no_risk(build):
    h, event, time = patients()
    assert math.isnan(build().value(h, torch.zeros_like(event), time=time))


def test_bins_begin_at_public_times_and_hold_as_many_events():
    rng = np.random.default_rng(0)
    each = [times_of(rng.exponential(900, count), rng.random(count) < 0.5) for count in (400, 300, 1)]
    table = timetable(each, by_samples=True, bins=8)
    assert len(table.at) == 8
    assert table.at[0] == 0
    assert table.public
    assert not timetable(each, by_samples=True).public
    assert table.tied.sum() == sum(one.events.sum() for one in each)
    assert table.tied.min() >= 0.6 * table.tied.mean(), "between public times, which are 12 % apart"
    assert table.mass.sum() == pytest.approx(1)
    np.testing.assert_array_equal(table.number(np.array([0.0, table.at[3], table.at[4] - 1e-9, 1e9])), [0, 3, 3, 7])
    # What a site tells is enough.
    told = [read_binned(binned(one), int(one.events.sum()), int(one.every.sum())) for one in each]
    for ours, theirs in zip(table, timetable(told, by_samples=True, bins=8), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(table, read_timetable(json.loads(json.dumps(table.to_json()))), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "change",
    [
        {"cells": [2, 1, 3]}, {"cells": [-1, 1, 2]}, {"cells": [1, 2, 9999]}, {"cells": [1, 2]}, {"cells": "abc"},
        {"events": [1, 1, 1]}, {"events": [1, 0, 0.0]}, {"events": [True, 0, 0]}, {"every": [1, 1, 10**9]},
        {"every": [2, 2, 0]}, {"more": [1, 2, 3]}, {"events": [1, -1, 1]}, {"every": [[1], 1, 1]},
    ],
    ids=str,
)  # fmt: skip
def test_counts_of_times_that_cannot_be_true_are_refused(change):
    told = {"cells": [1, 2, 3], "events": [1, 0, 0], "every": [1, 1, 2]}
    assert read_binned(told, 1, 4).every.tolist() == [1, 1, 2]
    with pytest.raises(RefusedError, match="its counts of times"):
        read_binned({**told, **change}, 1, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"at": [1.0, 1.0]}, {"at": [1.0]}, {"mass": [float("nan"), 0.5]}, {"events": [-0.1, 0.5]}, {"tied": "ab"},
        {"tied": [[1], [2]]}, {"more": [1.0, 2.0]}, {"at": [], "mass": [], "events": [], "tied": []},
        {name: list(range(500)) for name in ("at", "mass", "events", "tied")},
    ],
    ids=lambda change: ",".join(change),
)  # fmt: skip
def test_a_table_of_times_that_is_none_is_refused(change):
    told = {"at": [0.0, 1.0], "mass": [0.5, 0.5], "events": [0.1, 0.2], "tied": [1, 2]}
    read_timetable(told)
    with pytest.raises(RefusedError, match="its table of times"):
        read_timetable({**told, **change})


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"ties": "exact"}, "must be one of 'efron', 'breslow', not 'exact'"),
        ({"time_bins": 1}, "time_bins must be 2 to 300, or 0 for exact times"),
        ({"time_bins": 1000}, "time_bins must be 2 to 300, or 0 for exact times"),
        ({"max_share": 1}, "max_share must be above 1"),
    ],
)
def test_settings_that_mean_nothing(wrong, line):
    with pytest.raises(UserError, match=line):
        cox(**wrong)


def test_a_table_adds_what_clients_tell():
    clients = [times_of(np.array([1.0, 2, 2]), np.array([1, 1, 0])), times_of(np.array([2.0, 3]), np.array([1, 0]))]
    table = timetable(clients, by_samples=True)
    np.testing.assert_array_equal(table.at, [1, 2, 3])
    np.testing.assert_allclose(table.mass, [0.2, 0.6, 0.2])
    np.testing.assert_allclose(table.events, [0.2, 0.4, 0])
    np.testing.assert_array_equal(table.tied, [1, 2, 0])
    np.testing.assert_allclose(timetable(clients, by_samples=False).mass, [1 / 6, 1 / 3 + 1 / 4, 1 / 4])


def test_what_a_site_cannot_have_sent():
    """A part decides how much a pair counts, so the server works it out again."""
    table = timetable([times_of(np.array([1.0, 2, 2, 4]), np.array([1, 1, 1, 0]))], True)
    pairing = cox().pairing.informed(table)
    zero, score = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    known = AtEvent(torch.tensor([0, 1]), torch.tensor([0.0, 0.5]), torch.tensor([1.0, 0.5]), zero)
    risk = AtRisk(torch.tensor([1, 2]), torch.tensor([1.0, 0.0]), zero)

    def complaint(first: AtEvent = known, second: AtRisk = risk) -> str:
        return pairing.check_entries(Entry(score, first), Entry(score, second))

    assert complaint() == ""
    assert "shares at risk" in complaint(known._replace(risk_share=torch.tensor([1.0, 0.01])))
    assert "shares at risk" in complaint(known._replace(risk_share=torch.tensor([1.0, float("nan")])))
    for odd in (torch.tensor([0, 3]), torch.tensor([-1, 1])):
        assert "not in the table" in complaint(known._replace(time=odd))
        assert "not in the table" in complaint(second=risk._replace(time=odd))
    assert "not in the table" in complaint(known._replace(tie_discount=torch.tensor([0.0, 1.0])))
    assert "not in the table" in complaint(second=risk._replace(event=torch.tensor([0.5, 0.0])))
    for side in ({"first": known._replace(stratum=zero + 1)}, {"second": risk._replace(stratum=zero + 1)}):
        assert "strata must be 0" in complaint(**side), "a stratum would tell whose a score is"
    binned = cox(time_bins=2).pairing.informed(table)
    assert "weights of tied events" in binned.check_entries(Entry(score, known), Entry(score, risk)), "of one's own"
    mean = known._replace(tie_discount=torch.tensor([0.0, 0.25]), risk_share=torch.tensor([1.0, 0.625]))
    assert binned.check_entries(Entry(score, mean), Entry(score, risk)) == ""


def test_estimates_are_means_over_those_met_and_gradients_sums_over_the_batch():
    """What a batch says of an event, and how pairs count in its gradient, by hand; docs/maths.md, time to event."""
    risk, score = cox(max_share=1e6), torch.tensor([0.3, -0.2, 0.5, 0.1]).double()
    zero = torch.zeros(4, dtype=torch.int64)
    event = Entry(torch.tensor([0.4]).double(), AtEvent(zero[:1] + 1, torch.zeros(1), torch.tensor([0.25]), zero[:1]))
    batch = Entry(score, AtRisk(torch.tensor([0, 1, 0, 2]), torch.zeros(4), zero))
    losses, meets = risk.losses(event, batch), risk.pairing.meets(event, batch, "all")
    met = [math.exp(float(h) - 0.4) for h in score[[1, 3]]]
    assert float(risk.estimate(losses, meets)) == pytest.approx(math.log(sum(met) / 2)), "of the two who were met"
    u = torch.tensor([0.7]).double()
    weights = risk.pair_weights(losses, u, meets)[0]
    expected = [0, met[0] / math.exp(0.7) / 0.25 / 4, 0, met[1] / math.exp(0.7) / 0.25 / 4]  # 4 in the batch
    np.testing.assert_allclose(weights, expected)


def test_estimates_are_never_far_behind_their_batch():
    """Scores that have grown by 8 since the last visit: u follows to within the factor, and never falls faster."""
    risk, l = cox(), torch.tensor([[8.0, 8.0], [-8.0, -8.0]]).double()
    new = risk.update_u(torch.zeros(2).double(), l, None, gamma=0.1)
    assert new.tolist() == pytest.approx([8 - math.log(MOST_BEHIND), math.log(0.9 + 0.1 * math.exp(-8))])
    nobody = torch.tensor([[1.0, 1.0], [0.0, 0.0]]).double()
    kept = risk.update_u(torch.tensor([0.0, 3.0]).double(), l, nobody, gamma=0.1)
    assert kept[1] == 3, "a row that meets nobody keeps its u"
    unknown = torch.full((2,), math.nan).double()
    assert torch.equal(risk.update_u(unknown, l, None, gamma=0.1), risk.estimate(l)), (
        "a first visit takes the batch's"
    )
