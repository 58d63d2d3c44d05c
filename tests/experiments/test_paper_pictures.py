"""The paper's figures as drawn: what is drawn can be seen, and titles do not run into each other."""

from __future__ import annotations

from itertools import pairwise

import pytest

plt = pytest.importorskip("matplotlib.pyplot")

from fedxl.experiments.paper.pictures import Bar, Panel, against_skew, bars  # noqa: E402

LONG = "ChestMNIST (set=chestmnist_subset, label=infiltration), score_norm = True\npartial AUC, FPR ≤ "


@pytest.fixture
def kept(monkeypatch):
    """The figure that a function draws, kept open."""
    figures = []

    def draw(function, *arguments):
        monkeypatch.setattr(plt, "close", figures.append)
        function(*arguments)
        monkeypatch.undo()
        return figures[0]

    yield draw
    plt.close("all")


@pytest.fixture
def drawn(tmp_path, kept):
    return lambda panels: kept(bars, tmp_path / "bars.png", "Partial AUC", ["one", "FeDXL"], panels)


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


def test_the_legend_of_methods_against_skew_hides_nothing(tmp_path, kept):
    nothing = (float("nan"), 0.0)
    panels = [
        Panel("CIFAR-10, norm = group", along, ["0", "4", "8"], series, {"Centralized": 0.8})
        for along, series in {
            "alpha": {"Local Pair": [(0.7, 0.01), (0.6, 0.02), nothing], "FeDXL": [(0.7, 0.01)] * 3},
            "sites with one class": {"Local Pair": [(0.7, 0.01)] * 3, "FeDXL": [(0.9, 0.01)] * 3},
        }.items()
    ]
    message = "FeDXL against the best federated baseline: above in 3, level in 3, below in 1 of 7 cells"
    figure = kept(against_skew, tmp_path / "skew.png", message, "partial AUC", panels, "FeDXL")
    renderer = figure.canvas.get_renderer()
    (legend,) = figure.legends
    box = legend.get_window_extent(renderer)
    assert {text.get_text() for text in legend.get_texts()} == {
        "Centralized, all data in one place",
        "Local Pair",
        "FeDXL",
    }
    for axes in figure.axes:
        assert not axes.get_tightbbox(renderer).overlaps(box)
        low, high = axes.get_ylim()
        assert low < 0.58
        assert high > 0.91, "both panels on one scale"
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "4", "8"]
    assert figure.get_suptitle() == message
    assert figure.get_window_extent().x1 > box.x1
    for name, widest in (("FeDXL", 2.6), ("Local Pair", 1.5)):
        lines = [line for axes in figure.axes for line in axes.get_lines() if line.get_linewidth() == widest]
        assert len(lines) == 2, name
