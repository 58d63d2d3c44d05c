"""The head of the page: the question, and the answer in a few sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedxl import metrics
from fedxl.evaluation.binned import judge as binned_judge
from fedxl.evaluation.compare import Difference
from fedxl.evaluation.intervals import Interval
from fedxl.evaluation.judgement import Judgement
from fedxl.reporting.groups import Group
from fedxl.reporting.page import Fact, Page, Section, between, figure_of, listed, metric_name, shown
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
    if run.several:
        known = [*(found.names for found in run.by_label.values()), *run.label_curves.values()]
        labels = len(known[0]) if known else 0
        return f"{_one_goal(run)} of {labels or 'several'} labels"
    return _one_goal(run)


def _one_goal(run: Run) -> str:
    risk = run.risk.removeprefix("several(")
    return RISKS.get(risk) or RISKS.get(risk.partition("(")[0]) or shown(run.risk, 60)


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
    run, name = focus.shown, called(groups, focus)
    if judged is None:
        value = run.values.get(first)
        if value is None:
            return [f"{name}: {run.state}; no metric of held-back data is known yet."]
        return [f"{name} reaches {metric_name(first)} {figure_of(value)} on {run.split} data; intervals need scores."]
    found = judged.pooled.metrics.get(first) or judged.pooled.metrics["auroc"]
    known = first if first in judged.pooled.metrics else "auroc"
    lead = "Validation data prefer {}. It" if preferred and len(groups) > 1 else "{}"
    lines = [f"{lead.format(name)} reaches {metric_name(known)} {_interval(found)} on {judged.split} data."]
    lines += _against(groups, compared, known)
    if point := judged.pooled.points.get("specificity 0.9"):
        lines.append(
            f"With the threshold that gave specificity 0.9 on {judged.chosen_on} data it finds "
            f"{_percent(point.sensitivity)} of the positives and clears {_percent(point.specificity)} of the "
            f"negatives; of those it flags, {_percent(point.ppv)} are positive at this share of positives."
        )
    known_sites = {n: s.metrics[known] for n, s in judged.sites.items() if math.isfinite(s.metrics[known].value)}
    if len(known_sites) > 1:
        worst = min(known_sites, key=lambda site: known_sites[site].value)
        lines.append(f"By site it is lowest at {shown(worst, 40)}: {_interval(known_sites[worst])}.")
    if run.epsilon:
        lines.append(f"Training examples have differential privacy: epsilon {run.epsilon}.")
    return [*lines, *(f"Note: {note}." for note in (*judged.notes, *_binned(run, judged)))]


def called(groups: Sequence[Group], focus: Group) -> str:
    return f"{focus.letter} ({shown(focus.label, 60)})" if len(groups) > 1 else shown(focus.label, 60)


def _binned(run: Run, judged: Judgement) -> list[str]:
    """How far metrics may be from those of the scores, where sites disclosed counts in bins."""
    found = run.counts.get(judged.split)
    if found is None:
        return []
    bounds = binned_judge(metrics.resolve(judged.pooled.metrics), found)
    told = listed([f"{metric_name(name)} by {each.bound:.1g}" for name, each in bounds.items()])
    noise = ", besides the noise that they added" if found.noise else ""
    bins = f"{len(found.positives):,} bins"
    return [f"sites disclosed counts in {bins}, not scores; metrics may be off, {told} at most{noise}"]


def _against(groups: Sequence[Group], compared: Mapping[str, Mapping[str, Difference]], metric: str) -> list[str]:
    """Which runs it beats on the same examples, which beat it, and which it cannot be told from."""
    known = {letter: found[metric] for letter, found in compared.items() if metric in found}
    names = {group.letter: f"{group.letter} ({shown(group.label, 40)})" for group in groups}
    ahead = [names[letter] for letter, found in known.items() if found.high < 0]
    behind = [names[letter] for letter, found in known.items() if found.low > 0]
    level = [names[letter] for letter, found in known.items() if not _apart(found)]
    kinds = {"it is ahead of": ahead, "it is behind": behind, "it cannot be told from": level}
    told = "; ".join(f"{words} {listed(which)}" for words, which in kinds.items() if which)
    return [f"On the same examples, by 95 % intervals of paired differences: {told}."] if known else []


def _apart(found: Difference) -> bool:
    return found.high < 0 or found.low > 0


def _interval(found: Interval) -> str:
    return f"{figure_of(found.value)} {between(found.low, found.high)}".strip()


def _percent(found: Interval) -> str:
    if not math.isfinite(found.value):
        return "–"
    ends = f" [{100 * found.low:.0f}, {100 * found.high:.0f}]" if between(found.low, found.high) else ""
    return f"{100 * found.value:.0f} %{ends}"


def facts(judged: Judgement) -> list[Fact]:
    pooled = judged.pooled
    each = [
        Fact(metric_name(name), figure_of(found.value), between(found.low, found.high))
        for name, found in pooled.metrics.items()
    ]
    total = pooled.positives + pooled.negatives
    each.append(Fact(f"{judged.split} examples", f"{total:,}", f"{pooled.positives:,} positive"))
    if judged.sites:
        each.append(Fact("sites judged", str(len(judged.sites)), "one row each below"))
    return each
