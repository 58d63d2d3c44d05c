"""Metrics: numbers that judge a model by its raw scores. A new metric is its function and its row in `METRICS`.

A user's own metric needs neither: it is named "package.module:function", or passed to `fit`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedxl import censored, registry
from fedxl.errors import UserError, require

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Queries = npt.NDArray[np.int64]
RANKS = (5.0, 10.0)  # at which metrics of queries are computed, if none is named
COUNTS = ("positives", "negatives")  # how many examples of each class metrics rest on; recorded beside them


@dataclass(frozen=True)
class Metric:
    """A number that judges a model.

    `compute` takes raw scores [n] (the model's outputs, in float64) and labels [n] (0 or 1), both read-only, and
    returns a float: NaN where the metric is not defined. With `takes_limit` it takes a false positive rate besides,
    which stands behind an @ in its name: "pauc@0.3".
    """

    compute: Callable[..., float] | None  # None: the run's own risk, which only the evaluation knows
    summary: str = ""  # one line
    range: tuple[float, float] = (-math.inf, math.inf)  # a site that tells a value outside is not believed
    larger_is_better: bool = True  # if not, models are selected by "-name"
    takes_limit: bool = False
    needs_limit: bool = True  # if it takes one; without it `compute` is called without
    shown: bool | tuple[float, ...] = True  # whether reports show it; for a metric with a limit: at which limits
    name: str = ""  # of a metric passed to `fit`; empty: its function's. A row's name is its key in the table
    # `compute` takes scores, grades, the query of each item and a rank, which stands behind the @: "ndcg@10".
    by_query: bool = False
    by_time: bool = False  # `compute` takes scores, events (0 or 1) and the time of each example: "cindex"


Item = str | Metric | Callable[..., float]  # what names or is a metric


class NamedMetric(NamedTuple):
    """A metric as it is computed in a run: under a name, and at a limit if it takes one."""

    name: str  # in records and reports
    metric: Metric
    limit: float | None = None

    @property
    def select(self) -> str:
        """How to choose the best model by it: a minus says that less is better."""
        return self.name if self.metric.larger_is_better else f"-{self.name}"

    def value(
        self, scores: Floats, labels: Labels, queries: Queries | None = None, times: Floats | None = None
    ) -> float:
        """NaN for scores that are not finite. With queries, labels are grades; with times, events."""
        assert self.metric.compute is not None
        if not np.isfinite(scores).all():
            return math.nan
        require(queries is not None or not self.metric.by_query, f"the metric '{self.name}' needs data with queries")
        require(times is not None or not self.metric.by_time, f"the metric '{self.name}' needs data with times")
        more = [queries] if self.metric.by_query else [times] if self.metric.by_time else []
        found: Any = self.metric.compute(scores, labels, *more, *([] if self.limit is None else [self.limit]))
        try:
            return float(found)
        except (TypeError, ValueError):
            raise UserError(f"the metric '{self.name}' gave {found!r:.60}, which is no number") from None


def counts(scores: Any, labels: Any) -> tuple[Floats, Floats]:
    """Negatives and positives at or above each distinct score, from the highest down, beginning with (0, 0)."""
    scores = np.asarray(scores, np.float64)
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # the last of each run of ties
    hits = np.cumsum((np.asarray(labels)[order] > 0).astype(np.float64))[ends]
    return np.append(0.0, ends + 1.0 - hits), np.append(0.0, hits)


def roc(scores: Any, labels: Any) -> tuple[Floats, Floats]:
    """(false positive rate, true positive rate); needs both classes."""
    false, true = counts(scores, labels)
    return false / false[-1], true / true[-1]


def auroc(scores: Any, labels: Any) -> float:
    """Area under the ROC curve; ties count one half. NaN with one class only."""
    return partial_auc_raw(scores, labels, 1.0)


def partial_auc_raw(scores: Any, labels: Any, max_fpr: float) -> float:
    """Area under the ROC curve up to a false positive rate, at most `max_fpr`."""
    if not _both(scores, labels):
        return float("nan")
    return area_under(*roc(scores, labels), max_fpr)


def area_under(fpr: Floats, tpr: Floats, max_fpr: float) -> float:
    """Area under the curve through these points, in ascending order, up to a false positive rate."""
    inside = int(np.searchsorted(fpr, max_fpr, side="right"))
    x = np.append(fpr[:inside], max_fpr)
    y = np.append(tpr[:inside], np.interp(max_fpr, fpr, tpr) if inside < len(fpr) else tpr[-1])
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1])) / 2)


def partial_auc(scores: Any, labels: Any, max_fpr: float) -> float:
    """Partial AUC on McClish's scale: 0.5 for chance, 1 for a perfect ranking (the scale of the paper's tables)."""
    return float(mcclish(partial_auc_raw(scores, labels, max_fpr), max_fpr))


def mcclish(area: Any, max_fpr: float) -> Any:
    """An area up to a false positive rate on McClish's scale: 0.5 for chance, 1 for a perfect ranking."""
    chance = max_fpr**2 / 2
    return 0.5 * (1 + (area - chance) / (max_fpr - chance))


def average_precision(scores: Any, labels: Any) -> float:
    """Sum over thresholds of precision times the recall gained. NaN with one class only."""
    if not _both(scores, labels):
        return float("nan")
    false, true = counts(scores, labels)
    precision = true[1:] / (true[1:] + false[1:])
    return float(np.sum(np.diff(true) * precision) / true[-1])


def ndcg(scores: Any, grades: Any, queries: Any, rank: float) -> float:
    """Normalised discounted cumulative gain of the first `rank` places: the mean over queries with a relevant item.

    The gain of a grade y is 2^y - 1, the discount of place r is 1 / log2(1 + r). Items of one score share the mean of
    their gains (McSherry and Najork, ECIR 2008), as in scikit-learn. NaN if no query holds a relevant item.
    """
    scores, gain = np.asarray(scores, np.float64), np.exp2(np.asarray(grades, np.float64)) - 1
    queries = np.asarray(queries)
    order = np.lexsort((-scores, queries))
    ends = np.flatnonzero(np.diff(queries[order])) + 1
    each = [_ndcg(scores[items], gain[items], int(rank)) for items in np.split(order, ends) if gain[items].any()]
    return float(np.mean(each)) if each else float("nan")


def _ndcg(scores: Floats, gain: Floats, rank: int) -> float:
    """Of one query, from the highest score down."""
    discount = 1 / np.log2(np.arange(2, len(gain) + 2))
    discount[rank:] = 0
    starts = np.flatnonzero(np.append(True, np.diff(scores) != 0))  # of each run of ties
    shared = np.add.reduceat(gain, starts) / np.diff(np.append(starts, len(gain)))
    return float(shared @ np.add.reduceat(discount, starts) / (np.sort(gain)[::-1] @ discount))


def interval(values: Any, level: float = 0.95) -> tuple[float, float]:
    """The middle `level` of these values."""
    low, high = np.quantile(np.asarray(values, np.float64), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _both(scores: Any, labels: Any) -> bool:
    positive = np.asarray(labels) > 0
    return bool(positive.any() and not positive.all() and np.isfinite(np.asarray(scores, np.float64)).all())


SHARE = (0.0, 1.0)
METRICS: Mapping[str, Metric] = {
    "auroc": Metric(auroc, "area under the ROC curve", SHARE),
    "pauc": Metric(
        partial_auc, range=SHARE, takes_limit=True, shown=(0.3, 0.5),
        summary="partial AUC up to a false positive rate, on McClish's scale: 0.5 for chance, 1 if perfect",
    ),
    "pauc_raw": Metric(
        partial_auc_raw, range=SHARE, takes_limit=True, shown=False,
        summary="partial AUC as the area itself, at most the false positive rate",
    ),
    "ap": Metric(average_precision, "average precision", SHARE),
    "risk": Metric(None, "the run's own risk, exactly", larger_is_better=False),
}  # fmt: skip
# Of items in queries: they are computed where the run's risk is one of queries, and need the query of each item.
QUERY_METRICS: Mapping[str, Metric] = {
    "ndcg": Metric(
        ndcg, range=SHARE, takes_limit=True, by_query=True,
        summary="normalised discounted cumulative gain of the first places, mean over queries; gains are 2^grade - 1",
    ),
}  # fmt: skip
# Of time to event: they are computed where the run's risk is one, and need the time of each example.
TIME_METRICS: Mapping[str, Metric] = {
    "cindex": Metric(
        censored.harrell, range=SHARE, by_time=True,
        summary="Harrell's C: of two examples that can be compared, how often the earlier event scores higher",
    ),
    "uno": Metric(
        censored.uno, range=SHARE, takes_limit=True, needs_limit=False, by_time=True,
        summary="Uno's C: Harrell's with weights against censoring, of events before a time if one is given",
    ),
    "auc_at": Metric(
        censored.auc_at, range=SHARE, takes_limit=True, by_time=True,
        summary="AUC at a horizon: how often an example with an event by then scores higher than one without",
    ),
}  # fmt: skip
KNOWN: Mapping[str, Metric] = {**METRICS, **QUERY_METRICS, **TIME_METRICS}


def usual() -> list[str]:
    """The names of the table that are computed from scores, in every evaluation."""
    return [name for name, metric in METRICS.items() if metric.compute is not None]


def judge(
    metrics: Iterable[NamedMetric], scores: Any, labels: Any, queries: Queries | None = None,
    times: Floats | None = None,
) -> dict[str, float]:  # fmt: skip
    """The values of these metrics by name, and how many examples of each class they rest on.

    queries: of each item, if there are any; then labels are grades, and those above 0 count as positive. times: of
    events, which labels of 1 are, or of the last look at an example.
    """
    scores, grades = np.array(scores, np.float64), np.array(labels, np.int64 if queries is not None else None)
    labels = (grades > 0).astype(np.int64)
    for array in (scores, labels, grades):
        array.flags.writeable = False  # one metric must not change what the next one judges
    positives = int(labels.sum())
    values = {
        metric.name: metric.value(scores, grades if metric.metric.by_query else labels, queries, times)
        for metric in metrics
    }
    return values | dict(zip(COUNTS, (positives, len(labels) - positives), strict=True))


def resolve(items: Iterable[Item], limits: Sequence[float] = ()) -> list[NamedMetric]:
    """Metrics from names, functions and `Metric`s. One that takes a limit and names none is taken at all `limits`.

    >>> [metric.name for metric in resolve(["auroc", "pauc@0.2", "pauc_raw"], limits=[0.3, 0.5])]
    ['auroc', 'pauc@0.2', 'pauc_raw@0.3', 'pauc_raw@0.5']
    """
    found: dict[str, NamedMetric] = {}
    for item in items:
        for metric in _resolved(item, limits):
            same = found.setdefault(metric.name, metric) == metric
            require(same, f"two metrics are called '{metric.name}'; give one of them another name")
    return list(found.values())


def _resolved(item: Item, limits: Sequence[float]) -> list[NamedMetric]:
    name, limit = split(item) if isinstance(item, str) else ("", None)
    if isinstance(item, str):
        metric = _as_metric(registry.find("metric", name, KNOWN, _fits, "a Metric, or a function"), name)
        name = key(name)
    else:
        metric = _as_metric(item, str(item))
        name = metric.name or getattr(metric.compute, "__name__", "")
        require(name.isidentifier(), f"the metric {item!r:.100} needs a name, as in Metric(..., name='sensitivity')")
    own = not isinstance(item, str) or registry.own(item)
    require(not own or name not in (*KNOWN, *COUNTS), f"'{name}' is a name of fedxl's own; give the metric another")
    require(metric.compute is not None, f"'{name}' is always computed; leave it out")
    require(limit is None or metric.takes_limit, f"the metric '{name}' takes no limit, as in '{item}'")
    if not metric.takes_limit:
        return [NamedMetric(name, metric)]
    if limit is None and metric.by_time:  # horizons have no default
        return [] if metric.needs_limit else [NamedMetric(name, metric)]
    several = RANKS if metric.by_query else limits
    return [NamedMetric(f"{name}@{each:g}", metric, each) for each in (several if limit is None else [limit])]


def _fits(found: Any) -> bool:
    return callable(found) or isinstance(found, Metric)


def _as_metric(found: Any, shown_as: str) -> Metric:
    require(_fits(found), f"a metric must be a name, a function or a Metric, not {shown_as:.100}")
    metric = found if isinstance(found, Metric) else Metric(found)
    if metric.compute is not None:
        wanted = ["scores", "labels", *(["queries"] if metric.by_query else ["times"] if metric.by_time else [])]
        wanted += ["limit"] if metric.takes_limit else []
        try:
            inspect.signature(metric.compute).bind(*wanted)
        except (TypeError, ValueError):
            raise UserError(f"the metric {shown_as:.100} must be a function of ({', '.join(wanted)})") from None
    return metric


def split(name: str) -> tuple[str, float | None]:
    """A metric's name without its limit, and the limit.

    >>> split("pauc@0.3"), split("auroc")
    (('pauc', 0.3), ('auroc', None))
    """
    base, at, text = name.partition("@")
    if not at:
        return base, None
    try:
        limit = float(text)
    except ValueError:
        raise UserError(f"the limit in '{name}' must be a number, as in 'pauc@0.3'") from None
    if base in QUERY_METRICS:
        require(limit >= 1 and limit == limit // 1, f"the rank in '{name}' must be a whole number, as in '{base}@10'")
    elif base in TIME_METRICS:
        require(0 < limit < math.inf, f"the horizon in '{name}' must be a time above 0, as in '{base}@365'")
    else:
        require(0 < limit <= 1, f"the limit in '{name}' must lie in (0, 1]")
    return base, limit


def key(name: str) -> str:
    """What a metric is called in records, by whatever name it was asked for.

    >>> key("mypackage.scores:sensitivity"), key("-risk"), key("pauc@0.3")
    ('sensitivity', 'risk', 'pauc@0.3')
    """
    return name.removeprefix("-").rpartition(":")[2]


def value_of(values: Mapping[str, Any], select: str) -> float:
    """The metric that a model is chosen by, the higher the better; NaN where there is none."""
    found = values.get(key(select))
    value = math.nan if found is None else float(found)
    return -value if select.startswith("-") else value


def own(names: Iterable[str]) -> set[str]:
    """Of these names of metrics, limits and signs left out, those that would be imported."""
    bases = {name.removeprefix("-").partition("@")[0] for name in names}
    return {base for base in bases if registry.own(base)}


def shown(*tables: Mapping[str, Any]) -> list[str]:
    """The names that reports show: those that the table says, then a user's own in these tables of values."""
    names: list[str] = []
    for name, metric in METRICS.items():
        if isinstance(metric.shown, tuple):
            names += [f"{name}@{limit:g}" for limit in metric.shown]
        elif metric.shown:
            names.append(name)
    more = {name: None for table in tables for name in table if name.partition("@")[0] not in METRICS}
    return [*names, *(name for name in more if name not in COUNTS)]
