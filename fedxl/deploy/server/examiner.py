"""Evaluation where the data are: each site evaluates on its own data, and replies with what it discloses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedxl import wire
from fedxl.deploy.protocol.envelope import Envelope, Failure, RunHeader, ScoreReply, exchange
from fedxl.deploy.server.curves import MOST_COUNTED, ONE, GridBook, read_curve
from fedxl.deploy.server.directory import Directory, relevant_queries
from fedxl.errors import first_line, printable
from fedxl.evaluation import binned, label_counts
from fedxl.evaluation.binned import FROM_COUNTS, Binned
from fedxl.evaluation.grid import Bins, Grid, Spread, bins_to_json
from fedxl.metrics import COUNTS, key, value_of
from fedxl.models import Weights
from fedxl.training.evaluate import Evaluator, Findings, Origin, pairs_in
from fedxl.wire import RefusedError

SiteFinding = Findings | str  # or why there is none
EPSILON = "epsilon"  # in remarks: what differential privacy a curve has cost its site
WITHHELD = "withheld"  # in remarks: labels whose counts a site keeps to itself, and why
QUERIES = "queries"  # in remarks: how many queries with a relevant item a site's metrics rest on
ROUNDING = 1e-9  # an area of 1 may come out a last bit above it
MOST_SCORES = 200_000  # of one site: the risk is of all pairs, and a server must not be kept busy for ever


@dataclass(frozen=True)
class SiteExaminer:
    """Asks every site that can be reached.

    If all sites disclose scores, the metrics are those of all scores together. If some disclose curves instead, they
    are those of all counts together, with bounds. Otherwise they are means of the sites' own metrics, weighted by
    pairs of a positive and a negative, or by queries: they do not say how scores of different sites compare.
    """

    directory: Directory
    evaluator: Evaluator
    select: str
    head: RunHeader
    grids: GridBook
    pooled: Callable[[], Spread | None] = lambda: None  # where pooled scores lie, if it is known

    @property
    def splits(self) -> Collection[str]:
        return ("validation", "test")

    def examine(self, weights: Weights, split: str) -> Findings:
        settings, carrier = self.directory.settings, self.directory.carrier
        nodes = {node: name for name, node in self.directory.gather(settings.sites).items()}
        # Never rounded: it is this model that is judged.
        bins = self.grids.bins_of(split, self.evaluator.risk.pairing.labels, self.pooled())
        facts = {**self.head.facts, "split": split, "grid": json.dumps(bins_to_json(bins))}
        request = Envelope(facts, wire.flatten(weights))
        replies: dict[str, SiteFinding] = dict.fromkeys(settings.sites, "it is not connected")
        for node, reply in exchange(carrier, dict.fromkeys(nodes, request), "evaluate", settings.deadline):
            try:
                replies[nodes[node]] = self._read(nodes[node], split, bins, reply)
            except Exception as error:  # whatever a damaged or hostile reply may raise
                replies[nodes[node]] = f"its reply is invalid: {printable(first_line(error))}"
        return self._together(split, bins, replies)

    def _read(self, name: str, split: str, bins: Bins, reply: Envelope | Failure) -> SiteFinding:
        if isinstance(reply, Failure):
            return printable(reply.reason)
        facts = reply.facts
        if (facts["site"], facts["split"]) != (name, split):
            raise RefusedError("it replies to another request")
        if facts["kind"] == "nothing":
            return printable(facts["why"])
        if facts["kind"] == "metrics":
            values = self._metrics(json.loads(str(facts["metrics"])))
            counted = sum(values.get(key, 0.0) for key in COUNTS)  # of several labels: of all of them together
            self.directory.require_within_limit(name, counted / max(1, self.evaluator.risk.labels))
            ranked = self.evaluator.risk.pairing.ranked
            counted_queries = relevant_queries(facts.get("queries"), int(values["positives"])) if ranked else 0
            return Findings(values, remarks={QUERIES: counted_queries} if ranked else {})
        if facts["kind"] == "curve":
            return self._curve(name, bins, reply)
        risk, dtype = self.evaluator.risk, self.evaluator.dtype
        if risk.pairing.ranked:
            raise RefusedError("it sends scores, and the risk ranks items within queries")
        kind = torch.int8 if risk.labels else torch.uint8
        like = ScoreReply(
            torch.zeros(1, *risk.score_shape, dtype=dtype),
            torch.zeros(1, *([risk.labels] if risk.labels else []), dtype=kind),
        )
        scores, labels = wire.restore(like, reply.tensors, MOST_SCORES)
        least = -1 if risk.labels else 0
        if len(scores) != len(labels) or bool(((labels > 1) | (labels < least)).any()):
            raise RefusedError("its scores do not have one label each, 0 or 1")
        self.directory.require_within_limit(name, len(scores))
        return Findings(self.evaluator.metrics_of(scores, labels), scores, labels)

    def _curve(self, name: str, bins: Bins, reply: Envelope) -> Findings:
        """A site's counts: in its own findings, those of one label have the name `ONE`."""
        risk = self.evaluator.risk
        if risk.score_shape and isinstance(bins, Grid):
            raise RefusedError("it counts scores, and the risk pairs vectors")
        found = read_curve(reply, bins, risk.pairing.labels, self.directory.limits.get(name))
        if not found.epsilon:
            self.directory.require_within_limit(name, max(sum(each.totals()) for each in found.binned.values()))
        counted = {label: {name: each} for label, each in found.binned.items()}
        values = label_counts.judge(self.evaluator.metrics, counted, noise=False).values
        remarks: dict[str, Any] = {EPSILON: {"curve": found.epsilon, "spent": found.spent}} if found.epsilon else {}
        remarks |= {WITHHELD: found.withheld} if found.withheld else {}
        return Findings(values, remarks=remarks, label_curves=counted)

    def _metrics(self, reported: Mapping[str, Any]) -> dict[str, float]:
        """A site's own metrics: the names that we have ourselves, and values that they can have."""
        ranges = self.evaluator.ranges
        counts = COUNTS if self.evaluator.risk.single_score else ()
        values = {name: float(reported[name]) for name in (*ranges, *counts)}
        for name, value in values.items():
            counted = name in counts
            low, high = (0.0, MOST_COUNTED) if counted else ranges[name]
            undefined = math.isnan(value) and not counted
            partial = counted and not value.is_integer()
            if math.isinf(value) or partial or not (undefined or low - ROUNDING <= value <= high + ROUNDING):
                raise RefusedError(f"it reports {name} = {value:g}")
        return values

    def _together(self, split: str, bins: Bins, replies: Mapping[str, SiteFinding]) -> Findings:
        reported = {name: reply for name, reply in replies.items() if isinstance(reply, Findings)}
        remarks: dict[str, Any] = {
            f"{split}_by_site": {
                name: reply.metrics if isinstance(reply, Findings) else reply for name, reply in replies.items()
            }
        }
        epsilons = {name: reply.remarks[EPSILON] for name, reply in reported.items() if EPSILON in reply.remarks}
        remarks |= {f"{split}_{EPSILON}": epsilons} if epsilons else {}
        remarks |= self._withheld(split, reported)
        if all(reply.scores is not None for reply in reported.values()):
            found, basis = self._pooled(split, reported), "scores"
        elif all(reply.scores is not None or reply.label_curves for reply in reported.values()):
            found, basis = self._added(split, bins, reported), "curves"
        else:
            found, basis = self._mean(reported), "metrics"
        if found is None:
            reasons = "; ".join(f"{name}: {reply}" for name, reply in replies.items() if isinstance(reply, str))
            if basis == "curves" and key(self.select).partition("@")[0] not in FROM_COUNTS:
                reasons = f"curves do not give {key(self.select)}; select one of {', '.join(FROM_COUNTS)}"
            self.directory.say(
                f"no site could evaluate on {split} data with both classes ({reasons or 'no such data'})"
            )
            return Findings({}, remarks=remarks)
        remarks |= {f"{split}_from": f"{basis} of {', '.join(sorted(reported))}", **found.remarks}
        return replace(found, remarks=remarks)

    def _withheld(self, split: str, reported: Mapping[str, Findings]) -> dict[str, Any]:
        """Labels whose counts sites keep to themselves; said once a run, with the test data."""
        found = {name: reply.remarks[WITHHELD] for name, reply in reported.items() if WITHHELD in reply.remarks}
        if split == "test":
            for name, labels in found.items():
                told = "; ".join(f"{label}: {why}" for label, why in labels.items())
                self.directory.say(f"{name} withholds its counts of some labels: {told}")
        return {f"{split}_{WITHHELD}": found} if found else {}

    def _pooled(self, split: str, reported: Mapping[str, Findings]) -> Findings | None:
        scores = [found.scores for found in reported.values() if found.scores is not None]
        labels = [found.labels for found in reported.values() if found.labels is not None]
        if not scores:
            return None
        h, y = torch.cat(scores), torch.cat(labels)
        origin = Origin(np.repeat(np.arange(len(scores)), list(map(len, scores))), list(reported))
        found = self.evaluator.findings(h, y, split, origin)
        return None if math.isnan(value_of(found.metrics, self.select)) else found

    def _added(self, split: str, bins: Bins, reported: Mapping[str, Findings]) -> Findings | None:
        """Metrics of the counts of all sites together, of several labels their means. Scores are counted here."""
        names = self.evaluator.risk.pairing.labels
        each = [found.label_curves or self._count(name, bins, found) for name, found in reported.items()]
        # In the order of the outputs. A label that every site withholds is not there.
        labels = [name for name in names or [ONE] if any(name in found for found in each)]
        parts = {label: {site: b for found in each for site, b in found.get(label, {}).items()} for label in labels}
        self.grids.latest = {label: binned.pooled(sites.values()) for label, sites in parts.items()}
        counted = label_counts.judge(self.evaluator.metrics, parts)
        remarks: dict[str, Any] = {f"{split}_by_label": counted.by_label} if names else {}
        remarks[f"{split}_bounds"] = counted.mean_bounds
        remarks |= {f"{split}_bounds_by_label": counted.bounds} if names else {}
        remarks |= {f"{split}_noise": counted.noise} if counted.noise else {}
        if math.isnan(value_of(counted.values, self.select)):
            return None
        kept: dict[str, Any] = {"label_curves": parts} if names else {"curves": parts[ONE]}
        return Findings(counted.values, remarks=remarks, **kept)

    def _count(self, site: str, bins: Bins, found: Findings) -> dict[str, dict[str, Binned]]:
        """The scores that a site discloses, in bins, by label and site."""
        assert found.scores is not None
        assert found.labels is not None
        if isinstance(bins, Grid):
            h, y = found.scores.double().numpy(), found.labels.long().numpy()
            return {ONE: {site: binned.count(bins.edges(), h, y)}}
        each = self.evaluator.label_scores(found.scores, found.labels).by_label()
        return {
            label: {site: binned.count(grid.edges(), one.scores, one.labels)}
            for grid, (label, one) in zip(bins, each.items(), strict=True)
        }

    def _mean(self, reported: Mapping[str, Findings]) -> Findings | None:
        """Of those who have the metric that is asked for: with one class at a site there is none."""
        some = [found for found in reported.values() if not math.isnan(value_of(found.metrics, self.select))]
        each = [found.metrics for found in some]
        pairs = [pairs_in(values) for values in each]
        queries = [float(found.remarks.get(QUERIES, 0)) for found in some]
        of_queries = {metric.name for metric in self.evaluator.metrics if metric.metric.by_query}
        of_queries |= {"risk"} if self.evaluator.risk.pairing.ranked else set()
        if not sum(queries if key(self.select) in of_queries else pairs):
            return None
        common = [name for name in each[0] if all(name in values for values in each)]  # a curve gives no risk
        counts = [name for name in COUNTS if name in common]
        means = {
            name: _weighted([values[name] for values in each], queries if name in of_queries else pairs)
            for name in common
            if name not in counts
        }
        return Findings(means | {name: sum(values[name] for values in each) for name in counts})


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    """Their mean. One that counts for nothing may be undefined."""
    total = sum(weights)
    counted = [weight * value for weight, value in zip(weights, values, strict=True) if weight]
    return sum(counted) / total if total else math.nan
