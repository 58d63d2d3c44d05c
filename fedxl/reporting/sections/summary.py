"""The head of the page: the question, and the answer in a few sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedxl import metrics
from fedxl.evaluation import histogram
from fedxl.evaluation.assess import Assessment
from fedxl.evaluation.intervals import Interval
from fedxl.reporting.page import Fact, Page, Section, between, figure_of, interval_text, listed, metric_name, shown
from fedxl.reporting.runs import Group, epsilon
from fedxl.reporting.sections.survival import middle
from fedxl.reporting.study import Study
from fedxl.risks import RISKS as BUILT
from fedxl.training.run_folder import Run

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
    "cox": "survival (Cox's partial likelihood)",
    "concordance": "the order of times to event (concordance)",
}
METHOD = (
    "Intervals of AUROC and partial AUC are DeLong's in Wilson's form; of average precision by test inversion; of "
    "other metrics by a stratified BCa bootstrap; of differences a jackknife's with Student's t, or both intervals "
    "joined; of shares Wilson's; of means over several labels Wilson's with the variance of a jackknife. Those of "
    "metrics of time to event are an infinitesimal jackknife's in Wilson's form, and those of Kaplan-Meier curves "
    "Greenwood's on the log-log scale. Of runs "
    "that differ by seed only, metrics are means, and Student's interval has the variance of seeds and of examples; "
    "pictures, thresholds and sites are of the run that is the best on validation data, or of one that was measured "
    "on the same examples."
)


def page(it: Study, sections: Sequence[Section], preferred: bool) -> Page:
    """preferred: whether it was validation data that brought the model into focus."""
    count = sum(len(group.runs) for group in it.groups)
    runs = f"{count} runs" if count > 1 else "one run"
    title = f"{_goal(it.focus.shown)} across {_sites(it.focus.shown)}".strip()
    return Page(
        title=title[0].upper() + title[1:],
        subtitle=f"{runs}, {len(it.groups)} settings" if len(it.groups) not in (1, count) else runs,
        question=_question(it),
        answer=_answer(it, preferred),
        facts=_facts(it, it.found) if it.found else [],
        sections=sections,
        method=METHOD,
    )


def _question(it: Study) -> str:
    """Risk, metric and sites in one sentence."""
    run = it.focus.shown
    positives, total = sum(m.positives for m in run.members), sum(m.positives + m.negatives for m in run.members)
    kind = "with an event" if it.timed else "positive"
    held = f", which hold {total:,} training examples, {positives:,} of them {kind}," if total else ""
    held = "" if run.labels else held  # a row may be both positive and negative
    data = f" ({shown(run.settings['data.name'], 40)})" if "data.name" in run.settings else ""
    split = (it.found.split if it.found else run.split) or "held-back"
    chosen = f"The best round is chosen by {metric_name(run.metric)} on validation data."
    if not any(row.get("validation") for row in run.rows):
        chosen = "Without validation data the last round is the result."
    order = "earlier events above later ones" if it.timed else "positives above negatives"
    verb, rest = ("bring", "down its risk") if run.metric == "risk" else ("rank", order)
    sites, goal = _sites(run) + held, f"{_goal(run)} without pooling their data? {chosen}"
    if len(it.groups) > 1:
        return f"Which of these runs {verb}s {rest} best on {split} data{data}, if {sites} train for {goal}"
    return f"How well does this run {verb} {rest} on {split} data{data}, after {sites} trained for {goal}"


def _goal(run: Run) -> str:
    risk = run.risk.removeprefix("several(").partition("(")[0]
    name = next((name for name, built in BUILT.items() if getattr(built, "__name__", "") == risk), risk)
    goal = RISKS.get(name) or shown(run.risk, 60)
    return f"{goal} of {len(run.labels)} labels" if run.labels else goal


def _sites(run: Run) -> str:
    count = len(run.members)
    return f"{count} sites" if count > 1 else "one site" if count else "sites"


def _answer(it: Study, preferred: bool) -> list[str]:
    """What a reader takes home: the model in focus, how good and how sure, against the others, at which threshold."""
    focus, found, first = it.focus, it.found, it.names[0]
    run = focus.shown
    name = focus.title if len(it.groups) > 1 else shown(focus.label, 60)
    rest = f", which rest on {run.sites_heard}" if run.sites_heard else ""
    if found is None:
        if (value := run.values.get(first)) is None:
            return [f"{name}: {run.state}; no metric of held-back data is known yet."]
        reached = f"{name} reaches {metric_name(first)} {figure_of(value)} on {run.split} data{rest}"
        return [f"{reached}; intervals need scores."]
    metric = first if first in focus.measured else next(iter(focus.measured))
    lead = f"Validation data prefer {name}. It" if preferred and len(it.groups) > 1 else name
    each = {label: part.metrics[metric].value for label, part in found.pooled.labels.items()}
    each = {label: value for label, value in each.items() if math.isfinite(value)}
    over = [f"{len(focus.runs)} seeds"] if len(focus.runs) > 1 else []
    over += [f"{len(each)} labels"] if found.several else []
    measured = interval_text(focus.measured[metric])
    reached = f"{metric_name(metric)} {measured}"
    if over:
        reached = f"a mean {metric_name(metric)} of {measured} over {' and '.join(over)}"
    lines = [f"{lead} reaches {reached} on {found.split} data{rest}.", *_against(it, metric)]
    lines += _of_labels(found, each) if found.several else _at_horizon(found) or _at_threshold(focus, found)
    of_sites = "cindex" if found.timed else "auroc" if found.several else metric
    sites = {site: parts.mean[of_sites] for site, parts in found.sites.items()}
    known = {site: value for site, value in sites.items() if math.isfinite(value.value)}
    if len(known) > 1:
        worst = min(known, key=lambda site: known[site].value)
        what = "the mean AUROC" if found.several else "it" if of_sites == metric else f"the {metric_name(of_sites)}"
        lines.append(f"By site {what} is lowest at {shown(worst, 40)}: {interval_text(known[worst])}.")
    if told := epsilon(run):
        lines.append(f"Training examples have differential privacy: epsilon {told}.")
    return lines + [f"Note: {note}." for note in (*found.notes, *_binned(run, found))]


def _at_threshold(focus: Group, found: Assessment) -> list[str]:
    point = found.pooled.one.points.get("specificity 0.9")
    if point is None:
        return []
    of = f" (seed {shown(focus.shown.seed, 20)})" if len(focus.runs) > 1 else ""
    return [
        f"With the threshold that gave specificity 0.9 on {found.chosen_on} data it{of} finds "
        f"{_percent(point.sensitivity)} of the positives and clears {_percent(point.specificity)} of the "
        f"negatives; of those it flags, {_percent(point.ppv)} are positive at this share of positives."
    ]


def _at_horizon(found: Assessment) -> list[str]:
    """The share without an event up to the middle horizon, of the lowest risk and of the highest."""
    part = found.survival
    if part is None or not part.survival.horizons:
        return []
    horizon = middle(part.survival.horizons)
    ends = [curve for curve in (part.curves[0], part.curves[-1]) if curve is not None]
    shares = [[float(each) for each in curve.at(horizon)] for curve in ends]
    if len(shares) < 2:
        return []
    low, high = (_percent(Interval(value, low, high, found.level, "")) for value, low, high in shares)
    return [
        f"Of the examples whose risk is in the lowest third of the {found.chosen_on} data, {low} have no event up to "
        f"{horizon:g}; of those in the highest third {high}."
    ]


def _of_labels(found: Assessment, each: Mapping[str, float]) -> list[str]:
    """The best and the worst label, and those without a decision. each: the metric of labels that have it."""
    lines = []
    if len(each) > 1:
        ends = (max(each, key=each.__getitem__), "highest"), (min(each, key=each.__getitem__), "lowest")
        told = [f"{word} for {shown(label, 40)} ({figure_of(each[label])})" for label, word in ends]
        lines.append(f"It is {listed(told)}.")
    if found.undecided:
        names = listed([shown(label, 40) for label in found.undecided])
        lines.append(f"Too few validation examples for a probability or a class: {names}.")
    return lines


def _binned(run: Run, found: Assessment) -> list[str]:
    """How far metrics may be from those of the scores, where sites disclosed counts in bins."""
    counts = run.histograms.get(found.split)
    if counts is None:
        return []
    measured = histogram.measure(metrics.resolve(list(found.pooled.mean)), counts, noise=False)
    some = next(iter(next(iter(counts.values())).values()))
    told = listed([f"{metric_name(name)} by {bound:.1g}" for name, bound in measured.mean_bounds.items()])
    added = ", besides the noise that they added" if some.noise else ""
    what = "means" if found.several else "metrics"
    bins = f"{len(some.positives):,} bins"
    return [f"sites disclosed counts in {bins}, not scores; {what} may be off, {told} at most{added}"]


def _against(it: Study, metric: str) -> list[str]:
    """Which runs it beats on the same examples, which beat it, and which it cannot be told from."""
    kinds: dict[str, list[str]] = {"it is ahead of": [], "it is behind": [], "it cannot be told from": []}
    for group in it.groups:
        if (found := group.compared.get(metric)) is not None:
            ahead, behind = found.high < 0, found.low > 0
            kind = "it is ahead of" if ahead else "it is behind" if behind else "it cannot be told from"
            kinds[kind].append(f"{group.letter} ({shown(group.label, 40)})")
    told = "; ".join(f"{words} {listed(which)}" for words, which in kinds.items() if which)
    return [f"On the same examples, by 95 % intervals of paired differences: {told}."] if told else []


def _percent(found: Interval) -> str:
    if not math.isfinite(found.value):
        return "–"
    ends = f" [{100 * found.low:.0f}, {100 * found.high:.0f}]" if between(found) else ""
    return f"{100 * found.value:.0f} %{ends}"


def _facts(it: Study, found: Assessment) -> list[Fact]:
    mean, values = "mean " if found.several else "", it.focus.measured
    each = [Fact(f"{mean}{metric_name(n)}", figure_of(i.value), between(i)) for n, i in values.items()]
    labels = found.pooled.labels
    if found.several:
        decided = sum(name not in found.undecided for name in labels)
        each.append(Fact("labels", str(len(labels)), f"{decided} with probabilities and classes"))
        if found.split in it.focus.shown.scores:  # counts in bins do not say how many examples there are
            each.append(Fact(f"{found.split} examples", f"{found.pooled.examples:,}", ""))
        return each
    one = found.pooled.one
    kind = "with an event" if found.timed else "positive"
    each.append(Fact(f"{found.split} examples", f"{one.positives + one.negatives:,}", f"{one.positives:,} {kind}"))
    if found.sites:
        measured = sum(any(math.isfinite(i.value) for i in site.mean.values()) for site in found.sites.values())
        of = f" of {len(found.sites)}" if measured < len(found.sites) else ""
        each.append(Fact("sites measured", f"{measured}{of}", "one row each below"))
    return each
