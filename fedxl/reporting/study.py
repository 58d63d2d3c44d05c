"""What the sections of a report are made from: the runs, what their scores say, and paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedxl import metrics
from fedxl.errors import UserError
from fedxl.evaluation.assess import Assessment, assess
from fedxl.evaluation.compare import Difference, differences, seed_intervals
from fedxl.evaluation.intervals import Interval, reported
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.runs import Group, as_pair, assessed_on, grouped, scores_on, shared_examples
from fedxl.training.run_folder import Run

FPR = 0.3  # the limit of the partial AUC where the metric that chose the model has none


class Measured(NamedTuple):
    """Metrics of a group's scores: of several seeds the means over runs, of several labels the means over labels."""

    split: str
    metrics: Mapping[str, Interval]


class Study(NamedTuple):
    """All that a report knows. The focus is the group that it looks at closely."""

    groups: Sequence[Group]
    focus: Group
    found: Assessment | None  # of the focus; None: it has no scores
    measured: Mapping[str, Measured]  # by letter, of groups that have scores
    compared: Mapping[str, Mapping[str, Difference]]  # by letter and metric: differences to the focus
    names: Sequence[str]  # metrics that tables show, the one that chose the model first
    timed: bool  # whether the focus is about time to event
    fpr: float  # the limit of the partial AUC

    @property
    def drawn(self) -> list[Group]:
        """The groups that are drawn, the focus among them."""
        return [group for group in self.groups if group.key.style is not None]

    @property
    def key(self) -> Key:
        return self.focus.key

    @property
    def several(self) -> bool:
        """Whether the focus has several labels."""
        return self.found is not None and self.found.several


def study(runs: Sequence[Run], reference: str = "") -> Study:
    """`reference` names the run, or the group of runs, that the report looks at closely and compares with."""
    groups, focus = grouped(runs, reference)
    run, fpr = focus.shown, _fpr(focus.shown)
    some = bool(run.labels) or any(scores_on(run, split) is not None for split in ("test", "validation"))
    found = assess(run.scores, run.histograms, fpr=fpr) if some else None
    usual = list(found.pooled.mean) if found is not None else reported(run.timed, fpr)
    # One run in focus has been measured by its assessment.
    others = [group for group in groups if found is None or group is not focus or len(group.runs) > 1]
    alike = [group for group in others if group.shown.timed == run.timed]
    measured = {group.letter: each for group in alike if (each := _measured(group, usual)) is not None}
    if found is not None:
        measured.setdefault(focus.letter, Measured(found.split, found.pooled.mean))
    chosen = [run.metric] if run.metric in usual or run.metric in run.values else []
    names = list(dict.fromkeys([*chosen, *usual, *_own(run)]))
    return Study(groups, focus, found, measured, _compared(groups, focus, usual, fpr), names, run.timed, fpr)


def _fpr(run: Run) -> float:
    """The limit in the name of the metric that chose the model, if it is one."""
    try:
        base, limit = metrics.split(run.metric)
        return FPR if limit is None or base in metrics.QUERY_METRICS else limit
    except UserError:
        return FPR


def _own(run: Run) -> list[str]:
    """Metrics of the user's own."""
    return [n for n in run.values if n not in metrics.COUNTS and n.partition("@")[0] not in metrics.METRICS]


def _measured(group: Group, names: Sequence[str]) -> Measured | None:
    """Metrics with intervals; None if there are no scores."""
    scores = group.scores()
    if not scores:
        return None
    return Measured(assessed_on(group.shown), seed_intervals(names, scores, shared_examples(group.runs)))


def _compared(
    groups: Sequence[Group], focus: Group, names: Sequence[str], fpr: float
) -> dict[str, Mapping[str, Difference]]:
    """Of each group that has runs on the same examples as the focus, seed by seed."""
    found: dict[str, Mapping[str, Difference]] = {}
    for group in groups:
        pairs = {}
        for mine in focus.runs if group is not focus else ():
            same = ((other.name, as_pair(other, mine)) for other in group.runs if other.name not in pairs)
            name, pair = next(((name, pair) for name, pair in same if pair is not None), ("", None))
            if pair is not None:
                pairs[name] = pair
        if pairs:
            firsts, seconds = zip(*pairs.values(), strict=True)
            found[group.letter] = differences(firsts, seconds, same=shared_examples(focus.runs), names=names, fpr=fpr)
    return found
