"""Everything that scores of held-back data say of a model: what reports and model cards print.

Of all data together and by site, of each label and of their mean. Thresholds and calibration are chosen on validation
data, all sites together, and measured on test data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from fedxl import metrics
from fedxl.evaluation import calibration as calibrations
from fedxl.evaluation import operating
from fedxl.evaluation.calibration import Calibration, Reliability, brier, reliability
from fedxl.evaluation.decision import FEWEST, DecisionOptions, decide, why_undecided
from fedxl.evaluation.hazard import HazardSums
from fedxl.evaluation.histogram import Histograms, by_label, hazard_of
from fedxl.evaluation.intervals import LEVEL, Interval, intervals, reported
from fedxl.evaluation.operating import NetBenefit, OperatingPoint, at_sensitivity, at_specificity, at_threshold
from fedxl.evaluation.scores import Scores, mean_defined
from fedxl.evaluation.survival_part import SurvivalPart, metrics_at
from fedxl.files import plain

SPECIFICITIES = (0.9, 0.95)
SENSITIVITIES = (0.9, 0.95)
PROBABILITIES = tuple(round(step / 100, 2) for step in range(1, 100))  # thresholds of net benefit
NO_WHOLE = "not defined: counts in bins do not say which labels are of one example"


@dataclass(frozen=True, eq=False)
class Part:
    """What the scores of some examples say of one label."""

    positives: int  # of time to event: examples with the event, and those that had none while they were seen
    negatives: int
    metrics: dict[str, Interval]  # "auroc", "pauc@0.3", "ap"; of time to event "cindex", "uno@1825", "auc_at@730"
    points: Mapping[str, OperatingPoint] = field(default_factory=dict)  # "specificity 0.95": chosen elsewhere
    brier: float | None = None  # of calibrated probabilities, like all that follows
    reliability: Reliability | None = None
    net_benefit: NetBenefit | None = None

    def to_json(self) -> dict[str, Any]:
        """Without curves: those of many labels and sites would be long."""
        error = {} if self.reliability is None else {"calibration_error": self.reliability.error}
        return {
            "positives": self.positives,
            "negatives": self.negatives,
            "metrics": {name: value._asdict() for name, value in self.metrics.items()},
            "points": {name: point.to_json() for name, point in self.points.items()},
            "brier": self.brier,
            **error,
        }


@dataclass(frozen=True, eq=False)
class Parts:
    """What the scores of some examples say: of all, or of one site."""

    examples: int
    labels: dict[str, Part]  # without those that are known of no example; one label is called ""
    mean: dict[str, Interval]  # of each metric over labels; of one label its own

    @property
    def one(self) -> Part:
        """The only label's part."""
        (found,) = self.labels.values()
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "examples": self.examples,
            "labels": {name: part.to_json() for name, part in self.labels.items()},
            "mean": {name: value._asdict() for name, value in self.mean.items()},
        }


@dataclass(frozen=True, eq=False)
class Assessment:
    """What the scores of a run say."""

    split: str  # on which everything was measured
    chosen_on: str  # on which thresholds and calibrations were chosen; empty if none were
    level: float
    fpr: float  # the limit of the partial AUC
    calibrations: dict[str, Calibration]  # by label
    undecided: dict[str, str]  # why labels have no calibration and no threshold
    pooled: Parts
    sites: dict[str, Parts]  # empty if sites are not known; of several labels with AUROC alone, of times with cindex
    notes: tuple[str, ...]  # what a reader should know; one line each
    timed: bool = False  # whether scores are of time to event
    survival: SurvivalPart | None = None  # of these, if validation data chose horizons

    @property
    def several(self) -> bool:
        return list(self.pooled.labels) != [""]

    def to_json(self) -> dict[str, Any]:
        """As JSON has it: null for what is not defined."""
        sites = {} if self.several else {name: parts.to_json() for name, parts in self.sites.items()}
        kinds = {name: found.to_json() for name, found in self.calibrations.items()}
        return plain(  # type: ignore[no-any-return]
            {
                **vars(self),
                "calibrations": kinds,
                "pooled": self.pooled.to_json(),
                "sites": sites,
                "survival": self.survival and self.survival.to_json(),
            }
        )


def assess(
    scores: Mapping[str, Scores],
    histograms: Mapping[str, Histograms] = MappingProxyType({}),
    *,
    fpr: float = 0.3,
    level: float = LEVEL,
    calibration: str = "platt",
    specificities: Sequence[float] = SPECIFICITIES,
    sensitivities: Sequence[float] = SENSITIVITIES,
    horizons: Sequence[float] = (),
    asked: Sequence[str] = (),
) -> Assessment | None:
    """Assess a run by its scores, or by counts in bins of them; None if there are none.

    Means over several labels of counts in bins have no intervals. horizons: of time to event; by default the times in
    the names of `asked`, metrics that are measured besides ("uno@1200", "auc_at@730"), else quartiles of the
    validation data's events.
    """
    splits = by_label(scores, histograms)
    known = [name for name in ("test", "validation") if any(len(one) for one in splits.get(name, {}).values())]
    if not known:
        return None
    split = known[0]
    labels, notes = list(splits[split]), []
    whole = scores.get(split) if len(labels) > 1 else splits[split][labels[0]]
    held = splits.get("validation", {})
    held = held if any(map(len, held.values())) else {}
    if split == "validation":
        notes.append("there are no test data: everything was measured on validation data, which also chose the model")
    timed = whole is not None and whole.time is not None
    if not held:
        lost = "horizon" if timed else "threshold and no calibration"
        notes.append(f"there are no validation data: no {lost} was chosen")
    survival: SurvivalPart | None = None
    more: list[str] = []
    if whole is not None and timed and held:
        sums = hazard_of(histograms.get("validation", {}))
        survival, more, why_not = _survival(held[""], whole, horizons, asked, level, sums)
        notes += [f"no survival up to a horizon: {why_not}"] if why_not else []
    held = {} if timed else held  # no classes: neither a threshold nor a calibration
    fewest = 1 if len(labels) == 1 else FEWEST
    why = {name: why_undecided(held.get(name), fewest) for name in labels} if held else {}
    chosen = {name: _Chosen(held[name], calibration, specificities, sensitivities) for name in why if not why[name]}
    names = [*reported(timed, fpr), *more]

    def part(name: str, found: Scores, wanted: Sequence[str]) -> Part:
        measured = intervals(wanted, found, level)
        plain_part = Part(found.positives, found.negatives, measured)
        return chosen[name].measure(plain_part, found, level, split) if name in chosen else plain_part

    def parts(found: Mapping[str, Scores], whole: Scores | None, wanted: Sequence[str]) -> Parts:
        each = {name: part(name, one, wanted) for name, one in found.items() if len(one)}
        if len(labels) == 1:
            mean = dict(next(iter(each.values())).metrics)
        elif whole is None:
            values = {name: mean_defined(one.metrics[name].value for one in each.values()) for name in wanted}
            mean = {name: Interval(value, math.nan, math.nan, level, NO_WHOLE) for name, value in values.items()}
        else:
            mean = intervals(wanted, whole, level)
        count = len(whole) if whole is not None else max(map(len, found.values()))
        return Parts(count, each, mean)

    by_site = {} if whole is None else whole.by_site()
    of_sites = names[:1] if timed or len(labels) > 1 else names
    each_site = {name: parts(found.by_label(), found, of_sites) for name, found in by_site.items()}
    pooled = parts(splits[split], whole, names)
    notes += [f"no {split} example says whether it has {name}" for name in labels if name not in pooled.labels]
    for name, found in chosen.items():
        of = f" of {name}" if name else ""
        notes += [f"calibration{of}: {found.calibration.note}"] if found.calibration.note else []
    undecided = {name: reason for name, reason in why.items() if reason}
    if len(labels) == 1 and undecided:
        notes.append(f"no calibration and no threshold: {undecided[labels[0]]}")
    fitted = {name: found.calibration for name, found in chosen.items()}
    on = "validation" if chosen or survival is not None else ""
    return Assessment(split, on, level, fpr, fitted, undecided, pooled, each_site, tuple(notes), timed, survival)


def _survival(
    held: Scores,
    found: Scores,
    horizons: Sequence[float],
    asked: Sequence[str],
    level: float,
    sums: HazardSums | None,
) -> tuple[SurvivalPart | None, list[str], str]:
    """What validation scores chose of time to event, the metrics that need it, or why it is missing.

    sums: those of a hazard, where only counts are known.
    """
    last = min(float(each.max()) for each in (held.time, sums.grid if sums else None) if each is not None)
    named = sorted({limit for name in asked if (limit := metrics.split(name)[1]) is not None and limit <= last})
    decided = decide(held.labels, {"": held}, DecisionOptions(horizons=tuple(horizons or named)), sums)
    if decided.survival is None:
        return None, [], decided.why_none
    if not np.isfinite(found.scores).all():
        return None, [], "scores are not finite"
    usual = metrics_at(decided.survival, held)
    if any(name.startswith("uno@") for name in asked):
        usual = [name for name in usual if not name.startswith("uno@")]
    more = list(dict.fromkeys([*asked, *usual]))
    return SurvivalPart.of(decided.survival, held, found, level), more, ""


class _Chosen:
    """The calibration and the thresholds of a label, chosen on its validation scores."""

    def __init__(
        self, held: Scores, calibration: str, specificities: Sequence[float], sensitivities: Sequence[float]
    ) -> None:
        self.calibration = calibrations.fit(calibration, *held.flat)
        points = {f"specificity {share:g}": at_specificity(*held.flat, share) for share in specificities}
        points |= {f"sensitivity {share:g}": at_sensitivity(*held.flat, share) for share in sensitivities}
        self.thresholds = {name: point.threshold for name, point in points.items()}

    def measure(self, part: Part, found: Scores, level: float, split: str) -> Part:
        """The part with what these come to on its scores."""
        scores, labels = found.flat
        points = {name: at_threshold(scores, labels, limit, level) for name, limit in self.thresholds.items()}
        if split == "validation":  # on which the thresholds were chosen
            points = {name: point.same_examples() for name, point in points.items()}
        if not np.isfinite(scores).all():
            return replace(part, points=points)
        probabilities = self.calibration(scores)
        return replace(
            part,
            points=points,
            brier=brier(probabilities, labels),
            reliability=reliability(probabilities, labels, level=level),
            net_benefit=operating.net_benefit(probabilities, labels, PROBABILITIES),
        )
