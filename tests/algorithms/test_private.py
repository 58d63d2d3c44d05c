"""Differential privacy of examples: one example moves a step by no more than is stated, in every engine."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fedxl import tree
from fedxl.algorithms import ALGORITHMS, build
from fedxl.algorithms.pool import Scores
from fedxl.algorithms.private import UNITS, Noise, bounded, noisy_mean, noisy_scores
from fedxl.algorithms.protocol import Batch
from fedxl.algorithms.server_rules import next_state
from fedxl.data.inputs import from_arrays
from fedxl.engine import drawing
from fedxl.engine.executors import loop
from fedxl.errors import UserError
from fedxl.models import scorer, weights_of
from fedxl.options import accepted
from fedxl.risks import (
    Entry,
    auroc,
    average_precision,
    cvar_partial_auc,
    p_norm_push,
    partial_auc,
    several,
    two_way_partial_auc,
)
from fedxl.risks.pairing import Minibatch, Share
from tests.algorithms.rounds import after_rounds, assert_agree
from tests.conftest import EXECUTORS, RAGGED, make_clients
from tests.running import engine_for, fit_named

PRIVATE: dict[str, Any] = {
    "level": "free",
    "pool_u": "server",
    "dp_clip": 0.1,
    "dp_noise": 0.7,
    "dp_score_noise": 0.2,
}
SILENT = 1e-30  # noise that no number feels
CLIP, SIZE1, SIZE2 = 0.1, 4, 5
RISKS = {
    "auroc": auroc(scores="sigmoid"),
    "pauc": partial_auc(scores="sigmoid"),
    "tpauc": two_way_partial_auc(0.3, 0.3, scores="sigmoid"),
    "push": p_norm_push(scores="sigmoid"),
}


def after_two(risk: Any, network: nn.Module, executor: str = "loop", **options: Any) -> dict[str, Tensor]:
    """States after the warm-up and two rounds."""
    return after_rounds(build("fedxl2", risk, **options), network, from_arrays(make_clients(RAGGED)), executor, 2)


LENDING = {"uploads": 3, "one_class": "lend"}


@pytest.mark.parametrize(
    ("executor", "options"), [*((name, {}) for name in EXECUTORS if name != "loop"), ("vmap", LENDING)]
)
def test_executors_add_the_same_noise(network, executor, options):
    risk = partial_auc(scores="sigmoid")
    assert_agree(*(after_two(risk, network(), name, **PRIVATE, **options) for name in ("loop", executor)))


@pytest.mark.parametrize("risk", RISKS)
def test_with_a_wide_clip_and_no_noise_nothing_changes(network, risk):
    given = {**PRIVATE, "dp_clip": 1e6, "dp_noise": SILENT, "dp_score_noise": SILENT}
    plain = after_two(RISKS[risk], network(), level="free", pool_u="server")
    private = after_two(RISKS[risk], network(), **given)
    for key, value in plain.items():
        if "pool.first.u" not in key:  # which a linear risk does not use
            torch.testing.assert_close(private[key], value, rtol=0, atol=1e-9, equal_nan=True, msg=key)
    clipped = after_two(RISKS[risk], network(), **{**given, "dp_clip": 1e-3})
    name = "server.weights.params.0.weight"
    assert not torch.allclose(clipped[name], plain[name], rtol=0, atol=1e-4), "and a narrow one does change it"


class OneStep:
    """A step of a client on any batch, without noise; what it moves is the gradient itself."""

    def __init__(self, risk: str, network: nn.Module, rng: torch.Generator, sizes: float) -> None:
        silent = {"dp_noise": SILENT, "dp_score_noise": SILENT}
        self.algorithm = build("fedxl2", RISKS[risk], beta=1.0, lr=1.0, **{**PRIVATE, "dp_clip": CLIP, **silent})
        self.score = scorer(network, training=True)
        self.server = self.algorithm.init(weights_of(network))
        self.rng, self.sizes = rng, sizes
        scores = torch.rand(3, 8, generator=rng, dtype=torch.float64)
        b = Entry(scores[2, :SIZE2], torch.zeros(SIZE2).double())
        self.passive = Scores(Entry(scores[0, :SIZE1], ()), scores[1, :SIZE1], b)
        self.u = torch.rand(SIZE1, generator=rng, dtype=torch.float64)
        self.x = self.examples(SIZE1 + SIZE2)

    def examples(self, count: int) -> Tensor:
        return self.sizes * torch.randn(count, 5, generator=self.rng, dtype=torch.float64)

    def gradient(self, x: Tensor, u: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The step's gradient, as one vector, and the scores that leave."""
        one = torch.ones((), dtype=torch.float64)
        client = self.algorithm.init_client(self.server, SIZE1)._replace(u=u)
        share = Share(one, one, one, torch.stack((one, one)), torch.stack((3 * one, 0.4 * one)))
        full = tree.map(torch.ones_like, self.server.pool)
        work = self.algorithm.start(self.server._replace(pool=full), client, share)
        noise = Noise(tree.map(torch.zeros_like, self.server.weights.params), torch.zeros(SIZE1 + SIZE2).double())
        y = torch.cat((torch.ones(SIZE1), torch.zeros(SIZE2))).double()
        rows = torch.arange(SIZE1) if rows is None else rows
        batch = Batch(Minibatch(x, y, rows, ()), self.passive, (), noise)
        after, trace = self.algorithm.step(self.score, self.server, work, batch)
        moved = tree.map(torch.sub, work.weights.params, after.weights.params)
        return torch.cat([leaf.flatten() for leaf in tree.leaves(moved)]), torch.cat((trace.a.score, trace.b.score))


@pytest.mark.parametrize("risk", RISKS)
def test_another_example_moves_a_step_by_no_more_than_twice_the_clip(network, risk):
    """Whatever it is, wherever it stands, and whatever its u is. Others' scores do not move at all."""
    rng = torch.Generator().manual_seed(6)
    most = 0.0
    for trial in range(40):
        step = OneStep(risk, network(), rng, sizes=10.0 ** (trial % 5 - 2))
        place = trial % (SIZE1 + SIZE2)
        x, u = step.x.clone(), step.u.clone()
        x[place] = 100 * step.examples(1)[0]
        if place < SIZE1:
            u[place] = float("nan") if trial % 2 else 5.0
        (before, shown), (after, now) = step.gradient(step.x, step.u), step.gradient(x, u)
        moved = float((after - before).norm()) * (SIZE1 + SIZE2)
        assert moved <= 2 * CLIP, (trial, moved)
        most = max(most, moved)
        others = torch.arange(SIZE1 + SIZE2) != place
        assert torch.equal(shown[others], now[others])
    assert most > CLIP, "examples that pull in other directions come close to the bound"


def test_an_example_that_stands_twice_in_a_batch_counts_twice(network):
    rng = torch.Generator().manual_seed(7)
    for trial in range(10):
        step = OneStep("pauc", network(), rng, sizes=3.0)
        twice, rows = torch.tensor([0, 1]), torch.tensor([0, 0, 2, 3])
        x = step.x.clone()
        x[twice] = step.x[0]
        other = x.clone()
        other[twice] = step.examples(1)[0]
        (before, _), (after, _) = step.gradient(x, step.u, rows), step.gradient(other, step.u, rows)
        assert float((after - before).norm()) * (SIZE1 + SIZE2) <= 4 * CLIP, trial


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_an_example_without_a_finite_gradient_counts_for_nothing(bad):
    slopes = {"w": torch.ones(3, 2, dtype=torch.float64), "b": torch.ones(3, dtype=torch.float64)}
    slopes["w"][1, 0] = bad
    noise = tree.map(lambda leaf: torch.zeros_like(leaf[0]), slopes)
    found = noisy_mean(slopes, torch.full((3,), 0.1, dtype=torch.float64), noise, clip=1.0, sigma=1.0)
    for leaf in found.values():
        torch.testing.assert_close(leaf, torch.full_like(leaf, 0.2), rtol=0, atol=1 / UNITS)


@pytest.mark.parametrize(("slope", "d"), [(1e-37, 1e36), (0.0, 1e36), (1e-40, 1e38), (1e-40, -1e38)])
def test_an_example_whose_weight_single_precision_cannot_hold_counts_for_nothing(slope, d):
    """Its clipped gradient would be infinite, or 0 times infinity, and the sum tell that the example is there."""
    slopes = {"w": torch.tensor([[slope, slope], [1.0, -1.0]])}
    noise = {"w": torch.full((2,), 3.0)}
    found = noisy_mean(slopes, torch.tensor([d, 0.1]).double(), noise, clip=1.0, sigma=0.5)["w"]
    blank = noisy_mean({"w": slopes["w"] * torch.tensor([[0.0], [1.0]])}, torch.tensor([0.0, 0.1]), noise, 1.0, 0.5)
    assert torch.equal(found, blank["w"])


def test_noise_is_as_large_as_it_should_be():
    draws, still = torch.from_numpy(drawing.discrete_normals(1, 0, 0, 0, 20_000)), torch.zeros(8, 20_000).double()
    found = noisy_mean({"w": still}, torch.ones(8).double(), {"w": draws}, clip=2.0, sigma=3.0)["w"]
    assert stats.kstest(found.numpy() / (2.0 * 3.0 / 8), "norm").pvalue > 0.01
    within = partial_auc(scores="sigmoid").score_range
    scores = noisy_scores(torch.full((20_000,), 0.5).double(), draws, 0.25, within)
    assert float(scores.min()) == 0
    assert float(scores.max()) == 1
    inner = scores[(scores > 0) & (scores < 1)]
    assert stats.kstest(inner.numpy(), stats.truncnorm(-2, 2, loc=0.5, scale=0.25).cdf).pvalue > 0.01
    unknown = noisy_scores(torch.tensor([float("nan")]), torch.zeros(1), 0.25, within)
    assert float(unknown) == 0.5


def test_draws_are_whole_normal_and_differ_for_every_client_round_step_and_seed():
    keys = list(itertools.product((0, 2**127 + 1), (0, 1), (1, 2), (0, 1)))  # seed, client, round, step
    draws = np.stack([drawing.discrete_normals(*key, 4001) for key in keys])
    assert draws.dtype == np.int64
    assert stats.kstest(draws.ravel() / UNITS, "norm").pvalue > 0.01
    assert stats.chisquare(np.bincount(draws.ravel() % 64, minlength=64)).pvalue > 0.01, "down to the last bit"
    correlation = np.corrcoef(draws) - np.eye(len(keys))
    assert np.abs(correlation).max() < 0.08  # five standard deviations
    np.testing.assert_array_equal(drawing.discrete_normals(*keys[3], 4001), draws[3])


def test_noise_of_many_steps_takes_little_more_memory_than_itself():
    steps, like = 50, {"w": torch.zeros(4, 5000), "b": torch.zeros(5)}
    tracemalloc.start()
    found = drawing.draw_noise(like, [7], [3], 2, steps)  # tensors do not count: what counts is on the way to them
    assert tracemalloc.get_traced_memory()[1] < 4 * steps * 20_005
    tracemalloc.stop()
    for step in (0, 49):
        drawn = drawing.discrete_normals(7, 3, 2, step, 20_005)
        assert np.array_equal(torch.cat([found[n][0, step].flatten() for n in ("w", "b")]).numpy(), drawn)
    with pytest.raises(UserError, match="numbers is too much for a round; lower clients_at_once or local_steps"):
        drawing.draw_noise({"w": torch.zeros(1).expand(2**20)}, [7], [3], 2, 2**10 + 1)


def test_a_step_is_drawn_in_pieces_that_share_no_bits(monkeypatch):
    whole = drawing.discrete_normals(7, 3, 2, 1, 100)
    monkeypatch.setattr(drawing, "PIECE", 100)
    draws = drawing.discrete_normals(7, 3, 2, 1, 40_050)
    assert np.array_equal(draws[:100], whole)
    assert stats.kstest(draws / UNITS, "norm").pvalue > 0.01
    assert len({tuple(piece[:50]) for piece in np.split(draws[:40_000], 400)}) == 400


def test_draws_have_the_probabilities_of_a_discrete_gaussian(monkeypatch):
    """With a grid so coarse that each whole number can be counted."""
    monkeypatch.setattr(drawing, "UNITS", 4)
    draws = drawing.discrete_normals(3, 0, 0, 0, 400_000)
    numbers = np.arange(-60, 61)
    expected = np.exp(-(numbers**2) / (2 * 4**2))
    expected *= len(draws) / expected.sum()
    observed = np.array([(draws == number).sum() for number in numbers])
    often = expected > 20
    assert observed[~often].sum() < 2 * expected[~often].sum() + 20
    expected *= observed[often].sum() / expected[often].sum()
    assert stats.chisquare(observed[often], expected[often]).pvalue > 0.01


def reachable(data: dict[str, Tensor], released: Tensor, clip: float, sigma: float) -> Tensor:
    """Which released numbers some noise leads to, by this data set; near the noise that it would need."""
    size = len(data["w"])
    d, nothing = torch.full((size,), 1 / size), torch.zeros_like(released)
    clean = noisy_mean(data, d, {"w": nothing}, clip, sigma)["w"]
    needed = ((released.double() - clean.double()) * size / (sigma * clip) * UNITS).round()
    tries = [noisy_mean(data, d, {"w": needed + shift}, clip, sigma)["w"] for shift in range(-3, 4)]
    return (torch.stack(tries) == released).any(0)


def test_no_released_number_tells_two_data_sets_apart():
    """Noise in floating point leaves numbers that the sum of one data set never comes to, and that of another does.

    Who sees one step of 65 weights then knows which it was (Mironov 2012), where noise of 7.5 allows 55 % at most.
    """
    clip, sigma, size, weights = 0.1, 7.5, 8, 65
    rng, told = torch.Generator().manual_seed(5), 0
    for trial in range(60):
        data = {"w": torch.randn(size, weights, generator=rng)}
        other = {"w": torch.cat((data["w"][:-1], torch.randn(1, weights, generator=rng)))}
        noise = drawing.draw_noise({"w": torch.zeros(weights)}, [trial], [0], 1, 1)["w"][0, 0]
        released = noisy_mean(data, torch.full((size,), 1 / size), {"w": noise}, clip, sigma)["w"]
        assert bool(reachable(data, released, clip, sigma).all()), "the attacker tries the right noise, too"
        told += not bool(reachable(other, released, clip, sigma).all())
    assert told == 0, f"{told} of 60 guesses are certain"


def test_uploaded_scores_lie_on_one_grid_whatever_the_score():
    within = partial_auc(scores="sigmoid").score_range
    noise = torch.from_numpy(drawing.discrete_normals(1, 0, 0, 0, 1000)).float()
    released = noisy_scores(torch.rand(1000, generator=torch.Generator().manual_seed(1)).double(), noise, 0.1, within)
    steps = (released[(released > 0) & (released < 1)] - 0.5) / (0.1 / UNITS)
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-6)


def test_lengths_of_large_gradients_are_not_rounded_in_single_precision():
    """Sums of a million squares in single precision lose up to some percent, and the clip would be longer."""
    slopes = torch.full((2, 2**24 + 1), 2.0**-13)
    slopes[:, 0] = 1.0
    clip = 0.5
    weight = bounded({"w": slopes}, torch.ones(2), clip)
    assert weight.dtype == torch.float64
    lengths = (slopes.double() * weight[:, None]).norm(dim=1)
    assert bool((lengths <= clip).all())
    torch.testing.assert_close(lengths, torch.full((2,), clip).double(), rtol=2e-5, atol=0)
    silent = {"w": torch.zeros(2**24 + 1)}
    for row in slopes:
        found = noisy_mean({"w": row[None]}, torch.ones(1), silent, clip, 1.0)["w"]
        assert float(found.double().norm()) <= clip


def test_what_a_client_uploads_holds_no_estimates_and_no_stand_ins(network):
    """A client without positives scores negatives in their place. Those scores must stay at home."""
    algorithm = build("fedxl2", partial_auc(scores="sigmoid"), **{**PRIVATE, "dp_score_noise": SILENT})
    engine = engine_for(algorithm, network(), from_arrays(make_clients(RAGGED)), loop, 3, SIZE1, SIZE2, seed=1)
    server = algorithm.init(weights_of(network()))
    for round in range(2):
        updates: Any = engine.run_round(server, round, np.arange(len(RAGGED)))
        for client, (positives, negatives) in enumerate(RAGGED):
            sent = tree.map(lambda leaf, at=client: leaf[at], updates.scores)
            assert sent.u.isnan().all()
            assert bool((sent.a.score == 0.5).all()) == (positives == 0)
            assert bool((sent.b.score == 0.5).all()) == (negatives == 0)
        server = next_state(algorithm.phase(round), server, updates)


REFUSED = {
    "level": ({"level": "even"}, "set level = 'free'"),
    "pool_u": ({"pool_u": "clients"}, "set pool_u = 'server'"),
    "fresh": ({"fresh": True}, "set fresh = false"),
    "cvar": ({"risk": cvar_partial_auc()}, "must not change the gradients of others"),
    "several": ({"risk": several(partial_auc(scores="sigmoid"), 2)}, "for risks of one label"),
    "raw": ({"risk": partial_auc(scores="raw")}, "set scores = 'sigmoid'"),
    "labels": ({"risk": average_precision(scores="sigmoid")}, "must pair positives with negatives"),
    "no noise": ({"dp_noise": 0.0}, "dp_clip needs noise"),
    "no score noise": ({"dp_score_noise": 0.0}, "dp_clip needs noise"),
    "no clip": ({"dp_clip": 0.0}, "need dp_clip"),
    "a tiny clip": ({"dp_clip": 1e-36}, "dp_clip must be at least 1e-09"),
    "negative": ({"dp_noise": -1.0}, "dp_noise must be a finite number"),
    "delta": ({"dp_delta": 0.0}, "dp_delta must lie in"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_break_the_promise_is_refused_in_one_line(case):
    changes, message = REFUSED[case]
    options = {"risk": partial_auc(scores="sigmoid"), **PRIVATE, **changes}
    with pytest.raises(UserError, match=message):
        build("fedxl2", **options)


def test_a_network_with_statistics_of_batches_is_refused():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    with pytest.raises(UserError, match="must have no buffers"):
        fit_named(model, make_clients([(5, 5), (4, 6)]), partial_auc(scores="sigmoid"), rounds=1, **PRIVATE)


@pytest.mark.parametrize(
    ("run", "line"),
    [({"train_metrics": True}, "train_metrics = false"), ({"precision": "bf16"}, 'precision = "fp32"')],
)
def test_runs_that_would_tell_more_than_epsilon_says_are_refused(run, line):
    model = nn.Linear(5, 1)
    with pytest.raises(UserError, match=line):
        fit_named(model, make_clients([(5, 5), (4, 6)]), partial_auc(scores="sigmoid"), rounds=1, **run, **PRIVATE)


def test_weights_of_examples_are_refused():
    """They would be read more often than epsilon accounts for."""
    data = from_arrays(make_clients([(5, 5), (4, 6)]))
    data = replace(data, weight=torch.ones(len(data)))
    model = nn.Linear(5, 1).double()
    with pytest.raises(UserError, match="limits how often an example is read"):
        fit_named(model, data, partial_auc(scores="sigmoid"), rounds=1, **PRIVATE)


def test_other_algorithms_do_not_take_these_settings():
    assert [name for name in ALGORITHMS if "dp_clip" in accepted(ALGORITHMS[name])] == ["fedxl1", "fedxl2"]
