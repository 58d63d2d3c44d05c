"""Bins fixed beforehand: edges in order for scores of any size, and nothing else is accepted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedxl.errors import UserError
from fedxl.evaluation.grid import MOST_BINS, Grid


@pytest.mark.parametrize("bins", [4, 5, 64, 512, 4096])
def test_edges_ascend_are_symmetric_and_widen_in_proportion(bins):
    edges = Grid(bins, centre=3.0).edges()
    assert len(edges) == bins - 1
    assert (np.diff(edges) > 0).all()
    np.testing.assert_allclose(edges - 3, -(edges - 3)[::-1], rtol=1e-9, atol=1e-9)
    if bins >= 64:
        far = edges[edges > 3 + 1] - 3
        ratios = far[1:] / far[:-1]
        np.testing.assert_allclose(ratios, ratios[0], rtol=1e-3)


def test_a_grid_comes_back_from_json():
    grid = Grid(64, 1.5, 0.1, 50.0)
    assert Grid.from_json(grid.to_json()) == grid


WRONG = {
    "a billion bins": {"bins": 10**9},
    "more than any": {"bins": MOST_BINS + 1},
    "one bin": {"bins": 1},
    "few bins": {"bins": 3},
    "negative": {"bins": -5},
    "part of a bin": {"bins": 2.5},
    "a truth": {"bins": True},
    "a word": {"centre": "0"},
    "no number": {"centre": math.nan},
    "infinite": {"reach": math.inf},
    "beyond floats": {"reach": 10**400},
    "no scale": {"scale": 0},
    "a negative scale": {"scale": -1.0},
    "a scale beyond all reach": {"scale": 1e5},
    "a scale for one example": {"scale": 1e-300},
    "edges that coincide": {"centre": 1e12, "scale": 1e-6},
    "a list": {"scale": [0.01]},
}


@pytest.mark.parametrize("kind", list(WRONG))
def test_what_is_no_grid_is_refused_in_one_line(kind):
    with pytest.raises(UserError, match="bins"):
        Grid.from_json(Grid().to_json() | WRONG[kind])


@pytest.mark.parametrize("content", [None, [], {}, 7, "512", {**Grid().to_json(), "edges": [0, 1]}])
def test_what_does_not_describe_a_grid_is_refused(content):
    with pytest.raises(UserError, match="bins are described by bins, centre, reach, scale"):
        Grid.from_json(content)
