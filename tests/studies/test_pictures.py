"""Pictures as drawn: what is drawn can be seen, and titles and legends do not run into each other."""

from __future__ import annotations

from itertools import pairwise

import pytest

plt = pytest.importorskip("matplotlib.pyplot")

from studies.pictures import Bar, Panel, Point, bars, lines  # noqa: E402

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


@pytest.mark.parametrize("paper", [None, 0.7])
def test_lines_of_seeds_and_of_test_sets_end_inside_and_the_legend_names_what_is_there(drawn, paper):
    figure = drawn({"AUC": [Bar(0.5, 0.02, None, (0.3, 0.55)), Bar(0.6, 0.2, paper, (0.55, 0.75))]})
    low, high = figure.axes[0].get_ylim()
    assert low < 0.3
    assert high > 0.8
    assert ("diamonds" in figure.get_supxlabel()) == (paper is not None)


def test_the_legend_of_lines_hides_nothing(tmp_path, kept):
    many = [Point(place, 0.7, 0.01) for place in range(3)]
    missing = [Point(0, 0.7), Point(1, 0.6), Point(2, float("nan"))]
    panels = [
        Panel("CIFAR-10", along, "partial AUC", series, ["0", "4", "8"], {"Centralized": 0.8})
        for along, series in {
            "alpha": {"Local Pair": missing, "FeDXL": many},
            "sites": {"Local Pair": many, "FeDXL": [Point(place, 0.9, 0.01) for place in range(3)]},
        }.items()
    ]
    figure = kept(lines, tmp_path / "skew.png", "FeDXL against the best federated baseline", panels, "FeDXL")
    renderer = figure.canvas.get_renderer()
    (legend,) = figure.legends
    box = legend.get_window_extent(renderer)
    assert {text.get_text() for text in legend.get_texts()} == {"Centralized", "Local Pair", "FeDXL"}
    for axes in figure.axes:
        assert not axes.get_tightbbox(renderer).overlaps(box)
        low, high = axes.get_ylim()
        assert low < 0.6
        assert high > 0.9, "both panels on one scale"
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "4", "8"]
    heavy = [bars for axes in figure.axes for bars in axes.containers if bars.lines[0].get_linewidth() == 2.6]
    assert len(heavy) == 2, "ours in each panel"


def test_logarithmic_axes_have_plain_numbers(tmp_path, kept):
    points = [Point(x, 0.4 / x, 0.01 / x) for x in (1, 2, 4)]
    panel = Panel("Clients", "N", "floor", {"FeDXL1": points}, slopes={"FeDXL1": (0, -1.0)}, log=True)
    (axes,) = kept(lines, tmp_path / "rates.png", "Rates", [panel]).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4"]
    assert "0.2" in [label.get_text() for label in axes.get_yticklabels()]
    dashed = axes.get_lines()[-1].get_ydata()
    assert dashed == pytest.approx([0.4, 0.2, 0.1]), "the theorem's slope through the first point"
