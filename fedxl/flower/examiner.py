"""Evaluation where the data are: each site on its own, answering with as much as it lets go."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedxl import __version__, wire
from fedxl.evaluate import Evaluator, Findings
from fedxl.flower.directory import Directory
from fedxl.flower.envelope import Carrier, Envelope, Failure, Scored, asked
from fedxl.models import Weights
from fedxl.wire import RefusedError

Answer = Findings | str  # or why there is none


@dataclass(frozen=True)
class SiteExaminer:
    """Asks every site that can be reached.

    If all who answer let their scores go, the figures are those of all scores together, as if the data lay in one
    place. Otherwise they are means of the sites' own figures, each counting by its pairs of positive and negative:
    pairs across sites are left out, so that this says nothing of how well scores of different sites compare.
    """

    carrier: Carrier
    directory: Directory
    evaluator: Evaluator
    select: str
    config: str  # what sites are told of the experiment
    run_id: str
    say: Callable[[str], None]

    @property
    def splits(self) -> Collection[str]:
        return ("validation", "test")

    def examine(self, weights: Weights, split: str) -> Findings | None:
        settings = self.directory.settings
        deadline = time.monotonic() + settings.deadline
        nodes = {node: name for name, node in self.directory.gather(settings.sites, deadline).items()}
        facts = {"version": __version__, "run": self.run_id, "config": self.config, "split": split}
        letter = Envelope(facts, wire.flatten(weights))  # never rounded: it is this model that is judged
        answers: dict[str, Answer] = dict.fromkeys(settings.sites, "it is not connected")
        seconds = deadline - time.monotonic()
        for node, answer in asked(self.carrier, dict.fromkeys(nodes, letter), "evaluate", seconds):
            try:
                answers[nodes[node]] = self._read(nodes[node], split, answer)
            except (RefusedError, KeyError, TypeError, ValueError) as error:
                answers[nodes[node]] = str(error)
        return self._together(split, answers)

    def _read(self, name: str, split: str, answer: Envelope | Failure) -> Answer:
        if isinstance(answer, Failure):
            return answer.reason
        facts = answer.facts
        if (facts["site"], facts["split"]) != (name, split):
            raise RefusedError("it answers something else than was asked")
        if facts["kind"] == "nothing":
            return str(facts["why"])[:200]
        if facts["kind"] == "figures":
            return Findings(self._figures(json.loads(str(facts["figures"]))))
        risk, dtype = self.evaluator.risk, self.evaluator.dtype
        like = Scored(torch.zeros(1, *risk.score_shape, dtype=dtype), torch.zeros(1, dtype=torch.uint8))
        scores, labels = wire.restore(like, answer.tensors)
        if len(scores) != len(labels) or bool((labels > 1).any()):
            raise RefusedError("its scores have not a label each, 0 or 1")
        return Findings(self.evaluator.figures_of(scores, labels), scores, labels)

    def _figures(self, told: Mapping[str, Any]) -> dict[str, float]:
        """A site's own figures: the names that we have ourselves, and values that they can have."""
        probe = torch.zeros(2, *self.evaluator.risk.score_shape, dtype=self.evaluator.dtype)
        names = self.evaluator.figures_of(probe, torch.tensor([0, 1])).keys()
        figures = {name: float(told[name]) for name in names}
        for name, value in figures.items():
            counted = name in ("positives", "negatives")
            least, most = (0.0, 1e9) if counted else (-math.inf, math.inf) if name == "risk" else (0.0, 1.0)
            unknown = math.isnan(value) and not counted
            if math.isinf(value) or not (unknown or least <= value <= most):
                raise RefusedError(f"it says that its {name} is {value:g}")
        return figures

    def _together(self, split: str, answers: Mapping[str, Answer]) -> Findings | None:
        told = {name: answer for name, answer in answers.items() if isinstance(answer, Findings)}
        remarks = {
            f"{split}_by_site": {
                name: answer.figures if isinstance(answer, Findings) else answer for name, answer in answers.items()
            }
        }
        found = self._pooled(told) or self._mean(told)
        if found is None:
            reasons = "; ".join(f"{name}: {answer}" for name, answer in answers.items() if isinstance(answer, str))
            self.say(f"nobody could evaluate on {split} data with both classes ({reasons or 'no such data'})")
            return None
        return Findings(found.figures, found.scores, found.labels, remarks)

    def _pooled(self, told: Mapping[str, Findings]) -> Findings | None:
        pairs = [(each.scores, each.labels) for each in told.values()]
        scores = [scores for scores, _ in pairs if scores is not None]
        labels = [labels for _, labels in pairs if labels is not None]
        if not pairs or len(scores) < len(pairs):
            return None
        h, y = torch.cat(scores), torch.cat(labels)
        if not self.evaluator.risk.score_shape and not 0 < int(y.sum()) < len(y):
            return None
        return Findings(self.evaluator.figures_of(h, y), h, y)

    def _mean(self, told: Mapping[str, Findings]) -> Findings | None:
        def mass(figures: Mapping[str, float]) -> float:
            return figures.get("positives", 1.0) * figures.get("negatives", 1.0)

        each = [found.figures for found in told.values() if mass(found.figures) > 0]
        if not each or any(math.isnan(figures[self._selected]) for figures in each):
            return None
        total = sum(map(mass, each))
        names = [name for name in each[0] if name not in ("positives", "negatives")]
        means = {name: sum(mass(figures) * figures[name] for figures in each) / total for name in names}
        counts = ("positives", "negatives") if "positives" in each[0] else ()
        return Findings(means | {name: sum(figures[name] for figures in each) for name in counts})

    @property
    def _selected(self) -> str:
        return self.select.removeprefix("-")
