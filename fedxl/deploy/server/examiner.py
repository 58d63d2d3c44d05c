"""Evaluation where the data are: each site evaluates on its own data, and replies with what it discloses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedxl import wire
from fedxl.data.examples import Examples
from fedxl.deploy.protocol.envelope import NO_EVALUATION, CurveReply, Envelope, Failure, ScoreReply
from fedxl.deploy.provision.settings import UNDISCLOSED
from fedxl.deploy.server.backbone import Backbone
from fedxl.deploy.server.directory import Directory, relevant_queries
from fedxl.errors import RefusedError, UserError, first_line, printable, refuse, require
from fedxl.evaluation import histogram
from fedxl.evaluation.bins import Bins, Spread
from fedxl.evaluation.hazard import HazardSums, pooled
from fedxl.evaluation.histogram import FROM_COUNTS, Histogram, rounded
from fedxl.evaluation.noise import exactly, variance
from fedxl.files import write_json
from fedxl.metrics import COUNTS, key, value_of
from fedxl.models import Weights
from fedxl.sampling import Floats
from fedxl.training.choice import pairs_in
from fedxl.training.evaluate import Evaluator, Findings

SiteFinding = Findings | str  # or why there is none
EPSILON = "epsilon"  # in remarks: what differential privacy a curve has cost its site
WITHHELD = "withheld"  # in remarks: labels whose counts a site keeps to itself, and why
HAZARD = "hazard"  # in remarks: a site's sums over scores at risk, of time to event
QUERIES = "queries"  # in remarks: how many queries with a relevant item a site's metrics rest on
ROUNDING = 1e-9  # an area of 1 may come out a last bit above it
MOST_SCORES = 200_000  # of one site: the risk is of all pairs, and a server must not be kept busy for ever
MOST_COUNTED = 1e9  # examples of a class that a site may say it has, where no approved entry says less
FAR = 1e4  # times the spread of pooled scores before training has begun
IMPOSSIBLE = 64  # noise of so many times 1 / epsilon: its chance is below 1e-27


class BinsOfRun:
    """The bins of a run, by split and label. Sites hold on to the first that they are sent, and so does the server.

    They follow from what sites have disclosed before: the last counts of another split, or pooled scores. They reach
    far beyond these, because training changes the size of scores. Where nothing is known, they fit any scores.
    """

    def __init__(self, path: Path, bins: int) -> None:
        self.path, self.bins = path, bins
        self.known = self._load()
        self.latest: Mapping[str, Histogram] = {}  # counts of the split that was evaluated last, by label

    def of(self, split: str, labels: Sequence[str], pooled: Spread | None = None) -> list[Bins]:
        """Those of a split, one for each label. pooled: where pooled scores lie."""
        if split not in self.known:
            self.known[split] = [self._new(label, pooled) for label in labels]
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.path, {name: [each.to_json() for each in bins] for name, bins in self.known.items()})
            except OSError as error:
                raise UserError(f"cannot write to {self.path}: {error.strerror}") from None
        found = self.known[split]
        require(len(found) == len(labels), f"{self.path} holds bins of other labels; remove the folder to begin anew")
        return found

    def _new(self, label: str, pooled: Spread | None) -> Bins:
        latest = self.latest.get(label)
        if latest is not None and sum(latest.totals()) >= 1:
            return latest.bins_around(self.bins)
        return Bins(self.bins) if pooled is None else Bins.around(self.bins, pooled, FAR)

    def _load(self) -> dict[str, list[Bins]]:
        try:
            content = json.loads(self.path.read_text())
            return {str(split): [Bins.from_json(each) for each in bins] for split, bins in content.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(f"cannot read {self.path}: {error}; remove the folder to begin anew") from None


class Disclosed(NamedTuple):
    """A site's counts, and what differential privacy they have cost it; 0: they have no noise."""

    histograms: dict[str, Histogram]  # by label, without those that it withholds
    withheld: dict[str, str]  # why, by label
    epsilon: float  # of all labels together, an L-th for each
    spent: float  # by all of its curves so far, over all runs


def read_curve(
    reply: Envelope, bins: Sequence[Bins], labels: Sequence[str], limit: float | None, times: Floats | None = None
) -> Disclosed:
    """A site's counts, if it can have them.

    limit: the most examples that the site is approved for, None: any. times: between which it counts examples.
    """
    rows = () if times is None else times.shape
    empty = torch.zeros(len(bins), *rows, bins[0].bins, dtype=torch.int64)
    received = wire.restore(CurveReply(empty, empty), reply.tensors)
    epsilon, spent = (_number(reply.facts.get(name)) for name in ("epsilon", "spent"))
    refuse(spent < epsilon, "it says that it spent less than its curve takes")
    if epsilon:
        exactly(epsilon)
    withheld = _withheld(reply.facts.get("withheld"), labels)
    found = {
        label: _counts(CurveReply(*(counts[number] for counts in received)), one, epsilon / len(bins), limit, times)
        for number, (label, one) in enumerate(zip(labels, bins, strict=True))
        if label not in withheld
    }
    refuse(not found, "it discloses the counts of no label")
    return Disclosed(found, withheld, epsilon, spent)


def _withheld(text: Any, names: Sequence[str]) -> dict[str, str]:
    """Why a site withholds labels, which it names by their numbers."""
    numbers = {str(number): name for number, name in enumerate(names)}
    try:
        return {numbers[number]: printable(why) for number, why in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise RefusedError("it does not say which labels it withholds") from None


def _counts(received: CurveReply, bins: Bins, epsilon: float, limit: float | None, times: Floats | None) -> Histogram:
    """Counts that a site can have, with noise of this epsilon in each; 0: without."""
    least = -IMPOSSIBLE * (1 + 1 / epsilon) if epsilon else 0
    for name, counts in received._asdict().items():
        lowest = int(counts.min())
        most = max(sum(counts.flatten().tolist()), int(counts.max()))  # whole numbers of any size: no overflow
        refuse(lowest < least, f"it counts {lowest} {name} in a bin")
        refuse(most > MOST_COUNTED, f"it counts {most} {name}")
    positives, negatives = (each.numpy() for each in received)
    found = Histogram(bins.edges(), positives, negatives, variance(epsilon), times)
    return _bounded(found, limit) if epsilon else found


def _bounded(found: Histogram, limit: float | None) -> Histogram:
    """Noisy counts of one site as they enter the sum of all: not negative, and no more than the site is approved for.

    With raw counts, a site that claims much noise could take away the counts of others. A total above the limit may
    be noise, and is no reason to leave the site out.
    """
    found = found.without_noise()
    total = sum(found.totals())
    if limit is None or total <= limit:
        return found
    share = limit / total
    return replace(found, positives=rounded(found.positives * share), negatives=rounded(found.negatives * share))


def _number(value: Any) -> float:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST_COUNTED
    refuse(not known or not math.isfinite(value) or value < 0, "it does not say what epsilon its curve has")
    return float(value)


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
    backbone: Backbone
    bins: BinsOfRun
    pooled: Callable[[], Spread | None] = lambda: None  # where pooled scores lie, if it is known
    told: set[str] = field(default_factory=set)  # why there were no metrics: each reason is said once

    @property
    def splits(self) -> Collection[str]:
        return ("validation", "test")

    @property
    def labels(self) -> Sequence[str]:
        """The names of all labels; one label is called ""."""
        return self.evaluator.risk.pairing.labels or ("",)

    def examine(self, weights: Weights, split: str) -> Findings:
        settings = self.directory.settings
        nodes = {node: name for name, node in self.directory.gather(settings.sites).items()}
        # Never rounded: it is this model that is judged.
        bins = self.bins.of(split, self.labels, self.pooled())
        facts = {**self.backbone.head.facts, "split": split, "bins": json.dumps([each.to_json() for each in bins])}
        request = Envelope(facts, wire.flatten(weights))
        replies: dict[str, SiteFinding] = {name: self.directory.why_absent(name) for name in settings.sites}
        for node, reply in self.backbone.exchange(dict.fromkeys(nodes, request), "evaluate", settings.deadline):
            try:
                replies[nodes[node]] = self._read(nodes[node], split, bins, reply)
            except Exception as error:  # whatever a damaged or hostile reply may raise
                replies[nodes[node]] = f"its reply is invalid: {printable(first_line(error))}"
        return self._together(split, bins, replies)

    def _read(self, name: str, split: str, bins: Sequence[Bins], reply: Envelope | Failure) -> SiteFinding:
        if isinstance(reply, Failure):
            return printable(reply.reason)
        facts = reply.facts
        refuse((facts["site"], facts["split"]) != (name, split), "it replies to another request")
        if facts["kind"] == "nothing":
            return printable(facts["why"])
        if facts["kind"] == "metrics":
            values = self._metrics(json.loads(str(facts["metrics"])))
            counted = sum(values.get(key, 0.0) for key in COUNTS)  # of several labels: of all of them together
            self.directory.require_within_limit(name, counted / len(self.labels))
            if "hazard" in facts:
                return Findings(values, remarks={HAZARD: self._sums(facts["hazard"], values)})
            if not self.evaluator.risk.pairing.ranked:
                return Findings(values)
            queries = relevant_queries(facts.get("queries"), int(values["positives"]))
            return Findings(values, remarks={QUERIES: queries})
        if facts["kind"] == "curve":
            return self._curve(name, bins, reply)
        risk, dtype = self.evaluator.risk, self.evaluator.dtype
        refuse(risk.pairing.ranked, "it sends scores, and the risk ranks items within queries")
        like = ScoreReply(
            torch.zeros(1, *risk.score_shape, dtype=dtype), torch.zeros(1, len(self.labels), dtype=torch.int8)
        )
        h, y = wire.restore(like, reply.tensors, MOST_SCORES)
        least = -1 if risk.labels else 0
        if len(h) != len(y) or bool(((y > 1) | (y < least)).any()):
            raise RefusedError("its scores do not have one label each, 0 or 1")
        self.directory.require_within_limit(name, len(h))
        return self.evaluator.findings(h, Examples(h, y.long()))

    def _curve(self, name: str, bins: Sequence[Bins], reply: Envelope) -> Findings:
        """A site's counts, in its own findings."""
        refuse(not self.evaluator.risk.single_score, "it counts scores, and the risk pairs vectors")
        pairing = self.evaluator.risk.pairing
        refuse(pairing.timed and pairing.public_times is None, "it counts times, and there are no public ones")
        found = read_curve(reply, bins, self.labels, self.directory.limit(name), pairing.public_times)
        if not found.epsilon:
            most = max(sum(each.totals()) for each in found.histograms.values())
            self.directory.require_within_limit(name, most)
        counted = {label: {name: each} for label, each in found.histograms.items()}
        values = histogram.measure(self.evaluator.metrics, counted, noise=False).values
        remarks: dict[str, Any] = {EPSILON: {"curve": found.epsilon, "spent": found.spent}} if found.epsilon else {}
        remarks |= {WITHHELD: found.withheld} if found.withheld else {}
        return Findings(values, remarks=remarks, histograms=counted)

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

    def _sums(self, text: Any, values: Mapping[str, float]) -> HazardSums:
        """A site's part of the baseline hazard: over the times that all sites know, of all events that it counts."""
        grid = self.evaluator.risk.pairing.public_times
        found = HazardSums.from_json(json.loads(str(text)))
        same = grid is not None and np.array_equal(found.grid, grid) and found.centre == 0
        refuse(not same or float(found.events.sum()) != values["positives"], "its hazard is not that of these times")
        return found

    def _together(self, split: str, bins: Sequence[Bins], replies: Mapping[str, SiteFinding]) -> Findings:
        reported = {name: reply for name, reply in replies.items() if isinstance(reply, Findings)}
        remarks: dict[str, Any] = {
            f"{split}_by_site": {
                name: reply.metrics if isinstance(reply, Findings) else reply for name, reply in replies.items()
            }
        }
        for kind in (EPSILON, WITHHELD):
            if told := {name: reply.remarks[kind] for name, reply in reported.items() if kind in reply.remarks}:
                remarks[f"{split}_{kind}"] = told
        if sums := [reply.remarks[HAZARD] for reply in reported.values() if HAZARD in reply.remarks]:
            remarks[f"{split}_{HAZARD}"] = pooled(sums).to_json()
        if split == "test":  # once a run
            for name, labels in remarks.get(f"{split}_{WITHHELD}", {}).items():
                why = "; ".join(f"{label}: {reason}" for label, reason in labels.items())
                self.directory.say(f"{name} withholds its counts of some labels: {why}")
        if all(reply.outputs is not None for reply in reported.values()):
            found, basis = self._pooled(split, reported), "scores"
        elif all(reply.scores is not None or reply.histograms for reply in reported.values()):
            found, basis = self._added(split, bins, reported), "curves"
        else:
            found, basis = self._mean(reported), "metrics"
        if found is None:
            reasons = "; ".join(f"{name}: {reply}" for name, reply in replies.items() if isinstance(reply, str))
            if basis == "curves" and key(self.select).partition("@")[0] not in FROM_COUNTS:
                reasons = f"curves do not give {key(self.select)}; select one of {', '.join(FROM_COUNTS)}"
            line = f"no site could evaluate on {split} data with both classes ({reasons or 'no such data'})"
            if all(reply == NO_EVALUATION for reply in replies.values()):
                line = UNDISCLOSED
            if line not in self.told:
                self.directory.say(line)
                self.told.add(line)
            return Findings({}, remarks=remarks)
        remarks |= {f"{split}_from": f"{basis} of {', '.join(sorted(reported))}", **found.remarks}
        return replace(found, remarks=remarks)

    def _pooled(self, split: str, reported: Mapping[str, Findings]) -> Findings | None:
        each = {name: found.outputs for name, found in reported.items() if found.outputs is not None}
        if not each:
            return None
        h, y = (torch.cat(columns) for columns in zip(*each.values(), strict=True))
        site = np.repeat(np.arange(len(each)), [len(outputs) for outputs, _ in each.values()])
        data = Examples(h.reshape(len(h), -1), y.reshape(len(h), -1), site, tuple(each))
        found = self.evaluator.findings(h, data, split)
        return None if math.isnan(value_of(found.metrics, self.select)) else found

    def _added(self, split: str, bins: Sequence[Bins], reported: Mapping[str, Findings]) -> Findings | None:
        """Metrics of the counts of all sites together, and their means over labels. Scores are counted here."""
        each = [found.histograms or self._count(name, bins, found) for name, found in reported.items()]
        # In the order of the outputs. A label that every site withholds is not there.
        labels = [label for label in self.labels if any(label in found for found in each)]
        parts = {label: {site: h for found in each for site, h in found.get(label, {}).items()} for label in labels}
        self.bins.latest = {label: histogram.pooled(sites.values()) for label, sites in parts.items()}
        counted = histogram.measure(self.evaluator.metrics, parts)
        if math.isnan(value_of(counted.values, self.select)):
            return None
        remarks: dict[str, Any] = {f"{split}_bounds": counted.mean_bounds}
        if self.evaluator.risk.labels:
            remarks |= {f"{split}_by_label": counted.by_label, f"{split}_bounds_by_label": counted.bounds}
        if counted.noise:
            remarks[f"{split}_noise"] = counted.noise
        return Findings(counted.values, remarks=remarks, histograms=parts)

    def _count(self, site: str, bins: Sequence[Bins], found: Findings) -> dict[str, dict[str, Histogram]]:
        """The scores that a site discloses, in bins, by label and site."""
        assert found.scores is not None
        each = found.scores.by_label().items()
        return {
            label: {site: histogram.count(one.edges(), *scores.flat)}
            for one, (label, scores) in zip(bins, each, strict=True)
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
        found = {}
        for name in common:
            column = [values[name] for values in each]
            weights = queries if name in of_queries else pairs
            found[name] = sum(column) if name in COUNTS else _mean(column, weights)
        return Findings(found)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Their weighted mean. One that counts for nothing may be undefined."""
    total = sum(weights)
    counted = [weight * value for weight, value in zip(weights, values, strict=True) if weight]
    return sum(counted) / total if total else math.nan
