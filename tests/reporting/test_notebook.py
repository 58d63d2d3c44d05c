"""What notebooks show: one line of text, HTML that is whole and styles nothing else, pictures that need no page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import fedxl
from fedxl.errors import UserError
from fedxl.evaluation.intervals import delong
from fedxl.models import mlp
from fedxl.reporting import notebook
from tests.conftest import make_clients
from tests.reporting.test_document import Reader
from tests.training.test_result import SIZES, fitted


@pytest.fixture(scope="module")
def result() -> fedxl.Result:
    return fitted()


@pytest.fixture(scope="module")
def splits() -> fedxl.Splits:
    names = ["north", "<script>alert(1)</script>", "east"]
    clients = dict(zip(names, make_clients(SIZES), strict=True))
    return fedxl.data.inputs.as_splits(clients, None, 0, make_clients([(3, 4)])[0], None)


def survival() -> fedxl.Result:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    time, event = rng.exponential(np.exp(-x[:, 0])), rng.random(120) < 0.7
    parts = [(x[rows], time[rows], event[rows]) for rows in np.split(np.arange(120), 4)]
    data = fedxl.from_times(parts[:2], validation=parts[2], test=parts[3])
    algorithm = fedxl.FeDXL2(fedxl.cox(), lr=0.03)
    return fedxl.fit(mlp((3,), hidden=(4,)), data, algorithm, rounds=2, local_steps=2, eval_every=1)


def test_a_result_is_one_line(result):
    value = result.metrics["test"]["auroc"]
    assert repr(result) == f"FeDXL2, best round {result.best_round} of 4, test auroc {value:.4f}"
    stopped = fitted(hooks=fedxl.Hooks(should_stop=lambda: True))
    assert repr(stopped) == "FeDXL2, best round 0 of 0, interrupted"


def test_predictions_and_comparisons_are_frames_and_short(result, tmp_path):
    pytest.importorskip("pandas", reason="needs pandas")
    found = result.predict(make_clients([(9, 21)])[0][0])
    frame = found.to_frame()
    assert list(frame.columns) == ["score", "probability", "class"]
    np.testing.assert_array_equal(frame["score"], found.scores)
    page = Reader(found._repr_html_())
    assert "30 examples, the first 10 of them." in page.text
    assert [name for name, _ in page.tags].count("tr") == 11
    both = fedxl.compare({"a": result, "b": fitted(seed=1)}, reference="a")
    rows = both.to_frame().set_index(["label", "metric"])
    assert rows.loc[("b", "auroc"), "high"] == both.table["b"]["auroc"].high
    assert rows.loc[("b", "auroc"), "difference_p"] == both.differences["b"]["auroc"].p
    assert np.isnan(rows.loc[("a", "auroc"), "difference_value"])
    exported = fedxl.export(result.save(tmp_path / "run"), model=mlp((5,), hidden=(4,)), onnx=False)
    assert max(map(len, map(repr, (exported, *both.runs)))) < 200


def test_mistakes_are_one_line_in_a_notebook():
    error = UserError("rounds must be\npositive")
    assert error._render_traceback_() == ["UserError: rounds must be positive"]


def test_data_and_advice_are_short(splits):
    assert repr(splits) == "Splits: 3 sites; train 49 (13 positive), validation 7 (3 positive); shape [5]"
    assert repr(splits.train) == "Examples: 49 (13 positive) of shape [5] at 3 sites"
    advice = fedxl.advise(splits)
    assert repr(advice) == str(advice)
    text = Reader(advice._repr_html_()).text
    assert all(said in text for said, _ in advice.reasons)
    assert all(line in text for line in advice.flags)


def test_html_of_a_result_says_what_its_scores_say(result):
    found = Reader(result._repr_html_())
    interval = delong(*result.scores["test"].flat)
    assert f"{interval.value:.3f}[{interval.low:.3f}, {interval.high:.3f}]" in found.text
    assert [tag for tag, _ in found.tags].count("svg") >= 2
    assert found.open == []
    assert repr(result) in found.text


def test_names_of_sites_stay_text_and_the_style_stays_inside(splits):
    found = Reader(splits._repr_html_())
    assert found.open == []
    assert "script" not in {tag for tag, _ in found.tags}
    assert "<script>alert(1)</script>" in found.text
    assert "all49137" in found.text.replace("\n", "")
    heads = re.findall(r"([^{}]+)\{", notebook.style())
    assert len(heads) > 30
    outside = [one for head in heads for one in re.split(r",(?![^(]*\))", head) if ".fedxl" not in one]
    assert not outside


def test_a_picture_is_one_file_that_needs_nothing_else(result, tmp_path):
    picture = result.plot(fitted(seed=1), fitted(algorithm=fedxl.LocalPair(fedxl.auroc())))
    path = picture.save(tmp_path / "two.svg")
    root = ElementTree.parse(path).getroot()
    inside = [each for each in root if each.tag.endswith("svg")]
    assert len(inside) == len(picture.figures) == 2
    text = "".join(root.itertext())
    assert "fedxl2" in text
    assert "B: LocalPair" in text
    assert "--s0: #" in text
    assert "two.svg" not in repr(picture)
    assert Reader(picture._repr_html_()).open == []
    with pytest.raises(UserError, match=r"must end in \.svg"):
        picture.save(tmp_path / "two.png")
    with pytest.raises(UserError, match="cannot write"):
        picture.save(tmp_path / "no" / "two.svg")


def test_results_of_one_name_are_told_apart(result, tmp_path):
    result.save(tmp_path / "saved")
    text = Reader(result.plot(fitted(local_steps=3), tmp_path / "saved")._repr_html_()).text
    assert "FeDXL2 (1)" in text
    assert "FeDXL2 (2)" in text


def test_of_time_to_event_the_picture_is_of_survival():
    result = survival()
    picture = result.plot()
    assert picture.figures[0].title == "Survival by predicted risk"
    assert "test cindex" in repr(result)
    assert "concordance index" in Reader(result._repr_html_()).text


def test_without_held_back_data_there_is_a_view_and_no_picture():
    result = fitted(validation=None, test=None)
    assert repr(result) == "FeDXL2, best round 4 of 4"
    assert "Metrics on no held-back data" in Reader(result._repr_html_()).text
    with pytest.raises(UserError, match="nothing to draw"):
        result.plot()


def test_only_what_there_is_a_view_of():
    with pytest.raises(TypeError, match="no view of"):
        notebook.html(torch.zeros(1))
