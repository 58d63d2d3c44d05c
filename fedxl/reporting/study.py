"""What the sections of a report are made from: the runs, what their scores say, and paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from fedxl import metrics
from fedxl.errors import UserError
from fedxl.evaluation.assess import Assessment, assess
from fedxl.evaluation.compare import Difference, differences, seed_intervals
from fedxl.evaluation.intervals import Interval, reported
from fedxl.evaluation.scores import Scores
from fedxl.reporting.charts.chart import Key
from fedxl.reporting.runs import Group, as_pair, grouped, scores_on, shared_examples
from fedxl.training.run_folder import Run

FPR = 0.3  # the limit of the partial AUC where the metric that chose the model has none


class Study(NamedTuple):
    """All that a report knows. The focus is the group that it looks at closely."""

    groups: Sequence[Group]
    focus: Group
    found: Assessment | None  # of the focus; None: it has no scores
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
    found = assess(run.scores, run.histograms, fpr=fpr, asked=_at_times(run)) if some else None
    usual = list(found.pooled.mean) if found is not None else reported(run.timed, fpr)

    def measure(group: Group) -> Mapping[str, Interval]:
        known = found.pooled.mean if found is not None and group is focus else {}
        alone = bool(known) and len(group.runs) == 1  # then its assessment has measured it
        scores = group.scores() if group.shown.timed == run.timed and not alone else []
        return seed_intervals(usual, scores, shared_examples(group.runs)) if scores else known

    complete = [
        replace(group, measured=measure(group), compared=_compared(group, focus, usual, fpr)) for group in groups
    ]
    chosen = [run.metric] if run.metric in usual or run.metric in run.values else []
    own = [name for name in metrics.shown(run.values) if name.partition("@")[0] not in metrics.METRICS]
    names = list(dict.fromkeys([*chosen, *usual, *own]))
    return Study(complete, complete[groups.index(focus)], found, names, run.timed, fpr)


def _fpr(run: Run) -> float:
    """The limit in the name of the metric that chose the model, if it is one."""
    try:
        base, limit = metrics.split(run.metric)
        return FPR if limit is None or base in metrics.QUERY_METRICS else limit
    except UserError:
        return FPR


def _at_times(run: Run) -> list[str]:
    """The metrics of time to event that the run was asked for at a time."""
    found = []
    for name in run.values if run.timed else ():
        with suppress(UserError):  # a name in a file may be anything
            base, limit = metrics.split(name)
            found += [name] if base in metrics.TIME_METRICS and limit is not None else []
    return found


def _compared(group: Group, focus: Group, names: Sequence[str], fpr: float) -> Mapping[str, Difference]:
    """Its runs less those of the focus, in pairs on the same examples; empty if there are none."""
    pairs: dict[str, tuple[Scores, Scores]] = {}
    for mine in focus.runs if group is not focus else ():
        for other in group.runs:
            if other.name not in pairs and (pair := as_pair(other, mine)) is not None:
                pairs[other.name] = pair
                break
    if not pairs:
        return {}
    firsts, seconds = zip(*pairs.values(), strict=True)
    return differences(firsts, seconds, same=shared_examples(focus.runs), names=names, fpr=fpr)
