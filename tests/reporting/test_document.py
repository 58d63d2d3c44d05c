"""The report as a document: what it says, what it leaves out and why, and that names of others stay text."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

import fedxl
from fedxl.errors import UserError
from fedxl.evaluation import histogram
from fedxl.evaluation.assess import assess
from fedxl.evaluation.compare import differences, seed_intervals
from fedxl.evaluation.histogram import Histogram, count
from fedxl.evaluation.intervals import delong, means
from fedxl.evaluation.operating import at_specificity
from fedxl.evaluation.scores import Scores
from fedxl.reporting import document
from fedxl.reporting.runs import differing, grouped, same_examples
from fedxl.training.run_folder import Member, Run, is_run, read_run, run_dirs
from tests.cli.test_errors import CONFIG, command
from tests.reporting import sample


class Reader(HTMLParser):
    """Elements, attributes and text, as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, "elements are nested"

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


def written(runs: list[Run], reference: str = "") -> Reader:
    return Reader(document.render(document.build(runs, reference)))


def test_it_says_what_scikit_learn_computes():
    runs = sample.runs()
    text = written(runs).text
    test = [run.scores["test"] for run in runs]
    for metric in (roc_auc_score, average_precision_score):
        assert f"{np.mean([metric(one.y, one.scores) for one in test[:2]]):.3f}" in text, "the mean over seeds"
    for site in range(3):
        inside = test[0].site == site
        assert f"{roc_auc_score(test[0].y[inside], test[0].scores[inside]):.3f}" in text
    assert "Validation data prefer A (fedxl2)" in text
    assert "it is ahead of B (local_sgd)" in text


def test_several_labels_as_scikit_learn_has_them():
    run = sample.labelled()
    text = written([run]).text
    test, held = run.scores["test"], run.scores["validation"]
    each = []
    for number in range(5):  # the last has one class
        name = test.labels[number]
        (scores, labels), validation = test.by_label()[name].flat, held.by_label()[name]
        values = [
            metric(labels, scores, **more)
            for metric, more in (
                (roc_auc_score, {}),
                (roc_auc_score, {"max_fpr": 0.3}),
                (average_precision_score, {}),
            )
        ]
        assert all(f"{value:.3f}" in text for value in values)
        assert f"{len(labels)}{labels.sum()}" in text, "n and positives, side by side in the table"
        each.append(values)
        if number < 4:
            threshold = at_specificity(*validation.flat, 0.9).threshold
            for side in (0, 1):
                called = scores[labels == side] >= threshold
                assert f"{(called == side).mean():.3f}" in text
    mean = means(["auroc", "pauc@0.3", "ap"], test)
    for value, found in zip(np.mean(each, 0), mean.values(), strict=True):
        assert found.value == pytest.approx(value)
        assert f"{value:.3f}[{found.low:.3f}, {found.high:.3f}]" in text
    for name, part in test.by_site().items():
        aurocs = [roc_auc_score(one.y, one.scores) for one in part.by_label().values() if one.both_classes]
        assert f"{name}{len(part.scores)}{np.mean(aurocs):.3f}" in text
    assert "finding 4 has no calibration and no threshold: 3 of its" in text
    (section,) = [one for one in document.build([run]).sections if one.id == "calibration"]
    decided = [f"finding {number}" for number in range(4)]
    assert [figure.title for figure in section.small] == decided
    assert all([row.cells[0].text for row in table.rows] == decided for table in section.tables)
    assert "finding 5 has one class in the test data: no metric" in text
    assert "reaches a mean partial AUC (FPR ≤ 0.3) of" in text


def test_runs_of_several_labels_are_told_apart_from_others():
    """Beside another run with several labels, beside one with one label, and where sites told metrics alone."""
    run = sample.labelled()
    better = {split: replace(found, scores=found.scores + 0.5 * found.y) for split, found in run.scores.items()}
    settings = {**run.settings, "algorithm.lr": 0.2}
    both = written([run, replace(run, name="again", settings=settings, in_memory=(better, {}))], "labels").text
    assert both.count(f"[{means(['auroc'], run.scores['test'])['auroc'].low:.3f}, ") >= 1
    for found in differences(better["test"], run.scores["test"]).values():
        assert f"+{found.value:.3f}[{found.low:.3f}, {found.high:.3f}]p" in both, "means over labels, in pairs"
    assert "it is behind B (again)" in both
    mixed = written([sample.runs()[0], run], "fedxl2-0").text
    assert "B has no curves: it has several labels, and this is for one" in mixed
    told = {"north": {"auroc": 0.7, "positives": 9, "negatives": 30}}
    bare = replace(run, in_memory=({}, {}), done={**run.done, "test_by_site": told})
    text = written([bare]).text
    assert "training: positives and negatives" in text
    assert "north20 and 609 and 30" in text
    assert "of 6 labels across 3 sites" in text


def test_names_of_others_stay_text():
    """A script in every place that a file of others fills; each reaches the page, and none as an element."""
    text = document.render(document.build([sample.labelled(evil=sample.EVIL)]))
    assert "\x1b" not in text
    assert not {tag for tag, _ in Reader(text).tags} & {"script", "img"}
    assert "finding 0<script>alert(1)</script>" in Reader(text).text
    text = document.render(document.build(sample.runs(sample.EVIL)))
    assert "\x1b" not in text
    found = Reader(text)
    assert found.open == []
    tags = {tag for tag, _ in found.tags}
    assert not tags & {"script", "img", "link", "iframe", "object", "a:href"}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    links = {attributes.get("href", "#") for tag, attributes in found.tags if tag == "a"}
    assert all(link.startswith("#") and link[1:].isalpha() for link in links)
    for place in ("north", "digits", "fedxl2", "algorithm.lr", "x", "torch", "2", "+00:00", "own", "fedxl2-0"):
        assert f"{place}<script>alert(1)</script>" in found.text, place
    assert "{{7*7}}" in found.text


def test_it_needs_nothing_from_outside():
    text = document.render(document.build(sample.runs()))
    found = Reader(text)
    policy = next(a["content"] for tag, a in found.tags if tag == "meta" and a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "url(" not in text
    assert "@import" not in text
    addresses = [a[name] for _, a in found.tags for name in ("src", "href", "xlink:href") if name in a]
    assert all(address.startswith("#") for address in addresses)


def test_tables_have_captions_and_heads():
    found = written(sample.runs())
    counts = {tag: sum(each == tag for each, _ in found.tags) for tag in ("table", "caption", "thead")}
    assert counts["table"] == counts["caption"] == counts["thead"] > 4
    assert all("scope" in attributes for tag, attributes in found.tags if tag == "th")
    pictures = [attributes for tag, attributes in found.tags if tag == "svg"]
    names = {attributes.get("id") for _, attributes in found.tags}
    for picture in pictures:
        assert picture["role"] == "img"
        assert picture.get("aria-label") or set(picture["aria-labelledby"].split()) <= names


def test_runs_that_differ_by_seed_stand_together():
    groups, focus = grouped(sample.runs())
    assert [(group.letter, group.label, len(group.runs)) for group in groups] == [
        ("A", "fedxl2", 2),
        ("B", "local_sgd", 2),
    ]
    assert focus is groups[0]
    assert groups[1].shown.seed == focus.shown.seed, "so that both were measured on the same examples"
    values = [run.values["pauc@0.3"] for run in groups[0].runs]
    both = [run.scores["test"] for run in groups[0].runs]
    text, found = written(sample.runs()).text, seed_intervals(["pauc@0.3"], both, False)["pauc@0.3"]
    assert f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}[{found.low:.3f}, {found.high:.3f}]" in text
    assert f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}] over 2 seeds on test data" in text
    unlike, shared = differing(groups)
    assert list(unlike) == ["algorithm.name"]
    assert shared["run.rounds"] == 20
    _, focus = grouped(sample.runs(), reference="local_sgd-1")
    assert focus.letter == "B"
    with pytest.raises(UserError, match="unknown run 'fedxl'; did you mean 'fedxl2'"):
        grouped(sample.runs(), reference="fedxl")


def test_other_settings_are_other_groups():
    runs = sample.runs()
    runs[1] = replace(runs[1], settings={**runs[1].settings, "algorithm.lr": 0.2})
    groups, _ = grouped(runs)
    assert [len(group.runs) for group in groups] == [1, 1, 2]
    assert groups[1].label == "fedxl2-1"


def test_pairs_are_formed_on_the_same_examples_only():
    first, _, other, unlike = sample.runs()
    assert same_examples(first, other)
    assert not same_examples(first, unlike), "another seed drew other data"
    shuffled = {split: found.take(np.arange(len(found))[::-1]) for split, found in other.scores.items()}
    assert not same_examples(first, replace(other, in_memory=(shuffled, {})))
    digest = {"task.validation": "abc"}
    assert not same_examples(replace(first, settings={**first.settings, **digest}), other)
    text = written([first, unlike]).text
    assert "B is not compared in pairs: it was not measured on the same examples" in text


def test_a_centralised_run_is_no_winner_among_federated_ones():
    runs = [sample.run("sox", "sox", 0, 4.0), sample.run("local", "local_sgd", 0, 1.0)]
    _, focus = grouped(runs)
    assert focus.label == "local"
    assert grouped(runs[:1])[1].label == "sox"
    assert "A moves its data to one place" in written(runs).text


def test_values_of_different_metrics_are_not_compared():
    """The worse run was chosen by AUROC, whose values are higher than those of the partial AUC."""
    worse = replace(sample.run("worse", "local_sgd", 0, 1.0), chosen_by="auroc")
    better = sample.run("better", "fedxl2", 0, 2.0)
    assert worse.shown["validation"]["auroc"] > better.shown["validation"]["pauc@0.3"], "or this tests nothing"
    assert grouped([worse, better])[1].label == grouped([better, worse])[1].label == "better"


def test_an_unknown_reference_names_each_run_once():
    with pytest.raises(UserError, match=r"unknown run 'zz'; known: better, worse$"):
        grouped([sample.run("worse", "local_sgd", 0, 1.0), sample.run("better", "fedxl2", 0, 2.0)], "zz")


def bare(run: Run) -> Run:
    return replace(run, in_memory=({}, {}), members=(), environment={}, begun="", chosen_by="auroc", config="")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, "its folder holds no scores.npz"),
        ({"done": None}, "it has not finished"),
        ({"settings": {"risk.name": "contrastive"}}, "its risk pairs vectors"),
        ({"done": {"round": 1, "best_round": 2, "test": {}}, "rows": []}, "no data were held back"),
    ],
)
def test_a_run_without_scores_says_why(change, why):
    run = replace(bare(sample.runs()[0]), **change)
    text = written([run]).text
    assert f"A has no intervals: {why}" in text
    assert "the run did not record who took part" in text
    assert written([run, *sample.runs()[2:]]).text.count(why) >= 1, "beside others, too"


def test_sites_that_disclose_metrics_only():
    told = {"north": {"auroc": 0.7126, "positives": 5, "negatives": 7}, "<b>": "declined <i>"}
    rows = [{**row, "validation_by_site": told} for row in sample.runs()[0].rows]
    text = written([replace(bare(sample.runs()[0]), rows=rows)]).text
    assert "its sites disclose metrics, not scores" in text
    assert "0.713" in text
    assert "5 of 12" in text
    assert "<b>: declined <i>" in text


def disclosed(path, run: Run, edges: np.ndarray) -> None:
    """What a server keeps of a run whose sites disclose curves: counts in bins, and no scores."""
    path.mkdir()
    (path / "config.toml").write_text('[risk]\nname = "pauc"\n[algorithm]\nname = "fedxl2"\n')
    rows = [*run.rows, run.done]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sites = {
        split: {"": {name: count(edges, *part.flat) for name, part in found.by_site().items()}}
        for split, found in run.scores.items()
    }
    histogram.save(path / "curves.npz", sites)


def test_sites_that_disclose_curves(tmp_path):
    exact = sample.runs()[0]
    disclosed(tmp_path / "run", exact, np.linspace(-4, 6, 101))
    run = read_run(tmp_path / "run")
    test = exact.scores["test"]
    found = assess(run.scores, run.histograms)
    bound = run.counts["test"][""].auroc()
    assert found.pooled.one.metrics["auroc"].value == pytest.approx(bound.value)
    assert abs(bound.value - roc_auc_score(test.y, test.scores)) <= bound.bound
    assert list(found.sites) == ["north", "south", "east"]
    assert (found.pooled.one.positives, found.pooled.one.negatives) == (test.positives, test.negatives)
    refused = {
        "test_by_site": {"west": "fewer than 10 positives <b>"},
        "test_withheld": {"north": {"flu": "too few"}},
    }
    more = {
        "done": {**run.done, **refused},
        "members": [Member(name, 5, 9) for name in (*found.sites, "west", "far")],
    }
    text = written([replace(run, **more)]).text
    assert "no test data from far" in text, "and of west alone what it said"
    assert "west: fewer than 10 positives <b>" in text
    assert "north withholds flu: too few" in text
    text = written([run]).text
    assert f"sites disclosed counts in 102 bins, not scores; metrics may be off, AUROC by {bound.bound:.1g}" in text
    assert "The band holds every curve that fits the sites' counts in bins" in text
    assert "counts in bins do not say which example is which" in written([run, exact]).text


def test_counts_that_no_site_has_disclosed_are_one_line(tmp_path):
    disclosed(tmp_path / "run", sample.runs()[0], np.array([0.0]))
    huge = Histogram(np.array([0.0]), np.array([10**12, 1]), np.array([5, 5]))
    histogram.save(tmp_path / "run" / "curves.npz", {"test": {"": {"a": huge}}})
    with pytest.raises(UserError, match=r"counts of 1e\+12 examples are too many"):
        document.build([read_run(tmp_path / "run")])


def test_scores_of_one_class_or_not_finite_are_no_curve():
    run = sample.runs()[0]
    for scores in (Scores.of(np.zeros(5), np.ones(5)), Scores.of(np.full(4, np.nan), [0, 1, 0, 1])):
        assert "its data do not hold both classes" in written([replace(run, in_memory=({"test": scores}, {}))]).text


def test_sites_without_a_metric_are_not_counted_as_measured():
    run = sample.runs()[0]
    test = run.scores["test"]
    found = replace(test, y=np.where((test.site == 1)[:, None], 0, test.y))
    (fact,) = (
        each for each in document.build([replace(run, in_memory=({"test": found}, {}))]).facts if "sites" in each.name
    )
    assert fact.text == "2 of 3"


def test_more_runs_than_styles_are_in_the_table_only():
    runs = [sample.run(f"run{number}", f"mine:{number}", 0, 1.0) for number in range(9)]
    text = written(runs).text
    assert "pictures show 6 runs at most; G, H, I are in the table only" in text


def test_a_run_from_its_folder_says_what_the_run_in_memory_says(tmp_path):
    """`fit(out=...)` writes run.json and no config.toml."""
    import torch

    torch.manual_seed(0)
    x, y = torch.randn(240, 3), (torch.arange(240) % 3 == 0).long()
    x[:, 0] += y
    result = fedxl.fit(
        torch.nn.Linear(3, 1), [(x[i:120:3], y[i:120:3]) for i in (0, 1)] + [(x[2:120:2], y[2:120:2])],
        fedxl.FeDXL2(fedxl.partial_auc(lam=1.0), lr=0.1), rounds=4, local_steps=2, batch_size=4, eval_every=2,
        validation=(x[120:180], y[120:180]), test=(x[180:], y[180:]), out=tmp_path / "run",
        hooks=fedxl.Hooks(say=lambda line: None),
    )  # fmt: skip
    assert is_run(tmp_path / "run")
    [path] = run_dirs([tmp_path])
    run = read_run(path)
    assert run.values["auroc"] == result.metrics["test"]["auroc"]
    assert run.best_round == result.best_round
    assert run.chosen_by == run.metric == "pauc@0.3"
    assert [member.name for member in run.members] == ["client 0", "client 1", "client 2"]
    traffic = run.rows[0]["traffic"]
    assert (traffic["down"], traffic["up"], traffic["clients"]) == (*result.traffic, 3)
    assert run.scores["test"].scores == pytest.approx(result.scores["test"].scores)
    text = written([run]).text
    assert "A has no config.toml: it was started from Python" in text
    assert '"algorithm.lr": 0.1' in text
    assert "3 sites, which hold" in text


@pytest.mark.parametrize(
    "content",
    ["[]", '{"members": 5}', '{"settings": 5}', '{"members": [{"name": "a", "positives": -1}]}', "{", "[" * 10**5],
)
def test_a_run_json_that_no_run_has_written_is_one_line(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(
        UserError, match=r"run\.json (is not a JSON file|must hold a JSON object)|cannot read .*run\.json"
    ):
        read_run(tmp_path)


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, capsys, "train", "tiny.toml", "--out", "run")[0] == 0
    return tmp_path


def test_the_command_writes_the_report(trained, monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "report", "run", "--html", "report.html")
    assert (code, out.strip()) == (0, "report in report.html"), err
    found = Reader((trained / "report.html").read_text())
    assert "fedxl train run.toml" in found.text
    assert all(line in found.text for line in (trained / "run" / "config.toml").read_text().splitlines())
    code, out, _ = command(monkeypatch, capsys, "report", "run", "--all")
    scored = read_run(trained / "run").scores["test"]
    value = json.loads((trained / "run" / "metrics.jsonl").read_text().splitlines()[-1])["test"]["auroc"]
    interval = delong(*scored.flat)
    assert f"{value:.4f} [{interval.low:.3f}, {interval.high:.3f}]" in out
    for arguments, expected in (
        (("--html", "."), "is a folder; --html must name a file"),
        (("--html", "no/such/report.html"), "cannot write no/such/report.html"),
        (("--html", "r.html", "--reference", "runn"), "did you mean 'run'?"),
        (("--reference", "run"), "--reference belongs to --html"),
    ):
        code, _, err = command(monkeypatch, capsys, "report", "run", *arguments)
        assert (code, expected in err, len(err.strip().splitlines())) == (2, True, 1), err


def test_without_jinja2_it_is_one_line(trained, monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "jinja2", None)
    for arguments in (("report", "run", "--html", "r.html"), ("demo", "--out", "d")):
        code, _, err = command(monkeypatch, capsys, *arguments)
        assert (code, err.strip()) == (2, "fedxl: a report in HTML needs Jinja2: pip install 'fedxl[report]'")


def test_settings_at_their_defaults_are_folded():
    run = sample.runs()[0]
    settings = {**run.settings, "run.seed": 7, "run.patience": 0, "run.fpr": [0.1, 0.3, 0.5], "algorithm.beta": 0.5}
    (section,) = [one for one in document.build([replace(run, settings=settings)]).sections if one.id == "settings"]
    shown, rest = ({row.cells[0].text for row in table.rows} for table in section.tables)
    assert rest == {"algorithm.lr", "run.patience", "run.fpr"}
    assert "algorithm.beta" in shown
    assert "<details><summary>3 settings" in document.render(document.build([replace(run, settings=settings)]))
