"""A site's curve: how many of its scores lie in each bin, within what site.toml allows, with noise if it says so.

A server could learn single scores from counts in bins of its choice, or in bins moved a little. So bins follow from
four numbers (`evaluation/bins.py`), most scores must lie within them, and the first request of a run fixes them.
Against a server that moves scores by other weights there is noise; what was spent is on this site's disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedxl.deploy.protocol.envelope import CurveReply
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.site import permission
from fedxl.deploy.storage import locked, recall, remember
from fedxl.errors import UserError, require
from fedxl.evaluation.bins import Bins
from fedxl.evaluation.histogram import Histogram, count
from fedxl.evaluation.noise import LEAST_EPSILON, exactly, noise, written
from fedxl.evaluation.scores import Floats, Scores
from fedxl.risks import XRisk

BINS = "bins.json"  # of a run, by split
SPENT = "epsilon.json"  # of all runs: by curves here, by private training in `account.py`


class Grant(NamedTuple):
    """What this site is about to disclose: counts in these bins, with noise of this epsilon (0: none)."""

    bins: list[Bins]  # of each label
    epsilon: Fraction  # of all that leaves: of all labels together
    spent: Fraction  # with this one, over all runs


def granted(site: SiteFile, facts: Mapping[str, Any], risk: XRisk) -> Grant:
    """The curve that a request asks for, if it may have one. Its epsilon is spent now, whatever happens next."""
    require(risk.single_score, "a curve needs one score per example, and the risk pairs vectors")
    labels = risk.labels or 1
    bins, most = _bins(facts.get("bins"), labels), site.settings.bins
    require(bins[0].bins <= most, f"this site counts its scores in at most {most} bins, not {bins[0].bins}")
    if site.settings.epsilon:
        each_label(exactly(site.settings.epsilon), labels)
    _fix(site.state / str(facts["run"]), str(facts["split"]), bins)
    return Grant(bins, *_spend(site))


def disclosed(
    site: SiteFile, grant: Grant, scores: Scores, times: Floats | None = None
) -> tuple[dict[str, Any], CurveReply]:
    """The facts and the counts of a reply. It says why counts of some labels are withheld: then they are 0.

    times: the public times between which examples are counted, of time to event. Each is in one count, as without.
    """
    parts = scores.by_label().values()
    found = [count(bins.edges(), *one.flat, one.time, times) for bins, one in zip(grant.bins, parts, strict=True)]
    # [2, L, bins], or [2, 1, times, bins]
    counts = np.stack([[one.positives for one in found], [one.negatives for one in found]])
    withheld: dict[str, str] = {}
    if grant.epsilon:
        # Nothing is refused or withheld: that would depend on single examples.
        counts = counts + noise(each_label(grant.epsilon, len(found)), counts.size).reshape(counts.shape)
    else:
        require(bool(np.isfinite(scores.scores).all()), "the scores of this model are not finite")
        for label, one in enumerate(found):
            try:
                _require_harmless(site, one)
            except UserError as why:
                withheld[str(label)] = str(why)
                counts[:, label] = 0
    told = next(iter(withheld.values()), "")
    several = f"this site discloses the counts of no label: of the first one, {told}"
    require(len(withheld) < len(found), several if len(found) > 1 else told)
    facts = {"epsilon": float(grant.epsilon), "spent": float(grant.spent), "withheld": json.dumps(withheld)}
    return facts, CurveReply(*map(torch.from_numpy, counts.copy()))


def each_label(epsilon: Fraction, labels: int) -> Fraction:
    """The epsilon of each label's counts: an example changes up to L of them by one, and their costs add up."""
    share = epsilon / labels
    few = f"epsilon = {float(epsilon):g} leaves {float(share):.1g} to each of {labels} labels, and less than "
    require(share >= written(LEAST_EPSILON), f"{few}{LEAST_EPSILON:g} hides everything; raise epsilon in site.toml")
    return share


def _bins(text: Any, labels: int) -> list[Bins]:
    try:
        content = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise UserError("cannot read the request's bins") from None
    right = isinstance(content, list) and len(content) == labels
    require(right, f"the request must describe the bins of {labels} label(s)")
    found = [Bins.from_json(each) for each in content]
    require(len({each.bins for each in found}) == 1, "the request must ask for as many bins of each label")
    return found


def _fix(folder: Path, split: str, bins: list[Bins]) -> None:
    """The first request of a run decides: counts in two sets of bins, subtracted, would show single scores."""
    described = [each.to_json() for each in bins]
    with locked(folder):
        known = recall(folder / BINS)
        if split not in known:
            remember(folder / BINS, known | {split: described})
            return
        require(known[split] == described, f"this run counts {split} scores in other bins; they stay as they are")


def _spend(site: SiteFile) -> tuple[Fraction, Fraction]:
    """The epsilon of one curve, and of all so far with it: written down before anything leaves."""
    if not site.settings.epsilon:
        return Fraction(0), Fraction(0)
    epsilon, most = exactly(site.settings.epsilon), site.settings.epsilon_total
    with locked(site.state, ".requests.lock"):
        path = site.state / SPENT
        content = recall(path)
        try:
            before = Fraction(content.get("spent", "0"))
        except (ValueError, TypeError, ArithmeticError):
            raise UserError(f"cannot read {path}; its owner must correct or remove it") from None
        spent = before + epsilon
        left = f"this site has spent {float(before):g} of its epsilon_total of {most:g}; another curve takes "
        require(spent <= written(most), f"{left}{float(epsilon):g}")
        remember(path, {**content, "spent": str(spent)})
    return epsilon, spent


def _require_harmless(site: SiteFile, found: Histogram) -> None:
    """Refuse counts of few examples, and bins that look closely at some scores and leave out the others."""
    held = int(found.positives.sum()), int(found.negatives.sum())
    permission.require_enough(site, [held], "a curve", found.times is not None)
    both = (found.positives + found.negatives).reshape(-1, len(found.edges) + 1).sum(0)
    outside = int(both[0] + both[-1])
    require(2 * outside <= int(both.sum()), "most scores of this site lie outside of the bins")
