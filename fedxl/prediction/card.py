"""README.md of an exported folder: the model card, for people who did not train the model."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedxl import metrics
from fedxl.config.experiment import SECTIONS, Config, dump
from fedxl.errors import printable
from fedxl.evaluation.assess import Assessment, Part
from fedxl.evaluation.intervals import Interval
from fedxl.evaluation.survival_part import error_of
from fedxl.training.privacy import promise
from fedxl.training.run_folder import Run

MOST_TITLE = 200  # characters of labels' names
COUNTS = "counts in bins"  # what chose the threshold, if sites disclosed no scores
KINDS = {"platt": "Platt scaling (a logistic curve)", "isotonic": "isotonic regression"}
SHARES = ("sensitivity", "specificity", "ppv", "npv")
NOT_FOR = (
    "Decisions about people without a person who is responsible for them, and who knows what is below.",
    "Sites, devices or groups of people that are not among those below, before it has been measured there.",
    "Data that were prepared in another way than `model.json` says, or whose columns have changed their meaning.",
)
NO_PROBABILITIES = (
    "Reading its scores as probabilities. They rank; only the calibrated column is a probability, and only where the "
    "share of positives is that of the validation data."
)
NO_TIMES = (
    "Reading its scores as times or probabilities. They rank; only the columns of survival are probabilities, and "
    "only where events are as frequent as in the validation data."
)

FROM_COUNTS = (
    "Sites told how many validation scores lie in each bin, not the scores: all of this holds to the width of a bin, "
    "and where sites added noise, intervals do not contain it."
)


def card(about: Mapping[str, Any], found: Assessment | None, run: Run) -> str:
    """about: what model.json says."""
    timed = about.get("timed", False)
    parts = [
        f"# {_title(about)}",
        _summary(about),
        _use(about),
        "## What it is not for",
        "\n".join(f"- {line}" for line in (*NOT_FOR, NO_TIMES if timed else NO_PROBABILITIES)),
        "## Data",
        _sites(about["training"].get("members", []), bool(about["labels"]), timed),
        "## How good it is",
        *_metrics(found, run),
        "## What its scores mean",
        *(_survival(about, found) if timed else _decisions(about, found)),
        "## Training",
        *_training(about),
        "## Files",
        _files(about),
    ]
    return "\n\n".join(parts) + "\n"


def _title(about: Mapping[str, Any]) -> str:
    meaning = about["meaning"]
    if about["labels"]:
        return f"Model card: {text(', '.join(about['labels'])[:MOST_TITLE])}"
    if not meaning.get("1"):
        return "Model card"
    column = f"{text(meaning['column'])} = " if meaning.get("column") else ""  # images by class have no column
    return f"Model card: {column}{text(meaning['1'])}"


def _summary(about: Mapping[str, Any]) -> str:
    training = about["training"]
    settings, members = training["settings"], training.get("members", [])
    rows = sum(member["positives"] + member["negatives"] for member in members)
    risk = settings.get("risk.name") or settings.get("task.risk_name") or "an X-risk"
    network = (about.get("model") or {}).get("name", "a network of the user's own")
    several = len(about["labels"])
    kind = f"A classifier with a score for each of {several} labels" if several else "A binary classifier"
    order = "It was trained to rank positives above negatives"
    if about.get("timed", False):
        kind, order = "A model of time to event", "Its scores rank by risk: the higher, the earlier the event"
    on = "rows" if several else f"{rows:,} rows"  # of several labels, a row may be both positive and negative
    return (
        f"{kind}, {text(network)} for examples of shape {list(about['shape'])}, trained on {on} "
        f"of {len(members)} sites that did not pool them. {order} "
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


def _sites(members: Sequence[Mapping[str, Any]], several: bool, timed: bool) -> str:
    counts = [(text(each["name"]), each["positives"], each["negatives"]) for each in members]
    if several:
        rows = [[name, f"{positives:,}", f"{negatives:,}"] for name, positives, negatives in counts]
        return table(["site", "training rows with a positive label", "with a negative one"], rows)
    rows = [[name, f"{positives + negatives:,}", f"{positives:,}"] for name, positives, negatives in counts]
    heads = ["site", "training rows", "events" if timed else "positives"]
    return table(heads, rows) if rows else "Who held the data is not recorded."


def _metrics(found: Assessment | None, run: Run) -> list[str]:
    """Metrics by site, or by label with their means and by site; and notes. Of time to event, sites have one."""
    heard = run.sites_heard
    if found is None:
        return _disclosed(run, heard)
    of_mean = "; that of the mean from a jackknife of whole examples" if found.several else ""
    rest = f" They rest on {heard}." if heard else ""
    said = [
        f"Measured on {found.split} data, with intervals of {found.level:.0%}{of_mean}. The intervals cover the "
        f"draw of examples, not another training.{rest}"
    ]
    names = list(found.pooled.mean)
    if found.several:
        rows = _rows(found.pooled.labels, names)
        rows.append(["mean of the labels", "", "", *map(interval, found.pooled.mean.values())])
        said.append(table(["label", "rows", "positives", *names], rows))
        sites = [[text(name), f"{s.examples:,}", interval(s.mean["auroc"])] for name, s in found.sites.items()]
        said += [table(["data of", "rows", "auroc, mean of the labels"], sites)] if sites else []
    else:
        parts, whole = {name: site.one for name, site in found.sites.items()}, {"all together": found.pooled.one}
        counts = ["rows", "events" if found.timed else "positives"]
        if found.timed and parts:
            said.append(table(["data of", *counts, *names], _rows(whole, names)))
            said.append(table(["data of", *counts, names[0]], _rows(parts, names[:1])))
        else:
            said.append(table(["data of", *counts, *names], _rows(whole | parts, names)))
    said += [f"Note: {text(note)}." for note in found.notes]
    one = None if found.several else found.pooled.one
    if one is not None and one.brier is not None and one.reliability is not None:
        error = one.reliability.error
        said.append(f"Calibrated probabilities: Brier score {one.brier:.4f}, calibration error {error:.4f}.")
    return said


def _disclosed(run: Run, heard: str) -> list[str]:
    """Metrics of a run without scores, and of its sites."""
    names = [name for name in metrics.shown(run.values) if run.values.get(name) is not None]
    if not names:
        return ["The run kept no scores of held-back data."]
    rest = f" They rest on {heard}." if heard else ""
    told = run.told(run.split)
    parts = {"all together": run.values, **{name: one for name, one in told.items() if not isinstance(one, str)}}
    rows = [[text(part), *(interval({"value": one.get(name)}) for name in names)] for part, one in parts.items()]
    return [
        f"Measured on {run.split} data. The run kept no scores of them, so that there are no intervals.{rest}",
        table(["data of", *map(text, names)], rows),
        *(f"Note: {text(name)}: {text(why)}." for name, why in told.items() if isinstance(why, str)),
    ]


def _rows(parts: Mapping[str, Part], names: Sequence[str]) -> list[list[str]]:
    return [
        [text(name), f"{one.positives + one.negatives:,}", f"{one.positives:,}"]
        + [interval(one.metrics[metric]) for metric in names]
        for name, one in parts.items()
    ]


def _decisions(about: Mapping[str, Any], found: Assessment | None) -> list[str]:
    """Probabilities and thresholds, a row for each label that has them."""
    told: Mapping[str, Mapping[str, Any]] = about["decisions"]
    decided = {name: one for name, one in told.items() if "undecided" not in one}
    missing = {name: text(one["undecided"]) for name, one in told.items() if "undecided" in one}
    if not decided:
        why = "; ".join(f"{text(name)}: {each}" if name else each for name, each in missing.items())
        return [f"Ranking only: no calibration and no threshold, because {why}."]
    tested = found.pooled.labels if found is not None and found.split == "test" else None
    rows = []
    for name, one in decided.items():
        measured = one["measured"]
        points = [measured]
        if tested is not None:
            point = tested[name].points.get(one["rule"]) if name in tested else None
            points.append({} if point is None else point._asdict())
        shares = [interval(point.get(share, {})) for point in points for share in SHARES]
        counts = [f"{measured['examples']:,}", f"{measured['positives']:,}", f"{one['threshold']:.6g}"]
        rows.append([text(name or "the label"), *counts, *shares])
    first = next(iter(decided.values()))
    splits = ("validation",) if tested is None else ("validation", "test")
    heads = ["validation rows", "positives", "threshold"]
    heads += [f"{share} on {split} data" for split in splits for share in SHARES]
    alone = [list(pair) for pair in zip(heads, rows[0][1:], strict=True)]  # one label reads better downwards
    said = [
        f"Probabilities: {KINDS[first['calibration']['kind']]}, fitted to validation scores. A probability holds "
        "where positives are as frequent as there.",
        f"Class 1 from the threshold of the raw score on, which reaches {text(first['rule'])} on the validation "
        "data, which chose it.",
        table(["", *heads], rows) if len(rows) > 1 else table(["", rows[0][0]], alone),
    ]
    said += [f"No probability and no class for {text(name)}: {why}." for name, why in missing.items()]
    return [*said, *([FROM_COUNTS] if about.get("decided_by") == COUNTS else [])]


def _survival(about: Mapping[str, Any], found: Assessment | None) -> list[str]:
    """Probabilities to survive horizons: how they are computed, and how good they are."""
    told = about["survival"]
    if told is None:
        why = "; ".join(text(one["undecided"]) for one in about["decisions"].values())
        return [f"Ranking only: no probability of survival, because {why}."]
    said = [
        "Probability of no event up to a time t: exp(-H(t) exp(score - c)). H is the cumulative hazard that "
        "Breslow's sums over the validation data give to the score c; both are in `model.json`, under `survival`. "
        "It holds where events are as frequent as there, and where the ratio of two hazards stays the same over time."
    ]
    part = None if found is None else found.survival
    if part is None or found is None:
        columns = ", ".join(f"`survival@{at:g}`" for at in told["horizons"])
        return [*said, f"Columns of predictions: {columns}."]
    rows = []
    for at, brier in part.brier.items():
        error = error_of(part.calibration[at])
        measured = "not defined" if error is None else f"{error:.3f}"
        auc = found.pooled.one.metrics[f"auc_at@{at:g}"]
        rows.append([f"`survival@{at:g}`", interval(auc), interval(brier), measured])
    said.append(table([f"column, on {found.split} data", "AUC", "Brier score", "calibration error"], rows))
    if part.integrated_brier is not None:
        first, *_, last = told["horizons"]
        said.append(f"Mean Brier score between {first:g} and {last:g}: {interval(part.integrated_brier)}.")
    return said


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
            f"if the noise stays secret.{simulated}"
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
    rows = [["`model.safetensors`", "the weights"]]
    rows += [["`model.json`", "all that is needed to use them, and digests of the files"]]
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
