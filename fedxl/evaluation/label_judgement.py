"""Everything that scores of several labels say of a model: each label by itself, their means, and sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedxl.errors import require
from fedxl.evaluation.intervals import DRAWS, LEVEL, Interval, delong
from fedxl.evaluation.judgement import SENSITIVITIES, SPECIFICITIES, Judged, Judgement, judge
from fedxl.evaluation.label_counts import LabelCurves, as_scored
from fedxl.evaluation.label_decisions import why_undecided
from fedxl.evaluation.label_means import means
from fedxl.evaluation.labelled import LabelScores, mean
from fedxl.evaluation.scored import Scored
from fedxl.files import plain

SITE_GROUPS = 500  # for the mean's interval at each of many sites
ByLabel = Mapping[str, Scored]
NO_WHOLE = "not defined: counts in bins do not say which labels are of one example"


@dataclass(frozen=True, eq=False)
class SiteJudgement:
    """AUROC at a site: of each label that is known there, and the mean over labels."""

    examples: int
    labels: dict[str, Interval]
    mean: Interval


@dataclass(frozen=True, eq=False)
class LabelJudgement:
    """What the scores of a run of several labels say."""

    split: str  # on which everything was measured
    level: float
    fpr: float  # the limit of the partial AUC
    labels: dict[str, Judgement]  # without those that are known of no example
    undecided: dict[str, str]  # why labels have no calibration and no threshold
    mean: dict[str, Interval]  # over labels, of the metrics that each label has
    sites: dict[str, SiteJudgement]  # empty if sites are not known
    notes: tuple[str, ...]  # what a reader should know; one line each

    def to_json(self) -> dict[str, Any]:
        """As JSON has it, without curves and sites: those of many labels would be long."""
        kept = ("positives", "negatives", "metrics", "points", "brier", "calibration_error")
        each = {name: judged.pooled.to_json() for name, judged in self.labels.items()}
        found = {
            "split": self.split,
            "level": self.level,
            "fpr": self.fpr,
            "labels": {name: {key: told[key] for key in kept if key in told} for name, told in each.items()},
            "undecided": self.undecided,
            "mean": {name: interval._asdict() for name, interval in self.mean.items()},
            "notes": list(self.notes),
        }
        content: dict[str, Any] = plain(found)
        return content


def judge_labels(
    parts: Mapping[str, ByLabel],
    whole: LabelScores | None,
    *,
    fpr: float = 0.3,
    level: float = LEVEL,
    draws: int = DRAWS,
    calibration: str = "platt",
    specificities: Sequence[float] = SPECIFICITIES,
    sensitivities: Sequence[float] = SENSITIVITIES,
) -> LabelJudgement:
    """Judge a run by the scores of its labels.

    parts: the scores of each label by split. whole: those of the split that is judged, example by example, if they
    are known; without them the means have no intervals.
    """
    split = judged_split(parts)
    require(bool(split), "there are no scores of held-back data; train with validation or test data")
    held = parts.get("validation", {})
    why = {name: why_undecided(held.get(name)) for name in parts[split]} if held else {}
    known = {name: one for name, one in parts[split].items() if len(one)}
    options: dict[str, Any] = {"fpr": fpr, "level": level, "draws": draws, "calibration": calibration}
    options |= {"specificities": specificities, "sensitivities": sensitivities}
    each = {
        name: _label(one, None if why.get(name) else held.get(name), split, options) for name, one in known.items()
    }
    names = ["auroc", f"pauc@{fpr:g}", "ap"]
    together = means(names, whole, level) if whole is not None else _bare_means(names, each, level)
    undecided = {name: reason for name, reason in why.items() if reason}
    missing = [name for name in parts[split] if name not in known]
    notes = (*_notes(split, bool(held), missing), *_flat(each))
    return LabelJudgement(split, level, fpr, each, undecided, together, _sites(whole, level), notes)


def judged_split(parts: Mapping[str, Any]) -> str:
    """Test data, else validation data; empty if there are none."""
    return next((split for split in ("test", "validation") if parts.get(split)), "")


def parts_of(splits: Mapping[str, LabelScores], counts: Mapping[str, LabelCurves]) -> dict[str, dict[str, Scored]]:
    """The scores of each label by split; where only counts in bins are known, scores that they stand for."""
    known = {split: found.by_label() for split, found in splits.items()}
    return {split: as_scored(found) for split, found in counts.items()} | known


def _label(found: Scored, held: Scored | None, split: str, options: Mapping[str, Any]) -> Judgement:
    """One label by itself. Sites have a table of their own."""
    splits = {split: replace(found, sites=None)}
    if held is not None:
        splits["validation"] = replace(held, sites=None)
    judged = judge(splits, **options)
    if held is None and split == "validation":  # too few examples: they are judged, but choose nothing
        return replace(judged, chosen_on=None, calibration=None, pooled=_unchosen(judged))
    return judged


def _unchosen(judged: Judgement) -> Judged:
    return replace(judged.pooled, points={}, brier=None, reliability=None, net_benefit=None)


def _bare_means(names: Sequence[str], each: Mapping[str, Judgement], level: float) -> dict[str, Interval]:
    """Without intervals."""
    values = {name: mean([judged.pooled.metrics[name].value for judged in each.values()]) for name in names}
    return {name: Interval(value, math.nan, math.nan, level, NO_WHOLE) for name, value in values.items()}


def _sites(whole: LabelScores | None, level: float) -> dict[str, SiteJudgement]:
    found = {}
    for site, part in (whole.by_site() if whole is not None else {}).items():
        labels = {name: delong(one.scores, one.labels, level) for name, one in part.by_label().items() if len(one)}
        found[site] = SiteJudgement(len(part.scores), labels, means(["auroc"], part, level, SITE_GROUPS)["auroc"])
    return found


def _flat(each: Mapping[str, Judgement]) -> list[str]:
    """What a user should know of the calibrations."""
    fitted = {name: judged.calibration for name, judged in each.items() if judged.calibration is not None}
    return [f"calibration of {name}: {found.note}" for name, found in fitted.items() if found.note]


def _notes(split: str, held: bool, missing: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if split == "validation":
        notes.append("there are no test data: everything was measured on validation data, which also chose the model")
    if not held:
        notes.append("there are no validation data: no threshold and no calibration was chosen")
    if missing:
        notes.append(f"no {split} example says whether it has {', '.join(missing)}")
    return tuple(notes)
