"""Everything that scores of held-back data say of a model, pooled and by site: what reports and model cards print.

Thresholds and calibration are chosen on validation data, all sites together, and measured on test data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedxl.errors import require
from fedxl.evaluation import calibration as calibrations
from fedxl.evaluation.calibration import Calibration, Reliability, brier, reliability
from fedxl.evaluation.intervals import DRAWS, LEVEL, Interval, bootstrap, delong
from fedxl.evaluation.operating import (
    NetBenefit,
    OperatingPoint,
    at_sensitivity,
    at_specificity,
    at_threshold,
    net_benefit,
)
from fedxl.evaluation.scored import Scored
from fedxl.files import plain

SPECIFICITIES = (0.9, 0.95)
SENSITIVITIES = (0.9, 0.95)
DECISIONS = tuple(round(step / 100, 2) for step in range(1, 100))  # threshold probabilities of net benefit
MOST_WORK = 4e7  # draws times examples of one bootstrap, about a second; beyond it there are fewer draws
FEWEST = 400  # draws


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
            "positives": self.positives,
            "negatives": self.negatives,
            "metrics": {name: value._asdict() for name, value in self.metrics.items()},
            "points": {name: _point(point) for name, point in self.points.items()},
            "brier": self.brier,
            "reliability": _arrays(self.reliability),
            "net_benefit": _arrays(self.net_benefit),
        }
        if self.reliability is not None:
            found["calibration_error"] = self.reliability.error
        return found


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
            "split": self.split,
            "chosen_on": self.chosen_on,
            "level": self.level,
            "fpr": self.fpr,
            "calibration": None if self.calibration is None else self.calibration.to_json(),
            "pooled": self.pooled.to_json(),
            "sites": {name: judged.to_json() for name, judged in self.sites.items()},
            "notes": list(self.notes),
        }
        content: dict[str, Any] = plain(found)
        return content


@dataclass(frozen=True)
class _Choice:
    """What was chosen beforehand, and how to measure."""

    thresholds: dict[str, float]
    calibration: Calibration | None
    same: bool  # whether it was chosen on the examples it is measured on
    fpr: float
    level: float
    draws: int
    seed: int


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
    """Judge a run by its scores (`scores.npz`, `Result.scored`), all sites together and each by itself.

    A site that has its own row was measured by the thresholds and the calibration of all sites' validation data.
    """
    known = {name: found for name, found in splits.items() if len(found)}
    split = next((name for name in ("test", "validation") if name in known), None)
    require(split is not None, "there are no scores of held-back data; train with validation or test data")
    assert split is not None
    notes, held = [], known.get("validation")
    if split == "validation":
        notes.append("there are no test data: everything was measured on validation data, which also chose the model")
    if held is None:
        notes.append("there are no validation data: no threshold and no calibration was chosen")
    fitted = _calibration(held, calibration, notes)
    thresholds = {} if held is None else _thresholds(held, specificities, sensitivities, notes)
    draws = affordable(draws, len(known[split]))
    choice = _Choice(thresholds, fitted, split == "validation", fpr, level, draws, seed)
    chosen_on = "validation" if thresholds or fitted is not None else None
    parts = {name: _judged(part, choice) for name, part in known[split].by_site().items()}
    return Judgement(split, chosen_on, level, fpr, fitted, _judged(known[split], choice), parts, tuple(notes))


def affordable(draws: int, examples: int) -> int:
    """So many draws, or fewer where a bootstrap of so many examples would take long."""
    return int(min(draws, max(FEWEST, MOST_WORK // max(1, examples))))


def _calibration(held: Scored | None, kind: str, notes: list[str]) -> Calibration | None:
    if held is None:
        return None
    if not _finite(held):
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


def _judged(found: Scored, choice: _Choice) -> Judged:
    scores, labels, positives = found.scores, found.labels, int(found.labels.sum())
    intervals = {"auroc": delong(scores, labels, choice.level)}
    for name in (f"pauc@{choice.fpr:g}", "ap"):
        intervals[name] = bootstrap(name, scores, labels, level=choice.level, draws=choice.draws, seed=choice.seed)
    points = {name: _measured(found, limit, choice) for name, limit in choice.thresholds.items()}
    judged = Judged(positives, len(found) - positives, intervals, points)
    if choice.calibration is None or not _finite(found):
        return judged
    probabilities = choice.calibration(scores)
    return replace(
        judged,
        brier=brier(probabilities, labels),
        reliability=reliability(probabilities, labels, level=choice.level),
        net_benefit=net_benefit(probabilities, labels, DECISIONS),
    )


def _measured(found: Scored, threshold: float, choice: _Choice) -> OperatingPoint:
    point = at_threshold(found.scores, found.labels, threshold, choice.level)
    return point.same_examples() if choice.same else point


def _finite(found: Scored) -> bool:
    return bool(np.isfinite(found.scores).all())


def _point(point: OperatingPoint) -> dict[str, Any]:
    rest = zip(point._fields[1:], point[1:], strict=True)
    return {"threshold": point.threshold, **{name: value._asdict() for name, value in rest}}


def _arrays(found: Reliability | NetBenefit | None) -> dict[str, Any] | None:
    if found is None:
        return None
    columns: dict[str, npt.NDArray[Any]] = found._asdict()
    return {name: column.tolist() for name, column in columns.items()}
