"""The head of the page: the question, and the answer in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence

from fedxl.evaluation.intervals import Interval
from fedxl.evaluation.judgement import Judgement
from fedxl.reporting.groups import Group
from fedxl.reporting.page import Fact, Page, Section, between, figure_of, metric_name, shown
from fedxl.reporting.runs import Run

RISKS = {
    "auroc": "AUROC",
    "pauc": "one-way partial AUC",
    "tpauc": "two-way partial AUC",
    "ap": "average precision",
    "p_norm_push": "a ranking whose top is pushed up",
    "contrastive": "a contrastive loss",
}
METHOD = (
    "Intervals of AUROC are DeLong's, of other metrics a stratified BCa bootstrap, of shares Wilson's. Where runs of several "
    "seeds stand together, the one shown is that with the best validation metric; others are shown by a run on the same data."
)


def page(
    groups: Sequence[Group], focus: Group, judged: Judgement | None, sections: Sequence[Section], first: str, preferred: bool
) -> Page:
    run = focus.shown
    count = sum(len(group.runs) for group in groups)
    runs = f"{count} runs" if count > 1 else "one run"
    title = f"{_goal(run)} across {_sites(run)}".strip()
    return Page(
        title=title[0].upper() + title[1:],
        subtitle=f"{runs}, {len(groups)} settings" if len(groups) not in (1, count) else runs,
        question=question(groups, focus, judged),
        answer=answer(groups, focus, judged, first, preferred and len(groups) > 1),
        facts=_facts(judged, first) if judged else (),
        sections=sections,
        method=METHOD,
    )


def question(groups: Sequence[Group], focus: Group, judged: Judgement | None) -> str:
    """Risk, metric and sites in one sentence."""
    run = focus.shown
    positives, total = sum(m.positives for m in run.members), sum(m.positives + m.negatives for m in run.members)
    held = f", which hold {total:,} training examples, {positives:,} of them positive," if total else ""
    which = "Which of these runs ranks" if len(groups) > 1 else "How well does this run rank"
    data = f" ({shown(run.settings['data.name'], 40)})" if "data.name" in run.settings else ""
    split = judged.split if judged else run.split or "held-back"
    return (
        f"{which} positives above negatives best on {split} data{data}, if {_sites(run)}{held} train for {_goal(run)} "
        f"without pooling their data? The best round is chosen by {metric_name(run.metric)} on validation data."
        if len(groups) > 1
        else f"{which} positives above negatives on {split} data{data}, after {_sites(run)}{held} trained for {_goal(run)}? "
        f"The best round is chosen by {metric_name(run.metric)} on validation data."
    )


def _goal(run: Run) -> str:
    name = str(run.settings.get("risk.name") or run.settings.get("task.risk_name") or "an X-risk")
    return RISKS.get(name) or RISKS.get(name.partition("(")[0]) or shown(name, 60)


def _sites(run: Run) -> str:
    count = len(run.members)
    return f"{count} sites" if count > 1 else "one site" if count else "sites"


def answer(
    groups: Sequence[Group], focus: Group, judged: Judgement | None, first: str, preferred: bool
) -> list[str]:
    """What a reader takes home: the model in focus, how good and how sure, at which operating point.

    preferred: whether it was validation data that brought it into focus.
    """
    run = focus.shown
    name = f"{focus.letter} ({shown(focus.label, 60)})" if len(groups) > 1 else shown(focus.label, 60)
    if judged is None:
        value = run.values.get(first)
        if value is None:
            return [f"{name}: {run.state}; no metric of held-back data is known yet."]
        return [f"{name} reaches {metric_name(first)} {figure_of(value)} on {run.split} data; intervals need scores."]
    found = judged.pooled.metrics.get(first) or judged.pooled.metrics["auroc"]
    known = first if first in judged.pooled.metrics else "auroc"
    lead = "Validation data prefer {}. It" if preferred else "{}"
    lines = [f"{lead.format(name)} reaches {metric_name(known)} {_interval(found)} on {judged.split} data."]
    if point := judged.pooled.points.get("specificity 0.9"):
        lines.append(
            f"With the threshold that gave specificity 0.9 on {judged.chosen_on} data it finds {_percent(point.sensitivity)} of "
            f"the positives and clears {_percent(point.specificity)} of the negatives; of those it flags, "
            f"{_percent(point.ppv)} are positive at this share of positives."
        )
    known_sites = {n: s.metrics[known] for n, s in judged.sites.items() if figure_of(s.metrics[known].value) != "–"}
    if len(known_sites) > 1:
        worst = min(known_sites, key=lambda site: known_sites[site].value)
        lines.append(f"By site it is lowest at {shown(worst, 40)}: {_interval(known_sites[worst])}.")
    return [*lines, *(f"Note: {note}." for note in judged.notes)]


def _interval(found: Interval) -> str:
    return f"{figure_of(found.value)} {between(found.low, found.high)}".strip()


def _percent(found: Interval) -> str:
    if figure_of(found.value) == "–":
        return "–"
    ends = f" [{100 * found.low:.0f}, {100 * found.high:.0f}]" if between(found.low, found.high) else ""
    return f"{100 * found.value:.0f} %{ends}"


def _facts(judged: Judgement, first: str) -> list[Fact]:
    pooled = judged.pooled
    names = list(dict.fromkeys([first, *pooled.metrics]))
    facts = [
        Fact(metric_name(name), figure_of(pooled.metrics[name].value), between(*pooled.metrics[name][1:3]))
        for name in names
        if name in pooled.metrics
    ]
    total = pooled.positives + pooled.negatives
    facts.append(Fact(f"{judged.split} examples", f"{total:,}", f"{pooled.positives:,} positive"))
    if judged.sites:
        facts.append(Fact("sites judged", str(len(judged.sites)), "one row each below"))
    return facts
