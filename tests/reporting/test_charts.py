"""Charts: what is drawn is what was given, and names of others stay text."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import precision_recall_curve, roc_curve

from fedxl.evaluation.scores import Scores
from fedxl.reporting import plots
from fedxl.reporting.charts import chart as charts
from fedxl.reporting.charts import pictures, scale
from fedxl.reporting.charts.chart import Chart, Key
from fedxl.reporting.charts.scale import element, number
from fedxl.reporting.document import TEMPLATES
from fedxl.reporting.sections import rounds
from fedxl.reporting.study import study
from tests.reporting import sample
from tests.reporting.charts_reading import drawn, parse, points, values

HEIGHT = charts.HEIGHT - charts.BOTTOM
UNIT = (0.0, 1.0)
EVIL = "<script>alert(1)</script>\"'&\x00\x1b[2J"


def some(seed: int, count: int = 300) -> Scores:
    rng = np.random.default_rng(seed)
    labels = (rng.random(count) < 0.3).astype(np.int64)
    return Scores.of(np.round(rng.normal(labels, 1.0), 1), labels)  # with ties


def curve_of(svg: str, number: int) -> np.ndarray:
    root = parse(svg)
    paths = [each for each in drawn(root, "line") if each.tag.endswith("path")]
    return values(points(paths[number]), UNIT, UNIT, HEIGHT)


def test_a_roc_curve_is_drawn_where_scikit_learn_says_it_is():
    scored = some(0)
    found = curve_of(pictures.roc({Key("a", 0, "A"): pictures.roc_curve([scored])}, 0.3), 1)
    fpr, tpr, _ = roc_curve(scored.y, scored.scores, drop_intermediate=False)
    # Points closer than half a unit are left out; where one is drawn, it lies on the curve.
    assert len(found) > 20
    distance = np.abs(found[:, None] - np.stack([fpr, tpr], 1)[None]).sum(2)
    assert distance.min(1).max() < 1e-3
    assert distance.min(0).max() < 5e-3, "and no part of the curve is left out"


def test_precision_and_recall_are_those_of_scikit_learn():
    scored = some(1)
    recall, precision = pictures.precision_recall_curve([scored])
    expected_precision, expected_recall, _ = precision_recall_curve(scored.y, scored.scores)
    assert recall[1:] == pytest.approx(expected_recall[:-1][::-1])
    assert precision[1:] == pytest.approx(expected_precision[:-1][::-1])
    found = curve_of(pictures.precision_recall({Key("a", 0, "A"): (recall, precision)}, 0.3), 1)
    area = np.sum(np.diff(found[:, 0]) * found[1:, 1])
    assert area == pytest.approx(np.sum(np.diff(recall) * precision[1:]), abs=5e-3)  # average precision


def test_the_mean_of_curves_lies_between_them():
    both = [some(2), some(3)]
    grid, mean = pictures.roc_curve(both)
    single = [np.interp(grid, *pictures.roc_curve([each])) for each in both]
    assert mean == pytest.approx(np.mean(single, 0))
    _, mean = pictures.precision_recall_curve(both)
    each = [pictures.precision_on_grid(pictures.precision_recall_curve([one])) for one in both]
    assert (np.minimum(*each) <= mean + 1e-12).all()
    assert (mean <= np.maximum(*each) + 1e-12).all()


def test_a_curve_of_a_million_points_stays_small():
    x = np.linspace(0, 1, 1_000_000)
    svg = pictures.roc({Key("a", 0, "A"): (x, np.sqrt(x))}, 0.3)
    assert len(svg) < 60_000
    found = curve_of(svg, 1)
    assert found[[0, -1]] == pytest.approx(np.array([[0, 0], [1, 1]]), abs=1e-3)
    assert np.abs(np.sqrt(found[:, 0]) - found[:, 1]).max() < 0.01


def test_the_partial_auc_region_ends_at_its_limit():
    [region] = drawn(parse(pictures.roc({Key("a", 0, "A"): pictures.roc_curve([some(0)])}, 0.3)), "region")
    width = charts.WIDTH - charts.LEFT - charts.RIGHT
    assert float(region.get("x")) == charts.LEFT
    assert float(region.get("width")) == pytest.approx(0.3 * width, abs=0.01)


def test_bars_markers_and_bands_are_where_their_values_are():
    chart = Chart("c", "t", "d", scale.unit("x"), scale.Axis("y", 0, 10, (0, 5, 10)))
    key = Key("a", 1, "A")
    chart.bars([0.25], [5.0], 10.0, key)
    chart.points([0.5], [2.0], Key("a", 0))
    chart.band([0, 1], [1, 2], [3, 4], key)
    root = parse(chart.render())
    bar, _ = drawn(root, "bar")  # and its key in the legend
    assert float(bar.get("height")) == pytest.approx((HEIGHT - charts.TOP) / 2)
    [dot] = drawn(root, "marker")
    place = values(np.array([[float(dot.get("cx")), float(dot.get("cy"))]]), UNIT, (0, 10), HEIGHT)
    assert place[0] == pytest.approx([0.5, 2.0], abs=0.02)
    [band] = drawn(root, "band")
    assert values(points(band), UNIT, (0, 10), HEIGHT) == pytest.approx(
        np.array([[0, 1], [1, 2], [1, 4], [0, 3]]), abs=0.02
    )


def test_values_that_are_not_known_leave_a_gap():
    chart = Chart("c", "t", "d", scale.unit("x"), scale.unit("y"))
    chart.line([0, 0.25, 0.5, 0.75, 1], [0.1, 0.2, np.nan, 0.4, 0.5], Key("a", 0))
    chart.line([0, 1], [np.nan, np.nan], Key("b", 1))
    paths = [each for each in drawn(parse(chart.render()), "line") if each.tag.endswith("path")]
    assert [each.get("d").count("M") for each in paths] == [2]


def test_a_line_breaks_where_other_sites_were_measured():
    row = sample.run("a", "fedxl2", 0, 1.0).rows[0]
    named = ["a, b", "a, b", "b", "a, b"]
    rows = [{**row, "round": n, "validation_from": f"metrics of {sites}"} for n, sites in enumerate(named, 1)]
    run = replace(sample.run("a", "fedxl2", 0, 1.0), rows=rows, done=None)
    it = study([run])
    (figure,) = (each for each in rounds.section(it).figures if each.title.startswith("Validation"))
    (path,) = (each for each in drawn(parse(figure.svg), "line") if each.tag.endswith("path"))
    assert path.get("d").count("M") == 3
    assert "break where other sites" in figure.caption
    again = rounds.section(study([replace(run, rows=rows[:2])])).figures[0]
    assert "break" not in again.caption


def test_words_do_not_lie_on_lines():
    x = np.linspace(60, 380, 40)
    lines = [np.stack([x, 250 - 0.7 * (x - 50)], 1), np.stack([x, 200 - 0.4 * (x - 50)], 1)]
    for across, up in charts.place_letters(lines, (48, 12, 388, 258), (), (20.0, 20.0)):
        for end in (across - 20, across, across + 20):
            assert min(np.hypot(*(line - [end, up]).T).min() for line in lines) > 5


@pytest.mark.parametrize("seed", range(4))
def test_letters_keep_their_distance(seed):
    rng = np.random.default_rng(seed)
    x = np.linspace(50, 390, 60)
    lines = [np.stack([x, 150 - 100 * np.tanh((x - 50) / rng.uniform(20, 150))], 1) for _ in range(5)]
    placed = np.array(charts.place_letters(lines, (48, 12, 388, 258)))
    gaps = [np.hypot(*(a - b)) for i, a in enumerate(placed) for b in placed[:i]]
    assert min(gaps) >= 10
    for (across, up), line in zip(placed, lines, strict=True):
        assert 48 < across < 388
        assert 12 < up < 258
        assert np.hypot(*(line - [across, up]).T).min() < 16, "a letter stands by its curve"


def test_ticks_are_round_and_inside():
    rng = np.random.default_rng(0)
    for _ in range(300):
        low = rng.normal(0, 10 ** rng.uniform(-4, 6))
        high = low + 10 ** rng.uniform(-3, 6)
        axis = scale.around("x", [low, high])
        assert 2 <= len(axis.ticks) <= 10
        assert axis.low <= min(axis.ticks) <= max(axis.ticks) <= axis.high
        assert len(set(axis.texts())) == len(axis.ticks)
    assert scale.around("x", [np.nan]).ticks
    assert scale.around("x", [3.0, 3.0]).low < 3 < scale.around("x", [3.0]).high
    assert scale.around("x", [0.0, 40.0], floor=0.0).low == 0.0


def test_names_of_others_stay_text():
    chart = Chart("c", EVIL, EVIL, scale.unit(EVIL), scale.unit(EVIL))
    for number_ in range(2):
        chart.line([0, 1], [0, 0.5 * number_], Key(EVIL, number_, EVIL))
    chart.points([0.5], [0.5], Key(EVIL, 0), [EVIL])
    chart.region(0, 0.3, EVIL)
    root = parse(chart.render())  # well-formed, and no element came in with a name
    assert {each.tag for each in root.iter()} <= {
        "svg",
        "title",
        "desc",
        "g",
        "path",
        "rect",
        "line",
        "text",
        "circle",
        "polygon",
    }
    assert not any(name.startswith("on") for each in root.iter() for name in each.attrib)
    assert element("a", EVIL, title=EVIL).count("<") == 2


def test_coordinates_are_numbers():
    assert [number(value) for value in (-0.0001, 10.0, 1.256)] == ["0", "10", "1.26"]
    with pytest.raises(AssertionError):
        number(float("nan"))


def luminance(colour: str) -> float:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_from_what_is_behind_them(scheme):
    """WCAG 2.1: 4.5 for text, 3 for lines and markers."""
    css = TEMPLATES["report.css"]
    block = css.split("prefers-color-scheme: dark")[1 if scheme == "dark" else 0]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block[: block.index("* {") if scheme == "dark" else None]))
    for behind in ("page", "card"):
        for text in ("ink", "soft", "accent"):
            assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
        for line in (*(f"s{number_}" for number_ in range(len(charts.DASHES))), "ref"):
            assert contrast(colours[line], colours[behind]) >= 3, (line, behind)


def test_the_demos_picture_has_the_colours_of_its_report():
    css = TEMPLATES["report.css"]
    light = dict(re.findall(r"--(s\d): (#[0-9a-f]{6})", css.split("prefers-color-scheme: dark")[0]))
    assert [colour for colour, _ in plots.STYLES] == [light[f"s{style}"] for style in range(len(plots.STYLES))]


def test_labels_are_spread_no_further_than_they_must():
    rng = np.random.default_rng(0)
    for _ in range(100):
        wanted = rng.uniform(0, 100, rng.integers(1, 8)).tolist()
        found = plots.spread(wanted, 10)
        order = np.argsort(wanted)
        assert (np.diff(np.array(found)[order]) >= 10 - 1e-9).all()
        moved = np.sum((np.array(found) - wanted) ** 2)
        for _ in range(20):  # no other heights with these gaps are nearer
            other = np.array(found)[order] + rng.normal(0, 3, len(wanted))
            other = np.maximum.accumulate(other - 10 * np.arange(len(wanted))) + 10 * np.arange(len(wanted))
            assert np.sum((other - np.array(wanted)[order]) ** 2) >= moved - 1e-9


def test_styles_differ_without_colour():
    assert len(set(charts.DASHES)) == len(charts.DASHES) == len(set(charts.MARKERS)) == len(charts.MARKERS)
    shapes = {
        charts.marker(0, 0, Key("", style), 1.0).replace(f"s{style}", "") for style in range(len(charts.MARKERS))
    }
    assert len(shapes) == len(charts.MARKERS)
