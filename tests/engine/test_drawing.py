"""Secret seeds: which draws they change, and that they change nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedxl import sampling
from fedxl.algorithms.protocol import Reading
from fedxl.data.examples import Examples
from fedxl.data.inputs import from_arrays
from fedxl.engine.drawing import NO_SECRETS, Drawing, Schedule, Secrets
from fedxl.risks.pairing import PoolWeights
from fedxl.sampling import Purpose
from tests.conftest import make_clients

READING, SCHEDULE = Reading("positive", "negative", 4, 5, True), Schedule(3, 4, 5, seed=1)
POOL = PoolWeights(40, np.linspace(1.0, 2.0, 50))
MINE, SERVERS = sampling.SECRET + 7, sampling.SECRET + 8
OWN = ("examples", "rows", "fresh", "fresh_rows")
LAGS = ("lag1", "lag2")


def drawn(federation: Examples, client: int, secrets: Secrets = NO_SECRETS, first_number: int = 0):
    return Drawing(federation, READING, SCHEDULE, (), first_number, secrets).draw(client, 2, 1, POOL)


@pytest.mark.parametrize(
    ("secrets", "client", "changed"),
    [
        (Secrets({3: MINE}), 3, OWN),
        (Secrets({3: MINE}), 0, ()),
        (Secrets(pool=SERVERS), 3, LAGS),
        (Secrets({3: MINE}, SERVERS), 3, (*OWN, *LAGS)),
    ],
)
def test_a_secret_changes_the_draws_that_it_is_for(ragged, secrets, client, changed):
    before, after = drawn(ragged, client), drawn(ragged, client, secrets)
    differing = {name for name in before._fields if not np.array_equal(getattr(before, name), getattr(after, name))}
    assert differing == set(changed)


def test_a_secret_is_a_clients_wherever_it_runs(ragged):
    """A site is client 0 of its own simulator, and has its number in the federation all the same."""
    alone = ragged.share_out([ragged.parts[3]])
    one, other = drawn(ragged, 3, Secrets({3: MINE})), drawn(alone, 0, Secrets({3: MINE}), first_number=3)
    rows = ragged.parts[3]  # where the site's own rows are among those of all
    other = other._replace(examples=rows[other.examples], fresh=rows[other.fresh])
    assert all(map(np.array_equal, one, other))


def test_private_epochs_are_permutations_as_all_others_are(ragged):
    held = len(Drawing(ragged, READING, SCHEDULE).held[3].first)
    rows = sampling.Stream(MINE, 3).epochs(Purpose.FIRST, 0, 8 * held, held).reshape(8, held)
    np.testing.assert_array_equal(np.sort(rows, 1), np.tile(np.arange(held), (8, 1)))


def test_streams_of_a_secret_are_its_hashes_and_those_of_other_seeds_what_they_were():
    """A change here would change every run that is under way."""
    public = np.random.Generator(np.random.PCG64(np.random.SeedSequence([5, 6, 7, 8])))
    assert sampling.generator(5, Purpose.POOL, 7, 8).integers(2**62) == public.integers(2**62)
    plain = np.random.Generator(np.random.PCG64(np.random.SeedSequence([MINE, 6, 7, 8])))
    found = sampling.generator(MINE, Purpose.POOL, 7, 8).integers(2**62)
    assert found != plain.integers(2**62), "from its state nobody calculates back to the seed"
    assert found == sampling.generator(MINE, Purpose.POOL, np.int64(7), np.int64(8)).integers(2**62)


def test_weights_do_not_change_how_classes_are_mixed():
    """A method that reads all examples sees positives as often as before, whatever they weigh."""
    data = from_arrays(make_clients([(6, 18), (10, 10)]))
    heavy = torch.where(data.y[:, 0] > 0, 9.0, 1.0)
    weighted = replace(data, weight=heavy)
    reading = Reading("all", "none", 24, 0)
    for each in (data, weighted):
        drawn = Drawing(each, reading, Schedule(4, 24, 0, seed=1)).draw(0, 0, 0, None)
        assert float(data.y[drawn.examples, 0].float().mean()) == 0.25
