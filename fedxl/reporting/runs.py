"""Runs as reports see them: in a table; as one if they differ by their seed only; as pairs on the same examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedxl import metrics
from fedxl.algorithms import ALGORITHMS
from fedxl.errors import UserError, printable, unknown
from fedxl.evaluation.compare import Difference, paired, seed_intervals
from fedxl.evaluation.histogram import as_scores
from fedxl.evaluation.intervals import Interval, reported
from fedxl.evaluation.scores import Scores
from fedxl.metrics import value_of
from fedxl.reporting.charts.chart import DASHES, Key
from fedxl.reporting.page import between, interval_text, metric_name, shown
from fedxl.reporting.text import mean_with_spread
from fedxl.training.privacy import promise
from fedxl.training.run_folder import Run, read_run
from fedxl.training.run_writer import FREE

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# What follows from the seed where a config names the data: `fit` knows its data by nothing else.
DRAWN = ("task.data", "task.examples", "task.validation", "task.clients")
UNCOUNTED = FREE | {"run.seed"}
MOST = 10_000  # examples; a bootstrap of more takes seconds per run


@dataclass(frozen=True, eq=False)
class Group:
    """Runs with the same settings but for the seed. `shown` stands for them where one model is looked at."""

    key: Key  # of its curves; without a style, it is in tables alone
    label: str
    runs: Sequence[Run]
    shown: Run
    # By metric. Of several seeds the means over runs, of several labels the means over labels.
    measured: Mapping[str, Interval] = field(default_factory=dict)  # empty if there are no scores
    compared: Mapping[str, Difference] = field(default_factory=dict)  # to the focus, where examples are the same

    @property
    def letter(self) -> str:
        return self.key.letter

    @property
    def title(self) -> str:
        return f"{self.letter} ({shown(self.label, 60)})"

    def over_runs(self, name: str) -> list[float]:
        """A metric of each run, where it is known."""
        found = (run.values.get(name) for run in self.runs)
        return [float(value) for value in found if value is not None]

    def scores(self) -> list[Scores]:
        """What its runs scored on the split that the shown one is measured on."""
        split = assessed_on(self.shown)
        return [found for run in self.runs if (found := scores_on(run, split)) is not None]


def grouped(runs: Sequence[Run], reference: str = "") -> tuple[list[Group], Group]:
    """The groups in the order of their first runs, and the one that the report looks at closely.

    That is the one which `reference` names, or else the best on validation data among the federated ones.
    """
    sorted_: dict[str, list[Run]] = {}
    for run in runs:
        sorted_.setdefault(_sameness(run), []).append(run)
    members = list(sorted_.values())
    labels, preference = _labels(members), _preference(runs)
    if reference:
        named = [n for n, each in enumerate(members) if reference in (labels[n], *(run.name for run in each))]
        if not named:
            raise unknown("run", reference, {*labels, *(run.name for run in runs)})
        index = named[0]
    else:
        everyone = range(len(members))
        federated = [n for n in everyone if not is_centralized(members[n][0].algorithm)] or everyone
        index = max(federated, key=lambda n: float(np.mean([preference(run) for run in members[n]])))
    focus = max(members[index], key=preference)
    others = [number for number in range(len(members)) if number != index]
    drawn = sorted([index, *others[: len(DASHES) - 1]])  # as many as there are styles
    groups = []
    for number, (label, each) in enumerate(zip(labels, members, strict=True)):
        letter = LETTERS[number] if number < len(LETTERS) else str(number + 1)
        key = Key(shown(label, 60), drawn.index(number) if number in drawn else None, letter)
        # One that judged the same examples as the focus if there is one, else the preferred one.
        stands = next((run for run in each if same_examples(run, focus)), max(each, key=preference))
        groups.append(Group(key, label, each, focus if number == index else stands))
    return groups, groups[index]


def _preference(runs: Sequence[Run]) -> Callable[[Run], float]:
    """How good a run is on validation data, the higher the better; minus infinity if that is not known.

    By the metric that chose the best rounds. If these differ, by AUROC, of time to event by concordance: values of
    two metrics cannot be compared.
    """
    chosen = {run.chosen_by for run in runs}
    metric = chosen.pop() if len(chosen) == 1 else "cindex" if all(run.timed for run in runs) else "auroc"

    def preference(run: Run) -> float:
        value = value_of(run.shown.get("validation") or {}, metric)
        return value if np.isfinite(value) else -np.inf

    return preference


def same_examples(first: Run, second: Run) -> bool:
    """Whether two runs scored the same test (else validation) examples, so that they form pairs."""
    return as_pair(first, second) is not None


def as_pair(first: Run, second: Run) -> tuple[Scores, Scores] | None:
    """The scores of two runs, if they are of the same examples."""
    split = assessed_on(first)
    if not split or split != assessed_on(second) or _data(first) != _data(second):
        return None
    if split in first.histograms or split in second.histograms:
        return None  # counts in bins do not say which example is which
    one, other = scores_on(first, split), scores_on(second, split)
    try:
        return None if one is None or other is None else paired(one, other)
    except UserError:
        return None


def shared_examples(runs: Sequence[Run]) -> bool:
    """Whether all runs were measured on the same examples."""
    return all(same_examples(runs[0], run) for run in runs[1:])


def _data(run: Run) -> Any:
    """What tells data apart beyond their labels: a digest of the validation data, else how they were drawn."""
    if digest := run.settings.get("task.validation"):
        return digest
    data = {key: value for key, value in run.settings.items() if key.startswith("data.")}
    return [json.dumps(data, sort_keys=True, default=str), run.seed]


def _sameness(run: Run) -> str:
    """Equal for runs that differ by seed only."""
    if run.label:
        return f"={run.label}"
    dropped = UNCOUNTED | set(DRAWN if "data.name" in run.settings else ())
    kept = {key: value for key, value in run.settings.items() if key not in dropped}
    alone = "" if kept else run.name  # of nothing but a name we know no equal
    return json.dumps([kept, alone], sort_keys=True, default=str)


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """A name for each group: its run's, or what sets it apart from the other groups."""
    algorithms = [runs[0].algorithm for runs in groups]
    apart = len(set(algorithms)) == len(groups)
    found = []
    for runs, algorithm in zip(groups, algorithms, strict=True):
        shared = algorithm if apart else _folder(runs) or f"{runs[0].name} and {len(runs) - 1} more"
        found.append(runs[0].label or (runs[0].name if len(runs) == 1 else shared))
    return found


def _folder(runs: Sequence[Run]) -> str:
    """The folder that holds the runs of one `train --seeds`; empty if they are others."""
    above = {run.path.resolve().parent for run in runs if run.path is not None and run.name == f"seed-{run.seed}"}
    return above.pop().name if len(above) == 1 and all(run.path is not None for run in runs) else ""


def differing(groups: Sequence[Group]) -> tuple[dict[str, list[Any]], Mapping[str, Any]]:
    """Settings that differ between groups, a value each; and those that all share."""
    tables = [group.shown.settings for group in groups]
    names = list(dict.fromkeys(name for table in tables for name in table))
    differ = {name: [table.get(name) for table in tables] for name in names}
    unlike = {name: values for name, values in differ.items() if any(value != values[0] for value in values)}
    shared = {name: values[0] for name, values in differ.items() if name not in unlike}
    return unlike, shared


def assessed_on(run: Run) -> str:
    """The split that a report measures on: test, else validation; empty if there are no scores, nor counts."""
    return next((split for split in ("test", "validation") if split in run.scores or split in run.histograms), "")


def scores_on(run: Run, split: str) -> Scores | None:
    """The run's scores, or those that sites' counts of one label stand for; None if there are none with a curve."""
    found = run.scores.get(split)
    if found is None and list(run.histograms.get(split, {})) == [""]:
        found = as_scores(run.histograms[split][""])
    if found is None:
        return None
    return found if len(found.labels) > 1 or found.has_metrics else None


def epsilon(run: Run) -> str:
    """What its differential privacy comes to by the latest row; empty if it promises none."""
    return promise(run.latest.get("privacy"))


def is_centralized(algorithm: str) -> bool:
    """Whether an algorithm wants all data in one place; one of a user's own is not looked up."""
    return bool(getattr(ALGORITHMS.get(algorithm), "centralized", False))


def overview(paths: Sequence[Path]) -> tuple[str, list[str], list[list[str]]]:
    """A title, columns and rows of a table that fits a terminal: one row for runs that differ by their seed only.

    It has the metric that chose the models, of runs that were chosen by several that of the preferred one, and AUROC.
    """
    runs = [read_run(path) for path in paths]
    groups, focus = grouped(runs)
    chosen, first = focus.shown.metric, "cindex" if focus.shown.timed else "auroc"
    names = list(dict.fromkeys([chosen, first]))
    risks, splits = (sorted({getattr(run, what) for run in runs} - {""}) for what in ("risk", "split"))
    rows = []
    for group in groups:
        ended = [run for run in group.runs if run.done is not None] or group.runs
        some = replace(group, runs=ended)
        seconds = [float(found) for run in ended if (found := (run.done or run.shown).get("seconds"))]
        head = [_called(group, len(ended)), shown(group.shown.algorithm, 40), _round(ended)]
        head[-1] += f", {ended[0].split}" if len(splits) > 1 else ""
        values = [_with_interval(some, chosen), *(_mean(some, each) for each in names[1:])]
        rows.append([*head, *values, _number(float(np.mean(seconds)) if seconds else None, 1)])
    on = f" on {' and '.join(splits)} data" if splits else ""
    several = "; of several seeds means, ± standard deviation" if any(len(group.runs) > 1 for group in groups) else ""
    title = f"{metric_name(chosen)}{on} [95 % interval]{several}; risk {shown(', '.join(risks), 60)}"
    return title, ["run", "algorithm", "round", *map(printable, names), "seconds"], rows


def _called(group: Group, ended: int) -> str:
    """A run's name; of several seeds how many have ended, too, with their label unless it is the algorithm."""
    if len(group.runs) == 1:
        return shown(group.label, 60)
    label = "" if group.label == group.shown.algorithm else shown(group.label, 60) + ", "
    return f"{label}{ended} seeds" if ended == len(group.runs) else f"{label}{ended} of {len(group.runs)} seeds"


def _round(runs: Sequence[Run]) -> str:
    """The chosen rounds; of a run that has not finished, how far it is."""
    best = sorted({run.best_round for run in runs if run.best_round is not None})
    return runs[0].state if not best else f"{best[0]} to {best[-1]}" if len(best) > 1 else str(best[0])


def _with_interval(group: Group, name: str) -> str:
    """A metric as "0.931 [0.911, 0.951]" where scores are known."""
    found = _interval(name, group.scores(), shared_examples(group.runs))
    return _mean(group, name) if found is None else interval_text(found)


def _mean(group: Group, name: str) -> str:
    values = group.over_runs(name)
    return mean_with_spread(values) if values else ""


def table(paths: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table of runs: metrics of the best round once a run has finished, the latest ones before.

    A metric of the user's own, and epsilon, have a column if any of the runs has them. If all runs are about time to
    event, so has each other metric, AUROC among them. Intervals are those of AUROC, or of concordance, and of the
    metric that chose the model.
    """
    runs = [read_run(path) for path in paths]
    names = metrics.shown(*(run.values for run in runs))
    if all(run.timed for run in runs):
        names = [name for name in names if any(name in run.values for run in runs)]
    private = any(map(epsilon, runs))
    columns = ["run", "algorithm", "risk", "state", "best round", *map(printable, names), "on", "seconds"]
    rows = []
    for run in runs:
        scores = [run.scores[run.split]] if run.split in run.scores else []
        first, *_ = reported(any(each.time is not None for each in scores), 1.0)
        best = "" if run.best_round is None else str(run.best_round)
        head = [printable(run.name), printable(run.algorithm, 60), printable(run.risk, 60), run.state, best]
        ends = [between(_interval(name, scores)) if name in (first, run.metric) else "" for name in names]
        cells = [f"{_number(run.values.get(n), 4)} {end}".strip() for n, end in zip(names, ends, strict=True)]
        seconds = _number((run.done or run.shown).get("seconds"), 1)
        on = f"{run.split}, {run.sites_heard}" if run.sites_heard else run.split
        rows.append([*head, *cells, on, seconds, *([epsilon(run)] if private else [])])
    return [*columns, *(["epsilon"] if private else [])], rows


def _interval(name: str, runs: Sequence[Scores], same: bool = True) -> Interval | None:
    """Of a metric, its mean over runs; None where scores are not known, or an interval takes too long for a table."""
    soon = bool(runs) and all(_soon_known(name, found) for found in runs)
    return seed_intervals([name], runs, same)[name] if soon else None


def _soon_known(name: str, found: Scores) -> bool:
    """Whether an interval of this metric takes no longer than a table may."""
    timed = found.time is not None
    usual = metrics.TIME_METRICS if timed else metrics.usual()
    some = name.partition("@")[0] in usual and len(found.labels) == 1 and len(found) <= MOST
    return some or name == reported(timed, 1.0)[0]


def _number(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else ""
