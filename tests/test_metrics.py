"""Metrics against scikit-learn, on random, tied and degenerate scores; metrics of one's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, ndcg_score, roc_auc_score, roc_curve
from torch import nn

import fedxl
from fedxl import METRICS, Metric, UserError, metrics
from fedxl.data.examples import Examples
from fedxl.deploy.server.examiner import ROUNDING
from fedxl.evaluation.resampling import resampled
from fedxl.metrics import value_of
from fedxl.training.evaluate import Evaluator, asked_for, check_selection
from tests.conftest import make_clients
from tests.running import fit_named

RNG = np.random.default_rng(0)
KINDS = {
    "continuous": lambda n: RNG.normal(size=n),
    "tied": lambda n: RNG.integers(0, 4, n).astype(float),
    "all equal": lambda n: np.zeros(n),
    "huge": lambda n: RNG.normal(size=n) * 1e30,
}


LIMITS = (0.05, 0.3, 0.5, 0.999)


def area(labels, scores, limit):
    """scikit-learn's partial AUC with McClish's scale undone."""
    chance = limit**2 / 2
    return chance + (2 * roc_auc_score(labels, scores, max_fpr=limit) - 1) * (limit - chance)


# An independent reference for every row of the table: a new row without one fails.
REFERENCES = {
    "auroc": lambda labels, scores: roc_auc_score(labels, scores),
    "pauc": lambda labels, scores, limit: roc_auc_score(labels, scores, max_fpr=limit),
    "pauc_raw": area,
    "ap": lambda labels, scores: average_precision_score(labels, scores),
    "risk": None,  # the evaluation's: test_the_risk_is_a_row_like_the_others
}


def draw(kind: str, size: int, positives: float):
    scores = KINDS[kind](size)
    labels = np.zeros(size, int)
    labels[RNG.permutation(size)[: 1 if positives == 1 else max(1, int(positives * size))]] = 1
    return scores, labels


@pytest.mark.parametrize("row", list(METRICS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_row_against_scikit_learn(row, kind):
    assert set(REFERENCES) == set(METRICS), "a row needs a reference"
    if METRICS[row].compute is None:
        return
    each = metrics.resolve([row], LIMITS)
    assert len(each) == (len(LIMITS) if METRICS[row].takes_limit else 1)
    low, high = METRICS[row].range
    for size in (2, 3, 10, 500):
        for positives in (1, 0.3, 0.7):
            for _ in range(10):
                scores, labels = draw(kind, size, positives)
                found = metrics.judge(each, scores, labels)
                for metric in each:
                    limit = () if metric.limit is None else (metric.limit,)
                    expected = REFERENCES[row](labels, scores, *limit)
                    assert found[metric.name] == pytest.approx(expected, abs=1e-12)
                    assert low - ROUNDING <= found[metric.name] <= high + ROUNDING, (
                        "an honest site would not be believed"
                    )


@pytest.mark.parametrize("kind", list(KINDS))
def test_ndcg_against_scikit_learn(kind):
    """Also of tied scores; the mean over queries, in any order of items, of those with a relevant item."""
    each = metrics.resolve(["ndcg", "ndcg@1", "ndcg@500"])
    assert [metric.name for metric in each] == ["ndcg@5", "ndcg@10", "ndcg@1", "ndcg@500"]
    for _ in range(5):
        queries = RNG.permutation(np.repeat([7, 2, 40, 9], [2, 3, 30, 11]))
        grades, scores = RNG.integers(0, 5, len(queries)), KINDS[kind](len(queries))
        grades[queries == 9] = 0
        grades[np.flatnonzero(queries == 2)[0]] = 3
        found = metrics.judge(each, scores, grades, queries)
        of = [queries == query for query in (7, 2, 40) if grades[queries == query].any()]
        for metric in each:
            expected = [ndcg_score([2.0 ** grades[q] - 1], [scores[q]], k=int(metric.limit)) for q in of]
            assert found[metric.name] == pytest.approx(np.mean(expected), abs=1e-12)
        assert found["positives"] == (grades > 0).sum()
    assert math.isnan(metrics.judge(each, scores, 0 * grades, queries)["ndcg@5"])
    with pytest.raises(UserError, match="'ndcg@5' needs data with queries"):
        metrics.judge(each, scores, grades)
    for wrong in ("ndcg@0.5", "ndcg@0", "ndcg@inf", "ndcg@nan"):
        with pytest.raises(UserError, match="must be a whole number"):
            metrics.resolve([wrong])


@pytest.mark.parametrize("size", [2, 3, 10, 500])
def test_the_curve_against_scikit_learn(size):
    for kind in KINDS:
        scores, labels = draw(kind, size, 0.3)
        false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
        np.testing.assert_allclose(metrics.roc(scores, labels), (false, true), atol=1e-12)


def test_the_risk_is_a_row_like_the_others():
    h, labels = torch.tensor([0.3, -1.0, 2.0, 0.3, 0.0]), torch.tensor([1, 0, 1, 0, 0])
    risk = fedxl.XRisk(pair=lambda a, b, y: (1 - fedxl.gap(a, b)) ** 2, outer=lambda g: g**2)
    evaluator = Evaluator(lambda w, x: x, risk, asked_for(risk, "-risk", (0.3,)), torch.float32)
    found = evaluator.findings(h, Examples(h[:, None], labels[:, None])).metrics
    positives, negatives = h[labels == 1].tolist(), h[labels == 0].tolist()
    inner = [sum((1 - (a - b)) ** 2 for b in negatives) / len(negatives) for a in positives]
    assert found["risk"] == pytest.approx(sum(g**2 for g in inner) / len(inner), rel=1e-6)
    assert set(evaluator.ranges) == set(found) - set(metrics.COUNTS)
    assert evaluator.ranges["risk"] == (-math.inf, math.inf)
    assert value_of(found, "-risk") == -found["risk"]
    check_selection("-risk", evaluator)
    for wrong in ("risk", "-auroc"):
        with pytest.raises(UserError, match="unknown metric to select by"):
            check_selection(wrong, evaluator)


@pytest.mark.parametrize("row", list(METRICS))
def test_every_row_can_be_shown_selected_and_explained(row):
    metric = METRICS[row]
    assert metric.summary
    assert metric.range[0] < metric.range[1]
    assert isinstance(metric.shown, tuple) <= metric.takes_limit
    if metric.compute is None:
        return
    risk = fedxl.auroc()
    name = f"{row}@0.25" if metric.takes_limit else row
    select = name if metric.larger_is_better else f"-{name}"
    evaluator = Evaluator(lambda w, x: x, risk, asked_for(risk, select, (0.1,)), torch.float32)
    check_selection(select, evaluator)
    assert value_of({name: 0.25}, select) == (0.25 if metric.larger_is_better else -0.25)


def test_what_reports_show_comes_from_the_table():
    assert metrics.shown() == ["auroc", "pauc@0.3", "pauc@0.5", "ap", "risk"], "as before there was a table"
    told = {"auroc": 1.0, "pauc@0.1": 1.0, "positives": 3, "sensitivity": 0.5, "recall@0.2": 0.5}
    assert metrics.shown(told)[5:] == ["sensitivity", "recall@0.2"]


def share(scores, labels):
    return np.mean(scores[labels == 1] > 0)


def brier(scores, labels):
    return np.mean((1 / (1 + np.exp(-scores)) - labels) ** 2)


def sensitivity(scores, labels, limit):
    """True positive rate at a false positive rate."""
    return float(np.interp(limit, *metrics.roc(scores, labels)))


sensitivity_at = Metric(sensitivity, range=(0.0, 1.0), takes_limit=True)
less_is_better = Metric(brier, range=(0.0, 1.0), larger_is_better=False)
seven, lonely = 7, abs
HERE = __name__


def test_metrics_of_ones_own_by_name_by_function_and_as_objects():
    scores, labels = draw("continuous", 100, 0.3)
    named = [f"{HERE}:share", f"{HERE}:less_is_better", f"{HERE}:sensitivity_at@0.2", f"{HERE}:sensitivity_at"]
    found = metrics.judge(metrics.resolve(named, limits=(0.4,)), scores, labels)
    assert list(found) == ["share", "less_is_better", "sensitivity_at@0.2", "sensitivity_at@0.4", *metrics.COUNTS]
    passed = [share, Metric(brier, name="less_is_better"), "auroc"]
    same = metrics.judge(metrics.resolve(passed), scores, labels)
    assert same["share"] == found["share"] == (scores[labels == 1] > 0).mean()
    assert same["less_is_better"] == found["less_is_better"]
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    assert found["sensitivity_at@0.2"] == pytest.approx(np.interp(0.2, false, true), abs=1e-12)
    assert [m.name for m in metrics.resolve([share, f"{HERE}:share", "auroc", "auroc"])] == ["share", "auroc"]


MISTAKES = {
    "unknown": ("aurok", "unknown metric 'aurok'; did you mean 'auroc'?"),
    "no module": ("nowhere:score", "there is no module 'nowhere'"),
    "no function": (f"{HERE}:shares", "has no 'shares'"),
    "no metric": (f"{HERE}:seven", "is of type int; a metric must be a Metric, or a function"),
    "of one argument": (f"{HERE}:lonely", "must be a function of (scores, labels)"),
    "of three arguments": (sensitivity, "must be a function of (scores, labels)"),
    "a number": (7, "a metric must be a name, a function or a Metric, not 7"),
    "no name": (lambda scores, labels: 1.0, "needs a name"),
    "a limit for nothing": ("auroc@0.3", "the metric 'auroc' takes no limit"),
    "a limit for ones own": (f"{HERE}:share@0.3", "the metric 'share' takes no limit"),
    "no limit": ("pauc@", "the limit in 'pauc@' must be a number"),
    "nan": ("pauc@nan", "the limit in 'pauc@nan' must lie in (0, 1]"),
    "beyond": ("pauc@1.5", "must lie in (0, 1]"),
    "the risk": ("risk", "'risk' is always computed"),
    "a minus": ("-auroc", "unknown metric '-auroc'"),
    "the risk's": (Metric(share, name="risk"), "'risk' is a name of fedxl's own"),
    "a count's": (Metric(share, name="positives"), "'positives' is a name of fedxl's own"),
    "taken": (Metric(share, name="auroc"), "'auroc' is a name of fedxl's own"),
}


@pytest.mark.parametrize("case", list(MISTAKES))
def test_a_mistake_in_a_metric_is_one_line(case):
    item, expected = MISTAKES[case]
    with pytest.raises(UserError) as error:
        metrics.resolve(["auroc", item], limits=(0.3,))
    assert expected in str(error.value)


def test_one_metric_cannot_spoil_the_next():
    def rude(scores, labels):
        scores[:] = 0
        return 1.0

    scores, labels = draw("continuous", 10, 0.3)
    with pytest.raises(ValueError, match="read-only"):
        metrics.judge(metrics.resolve([rude, "auroc"]), scores, labels)
    assert scores.any(), "nor what the caller has"


@pytest.mark.parametrize("wrong", ["high", None, [1, 2]])
def test_a_metric_that_is_no_number_is_one_line(wrong):
    with pytest.raises(UserError, match=r"the metric 'odd' gave .*, which is no number"):
        metrics.judge(metrics.resolve([Metric(lambda s, y: wrong, name="odd")]), np.zeros(2), np.array([0, 1]))


def test_labels_are_whole_numbers_that_can_be_subtracted():
    """Sites send bytes, where 0 - 1 is 255."""
    both = metrics.resolve([Metric(lambda s, y: (y - 1).min(), name="least")])
    assert metrics.judge(both, np.zeros(2), np.array([0, 1], np.uint8))["least"] == -1


def data():
    x, y = make_clients([(9, 9)])[0]
    return (
        nn.Linear(5, 1),
        [(x, y)],
        fedxl.auroc(),
        {"validation": (x, y), "rounds": 3, "local_steps": 2, "eval_every": 1},
    )


def test_own_metrics_in_a_run_and_to_select_by():
    model, clients, risk, settings = data()
    found = fit_named(model, clients, risk, metrics=[share, f"{HERE}:less_is_better"], **settings)
    assert {"auroc", "share", "less_is_better"} <= found.metrics["validation"].keys()
    for select, best in ((f"-{HERE}:less_is_better", min), (f"{HERE}:sensitivity_at@0.2", max), ("share", max)):
        found = fit_named(model, clients, risk, metrics=[share], select=select, **settings)
        values = {record["round"]: record["validation"][metrics.key(select)] for record in found.history}
        risks = {record["round"]: record["validation"]["risk"] for record in found.history}
        ties = [number for number, value in values.items() if value == best(values.values())]
        assert found.best_round == min(ties, key=lambda number: (risks[number], -number))
    for wrong in (f"{HERE}:less_is_better", "-share", "sensitivity_at@0.2", f"{HERE}:sensitivity_at"):
        with pytest.raises(UserError, match="unknown metric to select by"):
            fit_named(model, clients, risk, metrics=[share], select=wrong, **settings)


def test_vectors_have_no_metrics_of_scores():
    with pytest.raises(UserError, match="metrics need one score per example"):
        asked_for(fedxl.contrastive(dim=4), "-risk", (), [share])
    assert asked_for(fedxl.contrastive(dim=4), "-risk", (0.3,)) == []


def test_metrics_may_be_added_when_a_run_goes_on(tmp_path):
    model, clients, risk, settings = data()
    fit_named(model, clients, risk, out=tmp_path, **settings)
    later = fit_named(model, clients, risk, out=tmp_path, resume=True, metrics=[share], **{**settings, "rounds": 4})
    assert [("share" in record["validation"]) for record in later.history] == [False, False, False, True]


def test_partial_auc_of_everything_is_auroc():
    scores, labels = RNG.normal(size=100), RNG.integers(0, 2, 100)
    assert metrics.partial_auc(scores, labels, 1.0) == pytest.approx(metrics.auroc(scores, labels), abs=1e-12)


@pytest.mark.parametrize("row", metrics.usual())
@pytest.mark.parametrize("labels", [np.zeros(5), np.ones(5)])
def test_one_class_is_nan_and_a_count(row, labels):
    found = metrics.judge(metrics.resolve([row], [0.3]), np.arange(5.0), labels)
    assert math.isnan(next(iter(found.values())))
    assert (found["positives"], found["negatives"]) == (labels.sum(), 5 - labels.sum())


def test_scores_that_are_not_numbers_are_nan():
    spoilt = metrics.judge(metrics.resolve([*metrics.usual(), share], [0.3]), [0.1, np.inf], [0, 1])
    assert all(math.isnan(value) for name, value in spoilt.items() if name not in metrics.COUNTS)
    assert math.isnan(metrics.auroc(np.array([0.1, np.nan]), np.array([0, 1])))


@pytest.mark.parametrize("limit", [0.3, 1.0])
def test_resampled_metrics_are_those_of_the_resampled_examples(limit):
    labels = (np.arange(60) % 3 == 0).astype(int)
    runs = [RNG.integers(0, 9, 60).astype(float) + labels for _ in range(2)]
    found = resampled(runs, labels, limit, times=5, seed=7)
    rng = np.random.default_rng(7)
    for value in found:
        chosen = np.concatenate([rng.choice(np.flatnonzero(labels == side), n) for side, n in ((1, 20), (0, 40))])
        each = [
            roc_auc_score(labels[chosen], scores[chosen], max_fpr=None if limit == 1 else limit) for scores in runs
        ]
        assert value == pytest.approx(np.mean(each), abs=1e-12)


def test_an_interval_holds_its_share_of_test_sets():
    """Of AUCs on fresh test sets 95 % lie within 1.96 deviations of the truth; the bootstrap finds that width."""
    shift, n = 1.0, 300

    def draw() -> tuple[np.ndarray, np.ndarray]:
        labels = (np.arange(n) % 2).astype(int)
        return RNG.normal(size=n) + shift * labels, labels

    fresh = np.std([metrics.auroc(*draw()) for _ in range(300)])
    low, high = metrics.interval(resampled([(sample := draw())[0]], sample[1], times=300))
    assert high - low == pytest.approx(2 * 1.96 * fresh, rel=0.25)
