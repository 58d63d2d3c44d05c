"""A site's curve: how many of its scores lie in each bin, within what site.toml allows, with noise if it says so.

A server could learn single scores from counts in bins of its choice, or in bins moved a little. So bins follow from
four numbers (`evaluation/grid.py`), most scores must lie within them, and the first request of a run fixes them.
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
from torch import Tensor

from fedxl.deploy.protocol.envelope import CurveReply
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.storage import locked, recall, remember
from fedxl.errors import UserError, require
from fedxl.evaluation.binned import Binned, count
from fedxl.evaluation.grid import Bins, Grid, bins_from_json, bins_to_json
from fedxl.evaluation.noise import LEAST_EPSILON, exactly, noise, written
from fedxl.risks import XRisk

GRIDS = "grids.json"  # of a run, by split
SPENT = "epsilon.json"  # of all runs


class Grant(NamedTuple):
    """What this site is about to disclose: counts in these bins, with noise of this epsilon (0: none)."""

    bins: Bins
    epsilon: Fraction  # of all that leaves; of several labels, of all together
    spent: Fraction  # with this one, over all runs


def granted(site: SiteFile, facts: Mapping[str, Any], risk: XRisk) -> Grant:
    """The curve that a request asks for, if it may have one. Its epsilon is spent now, whatever happens next."""
    require(risk.single_score, "a curve needs one score an example, and the risk pairs vectors")
    bins, most = _bins(facts.get("grid"), risk.labels), site.settings.bins
    asked = bins.bins if isinstance(bins, Grid) else bins[0].bins
    require(asked <= most, f"this site counts its scores in at most {most} bins, not {asked}")
    if site.settings.epsilon and risk.labels:
        each_label(exactly(site.settings.epsilon), risk.labels)
    _fix(site.state / str(facts["run"]), str(facts["split"]), bins)
    return Grant(bins, *_spend(site))


def disclosed(site: SiteFile, grant: Grant, scores: Tensor, labels: Tensor) -> tuple[dict[str, Any], CurveReply]:
    """The facts and the counts of a reply. Of several labels, it says why some are withheld, whose counts are 0."""
    several = isinstance(grant.bins, tuple)
    grids = grant.bins if isinstance(grant.bins, tuple) else (grant.bins,)
    h = scores.double().numpy().reshape(len(scores), len(grids))
    y = (labels if several else (labels > 0)[:, None]).long().numpy()  # -1: not known
    found = [
        count(grid.edges(), h[y[:, label] >= 0, label], y[y[:, label] >= 0, label])
        for label, grid in enumerate(grids)
    ]
    counts = np.stack([[one.positives for one in found], [one.negatives for one in found]])  # [2, L, bins]
    withheld: dict[str, str] = {}
    if grant.epsilon:
        # Nothing is refused or withheld: that would depend on single examples.
        counts = counts + noise(each_label(grant.epsilon, len(grids)), counts.size).reshape(counts.shape)
    else:
        require(bool(np.isfinite(h).all()), "the scores of this model are not finite")
        for label, one in enumerate(found):
            try:
                _require_harmless(site, one)
            except UserError as why:
                if not several:
                    raise
                withheld[str(label)] = str(why)
                counts[:, label] = 0
    told = next(iter(withheld.values()), "")
    require(len(withheld) < len(grids), f"this site discloses the counts of no label: of the first one, {told}")
    facts = {"epsilon": float(grant.epsilon), "spent": float(grant.spent)}
    reply = CurveReply(*map(torch.from_numpy, (counts if several else counts[:, 0]).copy()))
    return {**facts, "withheld": json.dumps(withheld)} if several else facts, reply


def each_label(epsilon: Fraction, labels: int) -> Fraction:
    """The epsilon of each label's counts: an example changes up to L of them by one, and their costs add up."""
    share = epsilon / labels
    few = f"epsilon = {float(epsilon):g} leaves {float(share):.1g} to each of {labels} labels, and less than "
    require(share >= written(LEAST_EPSILON), f"{few}{LEAST_EPSILON:g} hides everything; raise epsilon in site.toml")
    return share


def _bins(text: Any, labels: int) -> Bins:
    try:
        content = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise UserError("cannot read the request's bins") from None
    return bins_from_json(content, labels)


def _fix(folder: Path, split: str, bins: Bins) -> None:
    """The first request of a run decides: counts in two sets of bins, subtracted, would show single scores."""
    with locked(folder):
        known = recall(folder / GRIDS)
        if split not in known:
            remember(folder / GRIDS, known | {split: bins_to_json(bins)})
            return
        same = known[split] == bins_to_json(bins)
        require(same, f"this run counts {split} scores in other bins; they stay as they are")


def _spend(site: SiteFile) -> tuple[Fraction, Fraction]:
    """The epsilon of one curve, and of all so far with it: written down before anything leaves."""
    if not site.settings.epsilon:
        return Fraction(0), Fraction(0)
    epsilon, most = exactly(site.settings.epsilon), site.settings.epsilon_total
    with locked(site.state, ".requests.lock"):
        path = site.state / SPENT
        try:
            before = Fraction(recall(path).get("spent", "0"))
        except (ValueError, TypeError, ArithmeticError):
            raise UserError(f"cannot read {path}; its owner must correct or remove it") from None
        spent = before + epsilon
        left = f"this site has spent {float(before):g} of its epsilon_total of {most:g}; another curve takes "
        require(spent <= written(most), f"{left}{float(epsilon):g}")
        remember(path, {"spent": str(spent)})
    return epsilon, spent


def _require_harmless(site: SiteFile, found: Binned) -> None:
    """Refuse counts of few examples, and bins that look closely at some scores and leave out the others."""
    for name, counts in (("positives", found.positives), ("negatives", found.negatives)):
        number, least = int(counts.sum()), site.settings.fewest
        few = 0 < number < least
        require(not few, f"this site has fewer than {least} {name}, too few for a curve (fewest)")
    both = found.positives + found.negatives
    outside = int(both[0] + both[-1])
    require(2 * outside <= int(both.sum()), "most scores of this site lie outside of the bins")
