"""README.md of an exported folder: the model card, for people who did not train the model."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedxl.config.experiment import SECTIONS, Config, dump
from fedxl.errors import printable
from fedxl.evaluation.intervals import Interval
from fedxl.evaluation.judgement import Judged, Judgement
from fedxl.evaluation.label_judgement import LabelJudgement
from fedxl.training.privacy import promise

MOST_TITLE = 200  # characters of labels' names
COUNTS = "counts in bins"  # what chose the threshold, if sites disclosed no scores
NOT_FOR = (
    "Decisions about people without a person who is responsible for them, and who knows what is below.",
    "Sites, devices or groups of people that are not among those below, before it has been measured there.",
    "Data that were prepared in another way than `model.json` says, or whose columns mean something else by now.",
    "Reading its scores as probabilities. They rank; only the calibrated column is a probability, and only where the "
    "share of positives is that of the validation data.",
)

FROM_COUNTS = (
    "Sites told how many validation scores lie in each bin, not the scores: all of this holds to the width of a bin, "
    "and where sites added noise, intervals do not contain it."
)


def card(about: Mapping[str, Any], judgement: Judgement | LabelJudgement | None) -> str:
    """about: what model.json says."""
    parts = [
        f"# {_title(about)}",
        _summary(about),
        _use(about),
        "## What it is not for",
        "\n".join(f"- {line}" for line in NOT_FOR),
        "## Data",
        _sites(about["training"].get("members", []), bool(about.get("label_names"))),
        "## How good it is",
        *_judged(judgement),
        "## What its scores mean",
        *_decision(about, judgement),
        "## Training",
        *_training(about),
        "## Files",
        _files(about),
    ]
    return "\n\n".join(parts) + "\n"


def _title(about: Mapping[str, Any]) -> str:
    labels = about.get("labels") or {}
    if about.get("label_names"):
        return f"Model card: {text(', '.join(about['label_names'])[:MOST_TITLE])}"
    if not labels.get("1"):
        return "Model card"
    column = f"{text(labels['column'])} = " if labels.get("column") else ""  # images by class have no column
    return f"Model card: {column}{text(labels['1'])}"


def _summary(about: Mapping[str, Any]) -> str:
    training = about["training"]
    settings, members = training["settings"], training.get("members", [])
    rows = sum(member["positives"] + member["negatives"] for member in members)
    risk = settings.get("risk.name") or settings.get("task.risk_name") or "an X-risk"
    network = (about.get("model") or {}).get("name", "a network of the user's own")
    several = len(about.get("label_names") or ())
    kind = f"A classifier with a score for each of {several} labels" if several else "A binary classifier"
    on = "rows" if several else f"{rows:,} rows"  # of several labels, a row may be both positive and negative
    return (
        f"{kind}, {text(network)} for examples of shape {list(about['shape'])}, trained on {on} "
        f"of {len(members)} sites that did not pool them. It was trained to rank positives above negatives "
        f"({text(risk)}, by {text(settings.get('algorithm.name', 'fedxl'))})."
    )


def _use(about: Mapping[str, Any]) -> str:
    lines = ["```bash", "fedxl predict . new.csv -o scores.csv", "```"]
    prepared = about.get("preparation")
    if prepared is None:
        lines[1] = "fedxl predict . new.npz -o scores.csv"
        lines += [
            "",
            f"`new.npz` holds `x`, an array [n, {', '.join(map(str, about['shape']))}], prepared as in training.",
        ]
    else:
        lines += ["", "Files are prepared as the training data were; `model.json` says how, under `preparation`."]
    if about.get("onnx"):
        lines.append(
            "`model.onnx` takes prepared examples, in single precision, as `x` and gives raw scores as `score`; the "
            "preparation and the meaning of scores are in `model.json`. Its scores and torch's differ by at most "
            f"{about['onnx']['largest_error']:.1e} on {about['onnx']['examples']} examples (relative above 1)."
        )
    return "\n".join(lines)


def _sites(members: Sequence[Mapping[str, Any]], several: bool) -> str:
    if several:
        counts = [[text(each["name"]), f"{each['positives']:,}", f"{each['negatives']:,}"] for each in members]
        return table(["site", "training rows with a positive label", "with a negative one"], counts)
    rows = [
        [text(member["name"]), f"{member['positives'] + member['negatives']:,}", f"{member['positives']:,}"]
        for member in members
    ]
    return table(["site", "training rows", "positives"], rows) if rows else "Who held the data is not recorded."


def _judged(judgement: Judgement | LabelJudgement | None) -> list[str]:
    if judgement is None:
        return ["The run kept no scores of held-back data. `fedxl report` has what its sites disclosed, if they did."]
    return label_metrics(judgement) if isinstance(judgement, LabelJudgement) else _metrics(judgement)


def _metrics(judgement: Judgement) -> list[str]:
    parts = {"all together": judgement.pooled} | {text(name): judged for name, judged in judgement.sites.items()}
    names = list(judgement.pooled.metrics)
    rows = [
        [name, f"{judged.positives + judged.negatives:,}", f"{judged.positives:,}"]
        + [interval(judged.metrics[metric]._asdict()) for metric in names]
        for name, judged in parts.items()
    ]
    said = [
        f"Measured on {judgement.split} data, with intervals of {judgement.level:.0%}. The intervals are of the "
        "examples, not of another training.",
        table(["data of", "rows", "positives", *names], rows),
        *(f"Note: {text(note)}." for note in judgement.notes),
    ]
    if judgement.pooled.brier is not None and judgement.pooled.reliability is not None:
        error = judgement.pooled.reliability.error
        said.append(
            f"Calibrated probabilities: Brier score {judgement.pooled.brier:.4f}, calibration error {error:.4f}."
        )
    return said


def _decision(about: Mapping[str, Any], judgement: Judgement | LabelJudgement | None) -> list[str]:
    decision = about.get("decision")
    if decision is None:
        return [f"Nothing but an order: no calibration and no threshold, because {text(about['undecided'])}."]
    from_counts = [FROM_COUNTS] if about.get("decided_by") == COUNTS else []
    if about.get("label_names"):
        assert not isinstance(judgement, Judgement)
        return [*label_decisions(decision["labels"], judgement), *from_counts]
    assert not isinstance(judgement, LabelJudgement)
    return [*_one_decision(decision, judgement), *from_counts]


def _one_decision(decision: Mapping[str, Any], judgement: Judgement | None) -> list[str]:
    measured = decision["measured"]
    share = measured["positives"] / measured["examples"]
    columns = ["on validation data, which chose it"]
    rows = [[name, interval(measured[name])] for name in ("sensitivity", "specificity", "ppv", "npv")]
    point = None if judgement is None else judgement.pooled.points.get(decision["rule"])
    if judgement is not None and judgement.split == "test" and point is not None:
        columns.append("on test data")
        rows = [[name, value, interval(getattr(point, name)._asdict())] for name, value in rows]
    return [
        f"Probabilities: {KINDS[decision['calibration']['kind']]}, fitted to {measured['examples']:,} validation "
        f"scores, of which {share:.1%} are positive.",
        f"Class 1 from a raw score of {decision['threshold']:.6g} on: the threshold that reaches "
        f"{text(decision['rule'])} on the validation data.",
        table(["", *columns], rows),
    ]


def _training(about: Mapping[str, Any]) -> list[str]:
    training = about["training"]
    settings = training["settings"]
    chosen = f", round {training['best_round']} chosen on validation data" if training.get("best_round") else ""
    begun = text(training.get("begun", "at a time that is not recorded"))
    parts = [f"Begun {begun}{chosen}. fedxl {about['fedxl']}, torch {about['torch']}."]
    if told := promise(training.get("privacy")):
        simulated = "" if "server.sites" in settings else " In this simulation the noise follows from `run.seed`."
        parts.append(
            f"Training examples have differential privacy: epsilon {text(told)} after all rounds, for one example, "
            f"against whoever does not know the noise.{simulated}"
        )
    config = reproduced(settings)
    if "server.sites" in settings:
        return [*parts, "It was trained across real sites; the server's file had:", _code(config, "toml")]
    if config:
        return [
            *parts,
            "To reproduce it, `fedxl train config.toml`, with the data where `[data]` says:",
            _code(config, "toml"),
        ]
    lines = "\n".join(f"{key} = {value!r}" for key, value in settings.items())
    return [*parts, "It was trained from Python, with these settings:", _code(lines)]


def reproduced(settings: Mapping[str, Any]) -> str:
    """The run's config as TOML; empty if it was not trained from one."""
    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if section in tables and value is not None:
            tables[section][name] = value
    return dump(Config(**tables)) if all("name" in tables[section] for section in ("risk", "algorithm")) else ""


def _code(content: str, language: str = "") -> str:
    """A block that its content cannot end."""
    fence = "```"
    while fence in content:
        fence += "`"
    return f"{fence}{language}\n{content.strip()}\n{fence}"


def _files(about: Mapping[str, Any]) -> str:
    rows = [
        ["`model.safetensors`", "the weights"],
        ["`model.json`", "all that is needed to use them, and digests of the files"],
    ]
    rows += [["`model.onnx`", "the network for ONNX Runtime and other programs"]] if about.get("onnx") else []
    return table(["file", ""], rows)


KINDS = {"platt": "Platt scaling (a logistic curve)", "isotonic": "isotonic regression"}
SHARES = ("sensitivity", "specificity")


def label_metrics(found: LabelJudgement) -> list[str]:
    """A row for each label and one for their mean; and one for each site."""
    rows = [
        [text(name), *_counts(judged.pooled), *_intervals(judged.pooled.metrics[metric] for metric in found.mean)]
        for name, judged in found.labels.items()
    ]
    rows.append(["mean of the labels", "", "", *_intervals(found.mean.values())])
    said = [
        f"Measured on {found.split} data, with intervals of {found.level:.0%}; that of the mean is of a jackknife of "
        "whole examples. The intervals are of the examples, not of another training.",
        table(["label", "rows", "positives", *found.mean], rows),
    ]
    if found.sites:
        sites = [
            [text(name), f"{site.examples:,}", interval(site.mean._asdict())] for name, site in found.sites.items()
        ]
        said.append(table(["data of", "rows", "auroc, mean of the labels"], sites))
    return [*said, *(f"Note: {text(note)}." for note in found.notes)]


def label_decisions(labels: Mapping[str, Any], found: LabelJudgement | None) -> list[str]:
    """labels: the decision of each, as model.json has it."""
    decided = {name: told for name, told in labels.items() if "undecided" not in told}
    first = next(iter(decided.values()))
    tested = found is not None and found.split == "test"
    columns = [f"{share} on {on} data" for on in ("validation", *(["test"] if tested else [])) for share in SHARES]
    rows = [_row(name, told, found if tested else None) for name, told in decided.items()]
    said = [
        f"Probabilities: {KINDS[first['calibration']['kind']]} for each label, fitted to its validation scores. A "
        "probability holds where positives of its label are as frequent as there.",
        f"Class 1 of a label from its threshold of the raw score on, which reaches {text(first['rule'])} on the "
        "validation data.",
        table(["label", "validation rows", "positives", "threshold", *columns], rows),
    ]
    missing = {name: told["undecided"] for name, told in labels.items() if "undecided" in told}
    return [*said, *(f"No probability and no class for {text(name)}: {text(why)}." for name, why in missing.items())]


def _row(name: str, decision: Mapping[str, Any], tested: LabelJudgement | None) -> list[str]:
    measured = decision["measured"]
    cells = [text(name), f"{measured['examples']:,}", f"{measured['positives']:,}", f"{decision['threshold']:.6g}"]
    cells += [interval(measured[share]) for share in SHARES]
    if tested is None:
        return cells
    points = tested.labels[name].pooled.points if name in tested.labels else {}
    point = points.get(decision["rule"])
    return cells + [interval({} if point is None else getattr(point, share)._asdict()) for share in SHARES]


def _counts(found: Judged) -> list[str]:
    return [f"{found.positives + found.negatives:,}", f"{found.positives:,}"]


def _intervals(found: Iterable[Interval]) -> list[str]:
    return [interval(each._asdict()) for each in found]


def text(value: Any) -> str:
    """Text of another party inside Markdown: a single line, without anything that Markdown or HTML would act on.

    >>> text("<b>|x|</b> [a](b)")
    '&lt;b&gt;\\\\|x\\\\|&lt;/b&gt; \\\\[a\\\\](b)'
    """
    return re.sub(r"([\\`*_{}\[\]|#~])", r"\\\1", html.escape(printable(value), quote=False))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown whose cells are escaped already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def interval(found: Mapping[str, Any]) -> str:
    """A metric with its interval, as far as both are known."""
    value, low, high = (found.get(name) for name in ("value", "low", "high"))
    if value is None or math.isnan(value):
        return "not defined"
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return f"{value:.3f}"
    return f"{value:.3f} ({low:.3f} to {high:.3f})"
