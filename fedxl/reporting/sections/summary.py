"""The head of the page: the question, and the answer in a few sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedxl import metrics
from fedxl.evaluation.binned import judge as binned_judge
from fedxl.evaluation.compare import Difference
from fedxl.evaluation.intervals import Interval
from fedxl.evaluation.judgement import Judgement, LabelJudgement
from fedxl.evaluation.label_counts import judge as judge_counts
from fedxl.reporting.groups import Group
from fedxl.reporting.page import Fact, Page, Section, between, figure_of, interval_text, listed, metric_name, shown
from fedxl.reporting.runs import Run

RISKS = {
    "auroc": "AUROC",
    "pauc": "one-way partial AUC",
    "tpauc": "two-way partial AUC",
    "cvar_pauc": "one-way partial AUC of exact rates",
    "cvar_tpauc": "two-way partial AUC of exact rates",
    "ap": "average precision",
    "p_norm_push": "a ranking whose top is pushed up",
    "contrastive": "a contrastive loss",
    "ndcg": "NDCG",
    "listwise": "the order of items within queries",
}
METHOD = (
    "Intervals of AUROC are DeLong's in Wilson's form; of other metrics a stratified BCa bootstrap, corrected for "
    "few positives if it is average precision, and of their differences a jackknife with Student's t; of shares "
    "Wilson's; of means over several labels Wilson's with the variance of a jackknife of whole examples. Of runs "
    "that differ by seed only, the one shown is the best on validation data, or one that judged the same examples."
)


def page(
    groups: Sequence[Group], focus: Group, told: Sequence[str], facts: Sequence[Fact], sections: Sequence[Section],
    split: str,
) -> Page:  # fmt: skip
    """split: of the data that it was judged on; empty if there are no scores."""
    run = focus.shown
    count = sum(len(group.runs) for group in groups)
    runs = f"{count} runs" if count > 1 else "one run"
    title = f"{_goal(run)} across {_sites(run)}".strip()
    return Page(
        title=title[0].upper() + title[1:],
        subtitle=f"{runs}, {len(groups)} settings" if len(groups) not in (1, count) else runs,
        question=question(groups, focus, split),
        answer=told,
        facts=facts,
        sections=sections,
        method=METHOD,
    )


def question(groups: Sequence[Group], focus: Group, judged_on: str) -> str:
    """Risk, metric and sites in one sentence."""
    run = focus.shown
    positives, total = sum(m.positives for m in run.members), sum(m.positives + m.negatives for m in run.members)
    held = f", which hold {total:,} training examples, {positives:,} of them positive," if total else ""
    held = "" if run.several else held  # a row may be both positive and negative
    data = f" ({shown(run.settings['data.name'], 40)})" if "data.name" in run.settings else ""
    split = judged_on or run.split or "held-back"
    chosen = f"The best round is chosen by {metric_name(run.metric)} on validation data."
    if not any(row.get("validation") for row in run.rows):
        chosen = "Without validation data the last round is the result."
    verb, rest = ("bring", "down its risk") if run.metric == "risk" else ("rank", "positives above negatives")
    if len(groups) > 1:
        return (
            f"Which of these runs {verb}s {rest} best on {split} data{data}, if {_sites(run)}{held} train for "
            f"{_goal(run)} without pooling their data? {chosen}"
        )
    return (
        f"How well does this run {verb} {rest} on {split} data{data}, after {_sites(run)}{held} trained for "
        f"{_goal(run)} without pooling their data? {chosen}"
    )


def _goal(run: Run) -> str:
    risk = run.risk.removeprefix("several(")
    goal = RISKS.get(risk) or RISKS.get(risk.partition("(")[0]) or shown(run.risk, 60)
    if not run.several:
        return goal
    known = [*(found.names for found in run.by_label.values()), *run.label_curves.values()]
    return f"{goal} of {len(known[0]) if known else 'several'} labels"


def _sites(run: Run) -> str:
    count = len(run.members)
    return f"{count} sites" if count > 1 else "one site" if count else "sites"


def answer(
    groups: Sequence[Group],
    focus: Group,
    judged: Judgement | None,
    compared: Mapping[str, Mapping[str, Difference]],
    first: str,
    preferred: bool,
) -> list[str]:
    """What a reader takes home: the model in focus, how good and how sure, against the others, at which threshold.

    preferred: whether it was validation data that brought it into focus.
    """
    run, name = focus.shown, _called(groups, focus)
    if judged is None:
        value = run.values.get(first)
        if value is None:
            return [f"{name}: {run.state}; no metric of held-back data is known yet."]
        return [f"{name} reaches {metric_name(first)} {figure_of(value)} on {run.split} data; intervals need scores."]
    known = first if first in judged.pooled.metrics else "auroc"
    found = interval_text(judged.pooled.metrics[known])
    lead = "Validation data prefer {}. It" if preferred and len(groups) > 1 else "{}"
    lines = [f"{lead.format(name)} reaches {metric_name(known)} {found} on {judged.split} data."]
    lines += _against(groups, compared, known)
    if point := judged.pooled.points.get("specificity 0.9"):
        lines.append(
            f"With the threshold that gave specificity 0.9 on {judged.chosen_on} data it finds "
            f"{_percent(point.sensitivity)} of the positives and clears {_percent(point.specificity)} of the "
            f"negatives; of those it flags, {_percent(point.ppv)} are positive at this share of positives."
        )
    notes = list(judged.notes)
    if counts := run.counts.get(judged.split):
        judged_counts = binned_judge(metrics.resolve(judged.pooled.metrics), counts)
        bounds = {name: each.bound for name, each in judged_counts.items()}
        notes.append(_binned(f"{len(counts.positives):,} bins", "metrics", bounds, bool(counts.noise)))
    sites = {name: site.metrics[known] for name, site in judged.sites.items()}
    return lines + _ending(run, "it", sites, notes)


def answer_for_labels(groups: Sequence[Group], focus: Group, found: LabelJudgement, first: str) -> list[str]:
    """The same of several labels: the mean and how sure it is, the ends, what cannot be decided, sites."""
    run, metric = focus.shown, first if first in found.mean else "auroc"
    each = {label: one.pooled.metrics[metric].value for label, one in found.labels.items()}
    each = {label: value for label, value in each.items() if math.isfinite(value)}
    mean = f"a mean {metric_name(metric)} of {interval_text(found.mean[metric])}"
    lines = [f"{_called(groups, focus)} reaches {mean} over {len(each)} labels on {found.split} data."]
    if len(each) > 1:
        ends = (max(each, key=each.__getitem__), "highest"), (min(each, key=each.__getitem__), "lowest")
        told = [f"{word} for {shown(label, 40)} ({figure_of(each[label])})" for label, word in ends]
        lines.append(f"It is {listed(told)}.")
    if found.undecided:
        names = listed([shown(label, 40) for label in found.undecided])
        lines.append(f"Too few validation examples for a probability or a class: {names}.")
    notes, counts = list(found.notes), run.label_curves.get(found.split)
    if counts and found.split not in run.by_label:
        counted = judge_counts(metrics.resolve(list(found.mean)), counts)
        notes.append(_binned("bins", "means", counted.mean_bounds, bool(counted.noise)))
    return lines + _ending(run, "the mean AUROC", {name: site.mean for name, site in found.sites.items()}, notes)


def _ending(run: Run, what: str, sites: Mapping[str, Interval], notes: Sequence[str]) -> list[str]:
    """The worst site, privacy, and notes."""
    known = {site: found for site, found in sites.items() if math.isfinite(found.value)}
    lines = []
    if len(known) > 1:
        worst = min(known, key=lambda site: known[site].value)
        lines.append(f"By site {what} is lowest at {shown(worst, 40)}: {interval_text(known[worst])}.")
    if run.epsilon:
        lines.append(f"Training examples have differential privacy: epsilon {run.epsilon}.")
    return [*lines, *(f"Note: {note}." for note in notes)]


def _binned(bins: str, what: str, bounds: Mapping[str, float], noise: bool) -> str:
    """How far metrics may be from those of the scores, where sites disclosed counts in bins."""
    told = listed([f"{metric_name(name)} by {bound:.1g}" for name, bound in bounds.items()])
    added = ", besides the noise that they added" if noise else ""
    return f"sites disclosed counts in {bins}, not scores; {what} may be off, {told} at most{added}"


def _called(groups: Sequence[Group], focus: Group) -> str:
    return f"{focus.letter} ({shown(focus.label, 60)})" if len(groups) > 1 else shown(focus.label, 60)


def _against(groups: Sequence[Group], compared: Mapping[str, Mapping[str, Difference]], metric: str) -> list[str]:
    """Which runs it beats on the same examples, which beat it, and which it cannot be told from."""
    known = {letter: found[metric] for letter, found in compared.items() if metric in found}
    names = {group.letter: f"{group.letter} ({shown(group.label, 40)})" for group in groups}
    kinds: dict[str, list[str]] = {"it is ahead of": [], "it is behind": [], "it cannot be told from": []}
    for letter, found in known.items():
        kind = "it is ahead of" if found.high < 0 else "it is behind" if found.low > 0 else "it cannot be told from"
        kinds[kind].append(names[letter])
    told = "; ".join(f"{words} {listed(which)}" for words, which in kinds.items() if which)
    return [f"On the same examples, by 95 % intervals of paired differences: {told}."] if known else []


def _percent(found: Interval) -> str:
    if not math.isfinite(found.value):
        return "–"
    ends = f" [{100 * found.low:.0f}, {100 * found.high:.0f}]" if between(found.low, found.high) else ""
    return f"{100 * found.value:.0f} %{ends}"


def facts(judged: Judgement) -> list[Fact]:
    pooled = judged.pooled
    each = [_fact(metric_name(name), found) for name, found in pooled.metrics.items()]
    total = pooled.positives + pooled.negatives
    each.append(Fact(f"{judged.split} examples", f"{total:,}", f"{pooled.positives:,} positive"))
    if judged.sites:
        each.append(Fact("sites judged", str(len(judged.sites)), "one row each below"))
    return each


def facts_for_labels(found: LabelJudgement, run: Run) -> list[Fact]:
    each = [_fact(f"mean {metric_name(name)}", value) for name, value in found.mean.items()]
    decided = len(found.labels) - sum(name in found.undecided for name in found.labels)
    each.append(Fact("labels", str(len(found.labels)), f"{decided} with probabilities and classes"))
    whole = run.by_label.get(found.split)  # counts in bins do not say how many examples there are
    return [*each, *([Fact(f"{found.split} examples", f"{len(whole.scores):,}", "")] if whole is not None else [])]


def _fact(name: str, found: Interval) -> Fact:
    return Fact(name, figure_of(found.value), between(found.low, found.high))
