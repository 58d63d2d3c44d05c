"""The head of the page of a run with several labels: the answer, and its figures."""

from __future__ import annotations

import math

from fedxl import metrics
from fedxl.evaluation.label_counts import judge
from fedxl.evaluation.label_judgement import LabelJudgement
from fedxl.reporting.groups import Group
from fedxl.reporting.page import Fact, between, figure_of, listed, metric_name, shown
from fedxl.reporting.runs import Run


def answer(name: str, focus: Group, found: LabelJudgement, first: str) -> list[str]:
    """What a reader takes home: the mean over labels and how sure it is, the ends, what cannot be decided, sites."""
    metric = first if first in found.mean else "auroc"
    known = {label: one.pooled.metrics[metric] for label, one in found.labels.items()}
    known = {label: value for label, value in known.items() if math.isfinite(value.value)}
    mean = found.mean[metric]
    told = f"{figure_of(mean.value)} {between(mean.low, mean.high)}".strip()
    lines = [f"{name} reaches a mean {metric_name(metric)} of {told} over {len(known)} labels on {found.split} data."]
    if len(known) > 1:
        ends = [(pick(known, key=lambda label: known[label].value), word) for pick, word in ENDS]
        each = [f"{word} for {shown(label, 40)} ({figure_of(known[label].value)})" for label, word in ends]
        lines.append(f"It is {listed(each)}.")
    if found.undecided:
        names = listed([shown(label, 40) for label in found.undecided])
        lines.append(f"Too few validation examples for a probability or a class: {names}.")
    sites = {site: one.mean for site, one in found.sites.items() if math.isfinite(one.mean.value)}
    if len(sites) > 1:
        worst = min(sites, key=lambda site: sites[site].value)
        low = f"{figure_of(sites[worst].value)} {between(sites[worst].low, sites[worst].high)}".strip()
        lines.append(f"By site the mean AUROC is lowest at {shown(worst, 40)}: {low}.")
    if focus.shown.epsilon:
        lines.append(f"Training examples have differential privacy: epsilon {focus.shown.epsilon}.")
    return [*lines, *(f"Note: {note}." for note in (*found.notes, *_binned(focus.shown, found)))]


def _binned(run: Run, found: LabelJudgement) -> list[str]:
    """How far metrics may be from those of the scores, where sites disclosed counts in bins."""
    counts = run.label_curves.get(found.split)
    if found.split in run.by_label or not counts:
        return []
    counted = judge(metrics.resolve(list(found.mean)), counts)
    told = listed([f"{metric_name(name)} by {bound:.1g}" for name, bound in counted.mean_bounds.items()])
    noise = ", besides the noise that they added" if counted.noise else ""
    return [f"sites disclosed counts in bins, not scores; means may be off, {told} at most{noise}"]


ENDS = ((max, "highest"), (min, "lowest"))


def facts(found: LabelJudgement, run: Run) -> list[Fact]:
    each = [
        Fact(f"mean {metric_name(name)}", figure_of(value.value), between(value.low, value.high))
        for name, value in found.mean.items()
    ]
    decided = len(found.labels) - sum(name in found.undecided for name in found.labels)
    each.append(Fact("labels", str(len(found.labels)), f"{decided} with probabilities and classes"))
    whole = run.by_label.get(found.split)  # counts in bins do not say how many examples there are
    return [*each, *([Fact(f"{found.split} examples", f"{len(whole.scores):,}", "")] if whole is not None else [])]
