"""A simulation that checks updates leaves out what a server with sites refuses, and is the same if nobody lies."""

from __future__ import annotations

import numpy as np
import pytest

from fedxl import FeDXL2, UserError, partial_auc, tree
from fedxl.data.inputs import from_arrays
from fedxl.engine.executors import vectorised
from fedxl.models import weights_of
from studies.checked import Checked
from tests.conftest import make_clients
from tests.running import engine_for, play, problem_of

SIZES = [(6, 9), (5, 5), (4, 8), (7, 7)]
RUN = {"local_steps": 3, "batch1": 4, "batch2": 4}


class Lying:
    """An engine whose last client sends something else from a round on."""

    def __init__(self, engine, change, since: int = 1) -> None:
        self.engine, self.change, self.since = engine, change, since

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def run_round(self, server, round, cohort):
        updates = self.engine.run_round(server, round, cohort)
        return self.change(updates) if round >= self.since else updates


def rounds(network, change=None, count: int = 3, cohort=range(4), influence: float = 20):
    """The server's state after these rounds, and the engine, if updates are checked."""
    data, algorithm = from_arrays(make_clients(SIZES)), FeDXL2(partial_auc(lam=1.0), lr=0.2)
    inner = engine_for(algorithm, network(), data, vectorised, 3, 4, 4)
    engine = Lying(inner, change) if change else inner
    if influence:
        engine = Checked(engine, problem_of(algorithm, network(), data, **RUN), inner.shares, influence)
    server = algorithm.init(weights_of(network()))
    for r in range(count):
        server = play(algorithm, engine, server, r, np.array(cohort))
    return server, engine


def last_row(leaf, value):
    changed = leaf.clone()
    changed[-1] = value
    return changed


LIES = {
    "scores": (
        lambda u: u._replace(scores=u.scores._replace(b=u.scores.b._replace(score=last_row(u.scores.b.score, 7.0)))),
        "its scores (second) are not all within [0, 1]",
    ),
    "G": (lambda u: u._replace(G=tree.map(lambda leaf: last_row(leaf, 1e4), u.G)), "times as large as usual"),
    "weights": (
        lambda u: u._replace(
            weights=u.weights._replace(params=tree.map(lambda w: last_row(w, np.inf), u.weights.params))
        ),
        "its weights hold NaN or infinity",
    ),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_what_a_server_would_refuse_is_left_out(network, lie):
    change, reason = LIES[lie]
    server, engine = rounds(network, change, count=2)
    [dropped] = engine.remarks()["dropped"]
    assert (dropped["round"], dropped["client"]) == (1, 3)
    assert reason in dropped["reason"]
    assert engine.remarks() == {}, "each is told once"

    data, algorithm = from_arrays(make_clients(SIZES)), FeDXL2(partial_auc(lam=1.0), lr=0.2)
    alone = engine_for(algorithm, network(), data, vectorised, 3, 4, 4)
    expected = play(algorithm, alone, algorithm.init(weights_of(network())), 0, np.arange(4))
    expected = play(algorithm, alone, expected, 1, np.arange(3))
    for found, other in zip(tree.leaves(server), tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found.numpy(), other.numpy(), rtol=0, atol=1e-12)


def test_honest_rounds_are_the_same_bits(network):
    checked, engine = rounds(network)
    plain, _ = rounds(network, influence=0)
    assert engine.remarks() == {}
    for found, other in zip(tree.leaves(checked), tree.leaves(plain), strict=True):
        assert found.equal(other)


def test_what_is_usual_goes_into_checkpoints(network):
    server, engine = rounds(network)
    kept = tree.pack(engine.population)
    assert any(name.startswith("usual.") for name in kept)
    _, other = rounds(network, count=0)
    other.restore(server, kept)
    assert other.influence.usual == engine.influence.usual
    again = tree.pack(other.population)
    assert again.keys() == kept.keys()
    assert all(again[name].equal(leaf) or leaf.isnan().any() for name, leaf in kept.items())


def test_a_round_of_which_nothing_is_left_is_one_line(network):
    change, _ = LIES["scores"]
    with pytest.raises(UserError, match="round 1: all updates were refused; the last reason: its scores"):
        rounds(network, change, count=2, cohort=[3])
