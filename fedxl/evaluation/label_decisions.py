"""What the scores of several labels mean: a decision for each label that has enough validation data for one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedxl.errors import require
from fedxl.evaluation.decision import Decision, Wish, decide
from fedxl.evaluation.label_counts import LabelCurves, as_scored
from fedxl.evaluation.labelled import LabelScores
from fedxl.evaluation.scored import Floats, Ints, Scored

# Validation examples of each class. Of one label a user sees how many there are; of many labels nobody looks at each,
# and with fewer than these a threshold hangs on single examples.
FEWEST = 5
UNKNOWN = -1  # the class of a label that has no decision


@dataclass(frozen=True, eq=False)
class LabelDecisions:
    """A decision for each label, or why it has none. At least one label has one."""

    labels: Mapping[str, Decision | str]  # in the order of the scores' columns

    @property
    def decided(self) -> dict[str, Decision]:
        return {name: found for name, found in self.labels.items() if isinstance(found, Decision)}

    @property
    def undecided(self) -> dict[str, str]:
        """Why labels have no probability and no class."""
        return {name: found for name, found in self.labels.items() if isinstance(found, str)}

    def probabilities(self, scores: Floats) -> Floats:
        """[n, L], NaN for labels without a decision."""
        found = np.full(scores.shape, math.nan)
        for number, one in enumerate(self.labels.values()):
            if isinstance(one, Decision):
                found[:, number] = one.probabilities(scores[:, number])
        return found

    def classes(self, scores: Floats) -> Ints:
        """[n, L], -1 for labels without a decision."""
        found = np.full(scores.shape, UNKNOWN, np.int64)
        for number, one in enumerate(self.labels.values()):
            if isinstance(one, Decision):
                found[:, number] = one.classes(scores[:, number])
        return found

    def to_json(self) -> dict[str, Any]:
        each = {
            name: {"undecided": found} if isinstance(found, str) else found.to_json()
            for name, found in self.labels.items()
        }
        return {"labels": each}

    @classmethod
    def from_json(cls, content: Any, names: Sequence[str]) -> LabelDecisions:
        """What `to_json` gave of labels with these names; one line if it is something else."""
        found = content.get("labels") if isinstance(content, dict) else None
        right = isinstance(found, dict) and found.keys() == set(names)
        require(right, f"the decision of several labels must have one for each of {', '.join(names)}")
        assert isinstance(found, dict)
        return cls({name: _one(name, found[name]) for name in names})


Meaning = Decision | LabelDecisions  # of one label, of several


def _one(name: str, content: Any) -> Decision | str:
    why = content.get("undecided") if isinstance(content, dict) else None
    require(why is None or isinstance(why, str), f"why the label {name} has no decision must be a text")
    return Decision.from_json(content) if why is None else str(why)


def meaning_from_json(content: Any, names: Sequence[str]) -> Meaning:
    """A decision as an exported model has it; names: of several labels, empty: of one."""
    return LabelDecisions.from_json(content, names) if names else Decision.from_json(content)


def why_undecided(found: Scored | None) -> str:
    """Why the validation scores of a label cannot say what a score means; empty if they can."""
    if found is None or not len(found):
        return "it is known of no validation example"
    if not np.isfinite(found.scores).all():
        return "its validation scores are not finite"
    positives = int(found.labels.sum())
    for name, count in (("positive", positives), ("negative", len(found) - positives)):
        if count < FEWEST:
            return f"{count} of its {len(found):,} validation examples are {name}, and {FEWEST} are the fewest"
    return ""


def deciding_labels(scored: Mapping[str, LabelScores], counts: Mapping[str, LabelCurves]) -> dict[str, Scored]:
    """The validation scores of each label; where nobody told them, those that sites' counts in bins stand for."""
    held = scored.get("validation")
    return as_scored(counts.get("validation", {})) if held is None else held.by_label()


def decide_labels(names: Sequence[str], found: Mapping[str, Scored], wish: Wish) -> tuple[LabelDecisions | None, str]:
    """Calibration and threshold for each label on its validation scores; None, and why, if no label can have them.

    names: of the scores' columns, in their order. Of some labels nobody may have told anything.
    """
    if not found:
        return None, "the run kept no validation scores"
    decisions = LabelDecisions({name: _decided(found.get(name), wish) for name in names})
    return (decisions, "") if decisions.decided else (None, f"no label has enough: {reasons(decisions.undecided)}")


def _decided(found: Scored | None, wish: Wish) -> Decision | str:
    why = why_undecided(found)
    if why or found is None:
        return why
    return decide({"validation": found}, wish)


def reasons(undecided: Mapping[str, str]) -> str:
    """Which labels have no decision, and why, for one line."""
    return "; ".join(f"{name}: {why}" for name, why in undecided.items())
