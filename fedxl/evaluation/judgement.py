"""Everything that scores of held-back data say of a model, pooled and by site: what reports and model cards print.

Thresholds and calibration are chosen on validation data, all sites together, and measured on test data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedxl.errors import require
from fedxl.evaluation import calibration as calibrations
from fedxl.evaluation.calibration import Calibration, Reliability, brier, reliability
from fedxl.evaluation.decision import why_label_undecided
from fedxl.evaluation.intervals import DRAWS, LEVEL, Interval, bootstrap, delong
from fedxl.evaluation.label_counts import LabelCurves, as_scored
from fedxl.evaluation.label_means import means
from fedxl.evaluation.operating import (
    NetBenefit,
    OperatingPoint,
    at_sensitivity,
    at_specificity,
    at_threshold,
    net_benefit,
)
from fedxl.evaluation.resampling import affordable
from fedxl.evaluation.scored import LabelScores, Scored, mean_defined
from fedxl.files import plain

SPECIFICITIES = (0.9, 0.95)
SENSITIVITIES = (0.9, 0.95)
DECISIONS = tuple(round(step / 100, 2) for step in range(1, 100))  # threshold probabilities of net benefit
SITE_GROUPS = 500  # for the mean's interval at each of many sites
NO_WHOLE = "not defined: counts in bins do not say which labels are of one example"


@dataclass(frozen=True, eq=False)
class Judged:
    """What the scores of some examples say: of all, or of one site."""

    positives: int
    negatives: int
    metrics: dict[str, Interval]  # "auroc", "pauc@0.3", "ap"
    points: dict[str, OperatingPoint]  # "specificity 0.95": the threshold that gave it where it was chosen
    brier: float | None = None  # of calibrated probabilities, like all that follows
    reliability: Reliability | None = None
    net_benefit: NetBenefit | None = None

    def to_json(self) -> dict[str, Any]:
        found = {
            **vars(self),
            "metrics": {name: value._asdict() for name, value in self.metrics.items()},
            "points": {name: point.to_json() for name, point in self.points.items()},
            "reliability": _arrays(self.reliability),
            "net_benefit": _arrays(self.net_benefit),
        }
        return found if self.reliability is None else found | {"calibration_error": self.reliability.error}


@dataclass(frozen=True, eq=False)
class Judgement:
    """What the scores of a run say."""

    split: str  # on which everything was measured
    chosen_on: str | None  # on which thresholds and calibration were chosen
    level: float
    fpr: float  # the limit of the partial AUC
    calibration: Calibration | None
    pooled: Judged
    sites: dict[str, Judged]  # empty if sites are not known
    notes: tuple[str, ...]  # what a reader should know; one line each

    def to_json(self) -> dict[str, Any]:
        """As JSON has it: null for what is not defined."""
        found = {
            **vars(self),
            "calibration": None if self.calibration is None else self.calibration.to_json(),
            "pooled": self.pooled.to_json(),
            "sites": {name: judged.to_json() for name, judged in self.sites.items()},
        }
        return plain(found)  # type: ignore[no-any-return]


def judge(
    splits: Mapping[str, Scored],
    *,
    fpr: float = 0.3,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
    calibration: str = "platt",
    specificities: Sequence[float] = SPECIFICITIES,
    sensitivities: Sequence[float] = SENSITIVITIES,
) -> Judgement:
    """Judge a run by its scores, all sites together and each by itself, with thresholds and calibration of all."""
    known = {name: found for name, found in splits.items() if len(found)}
    split, held = judged_split(known), known.get("validation")
    notes = _notes(split, held is not None)
    fitted = _calibration(held, calibration, notes)
    thresholds = {} if held is None else _thresholds(held, specificities, sensitivities, notes)
    draws = affordable(draws, len(known[split]))

    def judge_part(found: Scored) -> Judged:
        scores, labels, positives = found.scores, found.labels, int(found.labels.sum())
        intervals = {"auroc": delong(scores, labels, level)}
        for name in (f"pauc@{fpr:g}", "ap"):
            intervals[name] = bootstrap(name, scores, labels, level=level, draws=draws, seed=seed)
        points = {name: at_threshold(scores, labels, limit, level) for name, limit in thresholds.items()}
        if split == "validation":  # on which the thresholds were chosen
            points = {name: point.same_examples() for name, point in points.items()}
        judged = Judged(positives, len(found) - positives, intervals, points)
        if fitted is None or not np.isfinite(scores).all():
            return judged
        probabilities = fitted(scores)
        return replace(
            judged,
            brier=brier(probabilities, labels),
            reliability=reliability(probabilities, labels, level=level),
            net_benefit=net_benefit(probabilities, labels, DECISIONS),
        )

    chosen_on = "validation" if thresholds or fitted is not None else None
    sites = {name: judge_part(part) for name, part in known[split].by_site().items()}
    return Judgement(split, chosen_on, level, fpr, fitted, judge_part(known[split]), sites, tuple(notes))


def judged_split(parts: Mapping[str, Any]) -> str:
    """Test data, else validation data. Raises UserError if there are none."""
    split = next((split for split in ("test", "validation") if parts.get(split)), "")
    require(bool(split), "there are no scores of held-back data; train with validation or test data")
    return split


def _notes(split: str, held: bool) -> list[str]:
    notes = []
    if split == "validation":
        notes.append("there are no test data: everything was measured on validation data, which also chose the model")
    if not held:
        notes.append("there are no validation data: no threshold and no calibration was chosen")
    return notes


def _calibration(held: Scored | None, kind: str, notes: list[str]) -> Calibration | None:
    if held is None:
        return None
    if not np.isfinite(held.scores).all():
        notes.append("validation scores are not finite: no calibration")
        return None
    if not 0 < held.labels.sum() < len(held):
        notes.append("validation data have one class: no calibration")
        return None
    fitted = calibrations.fit(kind, held.scores, held.labels)
    if fitted.note:
        notes.append(f"calibration: {fitted.note}")
    return fitted


def _thresholds(
    held: Scored, specificities: Sequence[float], sensitivities: Sequence[float], notes: list[str]
) -> dict[str, float]:
    points = {f"specificity {share:g}": at_specificity(held.scores, held.labels, share) for share in specificities}
    points |= {f"sensitivity {share:g}": at_sensitivity(held.scores, held.labels, share) for share in sensitivities}
    found = {name: point.threshold for name, point in points.items() if np.isfinite(point.threshold)}
    missing = [name for name in points if name not in found]
    if missing:
        notes.append(f"validation data have one class, or scores that are not finite: no {', '.join(missing)}")
    return found


def _arrays(found: Reliability | NetBenefit | None) -> dict[str, Any] | None:
    return None if found is None else {name: column.tolist() for name, column in found._asdict().items()}


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
            **vars(self),
            "labels": {name: {key: told[key] for key in kept if key in told} for name, told in each.items()},
            "mean": {name: interval._asdict() for name, interval in self.mean.items()},
        }
        return plain({key: value for key, value in found.items() if key != "sites"})  # type: ignore[no-any-return]


def judge_labels(
    splits: Mapping[str, LabelScores],
    counts: Mapping[str, LabelCurves],
    *,
    fpr: float = 0.3,
    level: float = LEVEL,
    **options: Any,
) -> LabelJudgement | None:
    """Judge a run by the scores of its labels, or by counts in bins of them; None if there are none.

    Means of counts have no intervals. options: those of `judge`.
    """
    parts = parts_of(splits, counts)
    if not any(parts.values()):
        return None
    split, held = judged_split(parts), parts.get("validation", {})
    whole = splits.get(split)
    why = {name: why_label_undecided(held.get(name)) for name in parts[split]} if held else {}
    known = {name: replace(one, sites=None) for name, one in parts[split].items() if len(one)}
    each = {}
    for name, one in known.items():
        choosing = {} if why.get(name) or name not in held else {"validation": replace(held[name], sites=None)}
        judged = judge({split: one, **choosing}, fpr=fpr, level=level, **options)
        if not choosing and split == "validation":  # too few examples: they are judged, but choose nothing
            bare = replace(judged.pooled, points={}, brier=None, reliability=None, net_benefit=None)
            judged = replace(judged, chosen_on=None, calibration=None, pooled=bare)
        each[name] = judged
    names, notes = ["auroc", f"pauc@{fpr:g}", "ap"], _notes(split, bool(held))
    if whole is not None:
        mean = means(names, whole, level)
    else:
        values = {name: mean_defined([one.pooled.metrics[name].value for one in each.values()]) for name in names}
        mean = {name: Interval(value, math.nan, math.nan, level, NO_WHOLE) for name, value in values.items()}
    if missing := [name for name in parts[split] if name not in known]:
        notes.append(f"no {split} example says whether it has {', '.join(missing)}")
    fitted = {name: judged.calibration for name, judged in each.items() if judged.calibration is not None}
    notes += [f"calibration of {name}: {found.note}" for name, found in fitted.items() if found.note]
    undecided = {name: reason for name, reason in why.items() if reason}
    return LabelJudgement(split, level, fpr, each, undecided, mean, _sites(whole, level), tuple(notes))


def parts_of(splits: Mapping[str, LabelScores], counts: Mapping[str, LabelCurves]) -> dict[str, dict[str, Scored]]:
    """The scores of each label by split; where only counts in bins are known, scores that they stand for."""
    known = {split: found.by_label() for split, found in splits.items()}
    return {split: as_scored(found) for split, found in counts.items()} | known


def _sites(whole: LabelScores | None, level: float) -> dict[str, SiteJudgement]:
    found = {}
    for site, part in (whole.by_site() if whole is not None else {}).items():
        labels = {name: delong(one.scores, one.labels, level) for name, one in part.by_label().items() if len(one)}
        found[site] = SiteJudgement(len(part.scores), labels, means(["auroc"], part, level, SITE_GROUPS)["auroc"])
    return found
