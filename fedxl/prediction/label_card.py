"""What a model card says of several labels: how good each is, and what its scores mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedxl.evaluation.intervals import Interval
from fedxl.evaluation.judgement import Judged
from fedxl.evaluation.label_judgement import LabelJudgement
from fedxl.prediction.markdown import interval, table, text

KINDS = {"platt": "Platt scaling (a logistic curve)", "isotonic": "isotonic regression"}
SHARES = ("sensitivity", "specificity")


def metrics(found: LabelJudgement) -> list[str]:
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


def decisions(labels: Mapping[str, Any], found: LabelJudgement | None) -> list[str]:
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
