"""The paper's figures as drawn: what is drawn can be seen, and titles do not run into each other."""

from __future__ import annotations

from itertools import pairwise

import pytest

plt = pytest.importorskip("matplotlib.pyplot")

from fedxl.experiments.paper.pictures import Bar, bars  # noqa: E402

LONG = "ChestMNIST (set=chestmnist_subset, label=infiltration), score_norm = True\npartial AUC, FPR ≤ "


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """The figure that `bars` draws, kept open."""
    figures = []

    def draw(panels):
        monkeypatch.setattr(plt, "close", figures.append)
        bars(tmp_path / "bars.png", "Partial AUC", ["one", "FeDXL"], panels)
        monkeypatch.undo()
        return figures[0]

    yield draw
    plt.close("all")


def test_titles_stay_above_their_panels(drawn):
    found = [Bar(0.5, 0.01, None, None), Bar(0.6, 0.01, None, None)]
    figure = drawn({f"{LONG}0.{i}": found for i in range(4)})
    renderer = figure.canvas.get_renderer()
    places = sorted((axes.title.get_window_extent(renderer) for axes in figure.axes), key=lambda box: box.x0)
    assert all(left.x1 < right.x0 for left, right in pairwise(places))


def test_lines_of_seeds_and_of_test_sets_end_inside(drawn):
    figure = drawn({"AUC": [Bar(0.5, 0.02, None, (0.3, 0.55)), Bar(0.6, 0.2, 0.7, (0.55, 0.75))]})
    low, high = figure.axes[0].get_ylim()
    assert low < 0.3
    assert high > 0.8


@pytest.mark.parametrize("paper", [None, 0.62])
def test_the_legend_speaks_of_the_paper_where_it_has_results(drawn, paper):
    figure = drawn({"AUC": [Bar(0.5, 0.1, None, None), Bar(0.6, 0.02, paper, None)]})
    assert ("diamonds" in figure.get_supxlabel()) == (paper is not None)
