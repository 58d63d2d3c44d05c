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
from fedxl.evaluation.judgement import Judged, Judgement, LabelJudgement
from fedxl.training.privacy import promise

MOST_TITLE = 200  # characters of labels' names
COUNTS = "counts in bins"  # what chose the threshold, if sites disclosed no scores
KINDS = {"platt": "Platt scaling (a logistic curve)", "isotonic": "isotonic regression"}
SHARES = ("sensitivity", "specificity")
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
    file, how = "new.csv", "Files are prepared as the training data were; `model.json` says how, under `preparation`."
    if about.get("preparation") is None:
        shape = ", ".join(map(str, about["shape"]))
        file, how = "new.npz", f"`new.npz` holds `x`, an array [n, {shape}], prepared as in training."
    lines = ["```bash", f"fedxl predict . {file} -o scores.csv", "```", "", how]
    if about.get("onnx"):
        lines.append(
            "`model.onnx` takes prepared examples, in single precision, as `x` and gives raw scores as `score`; the "
            "preparation and the meaning of scores are in `model.json`. Its scores and torch's differ by at most "
            f"{about['onnx']['largest_error']:.1e} on {about['onnx']['examples']} examples (relative above 1)."
        )
    return "\n".join(lines)


def _sites(members: Sequence[Mapping[str, Any]], several: bool) -> str:
    counts = [(text(each["name"]), each["positives"], each["negatives"]) for each in members]
    if several:
        rows = [[name, f"{positives:,}", f"{negatives:,}"] for name, positives, negatives in counts]
        return table(["site", "training rows with a positive label", "with a negative one"], rows)
    rows = [[name, f"{positives + negatives:,}", f"{positives:,}"] for name, positives, negatives in counts]
    return table(["site", "training rows", "positives"], rows) if rows else "Who held the data is not recorded."


def _judged(found: Judgement | LabelJudgement | None) -> list[str]:
    """Metrics by site, or by label with their means and by site; and notes."""
    if found is None:
        return ["The run kept no scores of held-back data. `fedxl report` has what its sites disclosed, if they did."]
    several = isinstance(found, LabelJudgement)
    of_mean = "; that of the mean is of a jackknife of whole examples" if several else ""
    said = [
        f"Measured on {found.split} data, with intervals of {found.level:.0%}{of_mean}. The intervals are of the "
        "examples, not of another training."
    ]
    notes = [f"Note: {text(note)}." for note in found.notes]
    if isinstance(found, LabelJudgement):
        rows = _rows({name: judged.pooled for name, judged in found.labels.items()}, found.mean)
        rows.append(["mean of the labels", "", "", *map(interval, found.mean.values())])
        said.append(table(["label", "rows", "positives", *found.mean], rows))
        if found.sites:
            sites = [[text(name), f"{site.examples:,}", interval(site.mean)] for name, site in found.sites.items()]
            said.append(table(["data of", "rows", "auroc, mean of the labels"], sites))
        return said + notes
    names = list(found.pooled.metrics)
    rows = _rows({"all together": found.pooled, **found.sites}, names)
    said += [table(["data of", "rows", "positives", *names], rows), *notes]
    if found.pooled.brier is not None and found.pooled.reliability is not None:
        error = found.pooled.reliability.error
        said.append(f"Calibrated probabilities: Brier score {found.pooled.brier:.4f}, calibration error {error:.4f}.")
    return said


def _rows(parts: Mapping[str, Judged], metrics: Iterable[str]) -> list[list[str]]:
    names = list(metrics)
    return [
        [text(name), f"{one.positives + one.negatives:,}", f"{one.positives:,}"]
        + [interval(one.metrics[metric]) for metric in names]
        for name, one in parts.items()
    ]


def _decision(about: Mapping[str, Any], judgement: Judgement | LabelJudgement | None) -> list[str]:
    decision = about.get("decision")
    if decision is None:
        return [f"Nothing but an order: no calibration and no threshold, because {text(about['undecided'])}."]
    if about.get("label_names"):
        assert not isinstance(judgement, Judgement)
        said = _label_decisions(decision["labels"], judgement)
    else:
        assert not isinstance(judgement, LabelJudgement)
        said = _one_decision(decision, judgement)
    return [*said, *([FROM_COUNTS] if about.get("decided_by") == COUNTS else [])]


def _one_decision(decision: Mapping[str, Any], judgement: Judgement | None) -> list[str]:
    measured = decision["measured"]
    share = measured["positives"] / measured["examples"]
    columns = ["on validation data, which chose it"]
    rows = [[name, interval(measured[name])] for name in ("sensitivity", "specificity", "ppv", "npv")]
    point = None if judgement is None else judgement.pooled.points.get(decision["rule"])
    if judgement is not None and judgement.split == "test" and point is not None:
        columns.append("on test data")
        rows = [[name, value, interval(getattr(point, name))] for name, value in rows]
    return [
        f"Probabilities: {KINDS[decision['calibration']['kind']]}, fitted to {measured['examples']:,} validation "
        f"scores, of which {share:.1%} are positive.",
        f"Class 1 from a raw score of {decision['threshold']:.6g} on: the threshold that reaches "
        f"{text(decision['rule'])} on the validation data.",
        table(["", *columns], rows),
    ]


def _label_decisions(labels: Mapping[str, Any], found: LabelJudgement | None) -> list[str]:
    """labels: the decision of each, as model.json has it."""
    decided = {name: told for name, told in labels.items() if "undecided" not in told}
    first = next(iter(decided.values()))
    tested = found.labels if found is not None and found.split == "test" else None
    splits = ("validation",) if tested is None else ("validation", "test")
    rows = []
    for name, told in decided.items():
        measured = told["measured"]
        cells = [text(name), f"{measured['examples']:,}", f"{measured['positives']:,}", f"{told['threshold']:.6g}"]
        cells += [interval(measured[share]) for share in SHARES]
        if tested is not None:
            point = tested[name].pooled.points.get(told["rule"]) if name in tested else None
            cells += [interval(getattr(point, share, {})) for share in SHARES]
        rows.append(cells)
    heads = ["label", "validation rows", "positives", "threshold"]
    said = [
        f"Probabilities: {KINDS[first['calibration']['kind']]} for each label, fitted to its validation scores. A "
        "probability holds where positives of its label are as frequent as there.",
        f"Class 1 of a label from its threshold of the raw score on, which reaches {text(first['rule'])} on the "
        "validation data.",
        table([*heads, *(f"{share} on {split} data" for split in splits for share in SHARES)], rows),
    ]
    missing = {name: told["undecided"] for name, told in labels.items() if "undecided" in told}
    return [*said, *(f"No probability and no class for {text(name)}: {text(why)}." for name, why in missing.items())]


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
        how = "To reproduce it, `fedxl train config.toml`, with the data where `[data]` says:"
        return [*parts, how, _code(config, "toml")]
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


def interval(found: Interval | Mapping[str, Any]) -> str:
    """A metric with its interval, as far as both are known."""
    known = found._asdict() if isinstance(found, Interval) else found
    value, low, high = (math.nan if known.get(name) is None else known[name] for name in ("value", "low", "high"))
    if math.isnan(value):
        return "not defined"
    return f"{value:.3f}" if math.isnan(low) or math.isnan(high) else f"{value:.3f} ({low:.3f} to {high:.3f})"
