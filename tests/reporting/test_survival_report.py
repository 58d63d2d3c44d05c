"""Reports of time to event: what they say of survival, and that they say nothing of classes."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from fedxl.evaluation import survival, survival_curves
from fedxl.evaluation.assess import assess
from fedxl.evaluation.scores import Scores
from fedxl.reporting.charts import chart as charts
from fedxl.reporting.charts import pictures
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.page import WIDEST
from fedxl.reporting.runs import grouped, scores_on, table
from fedxl.training.run_folder import Run
from tests.cli.test_errors import command
from tests.evaluation.sets import patients
from tests.prediction.conftest import write
from tests.prediction.test_survival import patients as rows
from tests.reporting import sample
from tests.reporting.charts_reading import drawn, parse, points, values
from tests.reporting.test_document import Reader, written

ELSEWHERE = ("ROC", "threshold", "positive", "negative", "precision", "Calibration and decision", "AUROC", "classes")


def said(found: Reader) -> str:
    """The text up to the settings, without the sentences on methods at its end, which are those of all reports."""
    text, *rest = re.split(r"All settings|Settings that", found.text)
    assert rest
    return text


def changed(run: Run, split: str, found: Scores | None) -> Run:
    """The run with other scores on a split, or without."""
    kept = {name: each for name, each in run.scores.items() if name != split}
    return replace(run, in_memory=(kept | ({} if found is None else {split: found}), {}))


def test_it_says_what_the_functions_compute():
    run = sample.timed()
    test, found = run.scores["test"], written([run])
    text, assessed = said(found), assess(run.scores)
    (scores, events), times = test.flat, test.time
    for name, one in assessed.pooled.mean.items():
        expected = survival.interval(name, scores, events, times)
        assert one == expected
        assert f"{expected.value:.3f}[{expected.low:.3f}, {expected.high:.3f}]" in text, name
    part = assessed.survival
    for at, brier in part.brier.items():
        by_then, left = int(((times <= at) & (events > 0)).sum()), int((times >= at).sum())
        auc = assessed.pooled.mean[f"auc_at@{at:g}"]
        row = f"{at:g}{by_then}{left}{auc.value:.3f}[{auc.low:.3f}, {auc.high:.3f}]"
        row += f"{brier.value:.3f}[{brier.low:.3f}, {brier.high:.3f}]{part.calibration[at].error:.3f}"
        assert row in text
    whole = part.integrated_brier
    assert f"mean over time–––{whole.value:.3f}[{whole.low:.3f}, {whole.high:.3f}]" in text
    for name, site in test.by_site().items():
        one = survival.interval("cindex", *site.flat, site.time)
        assert f"{name}20 of 80{site.positives} of 80" in text
        assert f"{one.value:.3f}[{one.low:.3f}, {one.high:.3f}]" in text
    assert [tag["id"] for name, tag in found.tags if name == "section"][1] == "survival"
    assert "Survival (Cox's partial likelihood) across 3 sites" in text
    assert "rank earlier events above later ones on test data" in text
    assert "60 of them with an event" in text
    for word in ELSEWHERE:
        assert word not in text, word


def test_metrics_that_were_asked_for_name_the_horizons():
    """They have intervals, and a row each. One beyond all times is no horizon."""
    of, asked = sample.timed(), ("uno@300", "auc_at@200", "auc_at@90000", "auc_at@evil")
    run = replace(of, done={**of.done, "test": {**of.done["test"], **dict.fromkeys(asked, 0.7)}})
    page, test = written([run]), run.scores["test"]
    text, names = said(page), [tag["scope"] if tag.get("scope") else name for name, tag in page.tags]
    assert max(part.count("col") for part in " ".join(names).split("table")) <= WIDEST + 1, "a wide table has parts"
    for name in asked[:2]:
        found = survival.interval(name, *test.flat, test.time)
        assert f"{found.value:.3f}[{found.low:.3f}, {found.high:.3f}]" in text, name
    assert assess(run.scores, asked=asked[:3]).survival.survival.horizons == (200.0, 300.0)
    assert text.count("Uno's C") == text.count("Uno's C (events before 300)")


def test_the_answer_names_the_ends_of_risk():
    run = sample.timed()
    part, test = assess(run.scores).survival, run.scores["test"]
    middle = part.survival.horizons[1]
    shares = []
    for chosen in (test.scores[:, 0] <= part.edges[0], test.scores[:, 0] > part.edges[1]):
        curve = survival_curves.kaplan_meier(test.y[chosen, 0], test.time[chosen])
        shares.append("{:.0f} % [{:.0f}, {:.0f}]".format(*(100 * float(each) for each in curve.at(middle))))
    told = f"lowest third of the validation data, {shares[0]} have no event up to {middle:g}; of those in the highest"
    assert f"{told} third {shares[1]}." in written([run]).text


def test_runs_of_several_seeds_are_compared():
    every = [sample.timed(f"good{seed}", "fedxl2", seed, 0.1) for seed in (0, 1)]
    every += [sample.timed(f"bad{seed}", "local_pair", seed, 3.0) for seed in (0, 1)]
    text = said(written(every))
    assert "it is ahead of B (local_pair)" in text
    assert "over 2 seeds" in text
    assert "Curves and tables are of seed" in text
    assert "Uno's C (events before" in text
    chosen = [replace(run, chosen_by=name) for run, name in zip(every[::-1], ("cindex", "risk") * 2, strict=True)]
    _, focus = grouped(chosen)
    assert focus.shown.algorithm == "fedxl2", "concordance decides where runs were chosen by different metrics"


def test_beside_runs_of_classes():
    """Nobody compares them, and neither stops the other's report."""
    for both in ([sample.timed(), *sample.runs()], [*sample.runs(), sample.timed()]):
        for focus in ("cox", "fedxl2-0"):
            text = written(both, focus).text
            assert "is not compared in pairs" in text


def test_names_of_others_stay_text():
    found = written([sample.timed(evil=sample.EVIL)])
    assert "script" not in [name for name, _ in found.tags]
    assert "<script>alert(1)</script>" in found.text


TEST = sample.timed().scores["test"]
VALIDATION = sample.timed().scores["validation"]


@pytest.mark.parametrize(
    ("split", "other", "why"),
    [
        ("validation", None, "there are no validation data: no horizon was chosen"),
        ("validation", replace(VALIDATION, y=0 * VALIDATION.y), "no validation example has an event"),
        ("test", replace(TEST, y=0 * TEST.y), "A has no curves: its data hold no event"),
        ("test", replace(TEST, scores=np.nan * TEST.scores), "A has no curves: its data hold no event"),
        ("test", None, "the hazard is that of the data that it is shown on"),
        (
            "test",
            replace(TEST, y=1 * (TEST.time < 9)[:, None], time=TEST.time / 1e4),
            "no test example was seen so long",
        ),
        ("test", replace(TEST, scores=TEST.scores - 100), "no test example is in the highest third"),
    ],
)
def test_what_is_missing_is_said(split, other, why):
    assert why in written([changed(sample.timed(), split, other)]).text


def test_without_censoring_there_is_a_curve():
    every = replace(TEST, y=np.ones_like(TEST.y))
    run = changed(sample.timed(), "test", every)
    assert scores_on(run, "test") is every
    found = survival.interval("cindex", *every.flat, every.time)
    assert f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]" in written([run]).text


@pytest.mark.filterwarnings("ignore")  # lifelines calls pandas in ways that pandas 3 warns of
def test_a_curve_is_drawn_where_lifelines_says_it_is():
    lifelines = pytest.importorskip("lifelines", reason="needs lifelines")
    _, events, times = patients(200)
    times, end = np.ceil(200 * times), 300.0
    curve = survival_curves.kaplan_meier(events, times)
    root = parse(pictures.kaplan_meier({Key("a", 0, "A"): curve}, end))
    (path,) = (each for each in drawn(root, "line") if each.tag.endswith("path"))
    found = values(points(path), (0.0, end), (0.0, 1.0), charts.HEIGHT - charts.BOTTOM)
    fitter = lifelines.KaplanMeierFitter().fit(times, events)
    assert tuple(found[0]) == pytest.approx((0, 1))
    assert found[-1, 0] == pytest.approx(end), "what lies beyond is cut off"
    grid = np.linspace(0, end, pictures.SURVIVAL_STEPS + 1)
    place = np.searchsorted(found[:, 0], grid[:-1] + 1)  # after each step
    np.testing.assert_allclose(found[place, 1], fitter.predict(grid[:-1]), atol=5e-3)
    apart = np.abs(found[:, :1] - grid).min(1)
    assert apart.max() < 0.05, "a step would be at the time of a patient"  # the picture has one digit
    flat = np.isclose(found[1:, 1], found[:-1, 1], atol=1e-3) | np.isclose(found[1:, 0], found[:-1, 0], atol=1e-3)
    assert flat.all(), "it consists of steps"
    (band,) = drawn(root, "band")
    outline = values(points(band), (0.0, end), (0.0, 1.0), charts.HEIGHT - charts.BOTTOM)
    assert outline[:, 1].min() == pytest.approx(float(curve.at(end)[1]), abs=5e-3)


CONFIG = """
[data]
name = "table"
path = "patients.csv"
time = "days"
event = "died"
site = "hospital"
id = "number"
[model]
name = "mlp"
hidden = []
[risk]
name = "{risk}"
[algorithm]
name = "fedxl2"
lr = 0.03
[run]
rounds = 4
local_steps = 4
batch1 = 8
batch2 = 16
eval_every = 2
"""


@pytest.mark.parametrize("risk", ["cox", "concordance"])
def test_from_a_table_to_a_report(tmp_path, monkeypatch, capsys, risk):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "patients.csv", rows(240, 0))
    (tmp_path / "run.toml").write_text(CONFIG.format(risk=risk))
    for words in (["train", "run.toml", "--out", "run"], ["report", "run", "--html", "report.html"]):
        assert command(monkeypatch, capsys, *words)[0] == 0
    found = Reader((tmp_path / "report.html").read_text())
    assert [tag["id"] for name, tag in found.tags if name == "section"] == [
        "runs", "survival", "sites", "convergence", "settings", "reproduce",
    ]  # fmt: skip
    text = said(found)
    for word in ELSEWHERE:
        assert word not in text, word
    columns, (cells,) = table([tmp_path / "run"])
    assert "cindex" in columns
    assert not {"auroc", "ap", "pauc@0.3"} & {*columns}
    assert "[" in cells[columns.index("cindex")], "with its interval"
    assert "validation cindex" in command(monkeypatch, capsys, "watch", "run")[1]
