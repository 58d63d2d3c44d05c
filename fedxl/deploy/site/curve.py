"""A site's curve: how many of its scores lie in each bin, within what site.toml allows, with noise if it says so.

A server could learn single scores from counts in bins of its choice, or by asking again with bins moved a little. So
the bins follow from four numbers (`evaluation/grid.py`), most scores must lie within them, and the first request of a
run fixes them. A server that moves scores by other weights instead is not stopped by that: noise is for that, and
what noise there was is on this site's disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedxl.deploy.protocol.envelope import CurveReply
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.site.locks import locked
from fedxl.deploy.site.permission import remember
from fedxl.errors import UserError, require
from fedxl.evaluation.binned import Binned, count
from fedxl.evaluation.grid import Bins, Grid, bins_from_json, bins_to_json
from fedxl.evaluation.noise import LEAST_EPSILON, exactly, noise, written
from fedxl.risks import XRisk

GRIDS = "grids.json"  # of a run, by split
SPENT = "epsilon.json"  # of all runs
NOT_FINITE = "the scores of this model are not finite"


class Grant(NamedTuple):
    """What this site is about to disclose: counts in these bins, with noise of this epsilon (0: none)."""

    bins: Bins
    epsilon: Fraction  # of all that leaves; of several labels, of all together
    spent: Fraction  # with this one, over all runs


def granted(site: SiteFile, facts: Mapping[str, Any], risk: XRisk) -> Grant:
    """The curve that a request asks for, if it may have one. Its epsilon is spent now, whatever happens next."""
    vectors = not risk.single_score
    require(not vectors, "a curve needs one score an example, and the risk pairs vectors")
    bins, most = _bins(facts.get("grid"), risk.labels), site.settings.bins
    asked = bins.bins if isinstance(bins, Grid) else bins[0].bins
    require(asked <= most, f"this site counts its scores in at most {most} bins, not {asked}")
    if site.settings.epsilon and risk.labels:
        each_label(exactly(site.settings.epsilon), risk.labels)
    _fix(site.state / str(facts["run"]), str(facts["split"]), bins)
    return Grant(bins, *_spend(site))


def disclosed(site: SiteFile, grant: Grant, scores: Tensor, labels: Tensor) -> tuple[dict[str, Any], CurveReply]:
    """The facts and the counts of a reply."""
    facts: dict[str, Any] = {"epsilon": float(grant.epsilon), "spent": float(grant.spent)}
    if isinstance(grant.bins, tuple):
        withheld, counts = _of_labels(site, grant, scores.double().numpy(), labels.long().numpy())
        return {**facts, "withheld": json.dumps(withheld)}, _reply(counts)
    h, y = scores.double().numpy(), (labels > 0).long().numpy()
    found = count(grant.bins.edges(), h, y)
    counts = np.stack([found.positives, found.negatives])
    if grant.epsilon:
        counts = counts + noise(grant.epsilon, counts.size).reshape(counts.shape)
    else:
        # With noise, nothing is refused: whether a request is refused would depend on single examples.
        require(bool(np.isfinite(h).all()), NOT_FINITE)
        _require_harmless(site, found)
    return facts, _reply(counts)


def each_label(epsilon: Fraction, labels: int) -> Fraction:
    """The epsilon of each label's counts.

    An example is in one count of every label that is known of it. Adding or removing it changes up to L counts by
    one, so that noise of epsilon / L in each makes all of them together epsilon-differentially private.
    """
    share = epsilon / labels
    few = f"epsilon = {float(epsilon):g} leaves {float(share):.1g} to each of {labels} labels, and less than "
    require(share >= written(LEAST_EPSILON), f"{few}{LEAST_EPSILON:g} hides everything; raise epsilon in site.toml")
    return share


def _of_labels(
    site: SiteFile, grant: Grant, h: npt.NDArray[np.float64], y: npt.NDArray[np.int64]
) -> tuple[dict[str, str], npt.NDArray[np.int64]]:
    """Why labels are withheld, by number, and the counts [2, L, bins]; those of withheld labels are 0."""
    assert isinstance(grant.bins, tuple)
    known = [y[:, label] >= 0 for label in range(len(grant.bins))]
    each = [
        count(grid.edges(), h[known[label], label], y[known[label], label]) for label, grid in enumerate(grant.bins)
    ]
    counts = np.stack([[one.positives for one in each], [one.negatives for one in each]])
    if grant.epsilon:
        # As above: what is withheld would depend on single examples.
        share = each_label(grant.epsilon, len(each))
        return {}, counts + noise(share, counts.size).reshape(counts.shape)
    require(bool(np.isfinite(h).all()), NOT_FINITE)
    withheld: dict[str, str] = {}
    for label, one in enumerate(each):
        try:
            _require_harmless(site, one)
        except UserError as why:
            withheld[str(label)] = str(why)
            counts[:, label] = 0
    told = next(iter(withheld.values()), "")
    require(len(withheld) < len(each), f"this site discloses the counts of no label: of the first one, {told}")
    return withheld, counts


def _reply(counts: npt.NDArray[np.int64]) -> CurveReply:
    return CurveReply(torch.from_numpy(counts[0].copy()), torch.from_numpy(counts[1].copy()))


def _bins(text: Any, labels: int) -> Bins:
    try:
        content = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise UserError("cannot read the request's bins") from None
    return bins_from_json(content, labels)


def _fix(folder: Path, split: str, bins: Bins) -> None:
    """The first request of a run decides: counts in two sets of bins, subtracted, would show single scores."""
    with locked(folder):
        known = _read(folder / GRIDS)
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
            before = Fraction(_read(path).get("spent", "0"))
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


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}; its owner must correct or remove it") from None
    require(isinstance(content, dict), f"cannot read {path}; its owner must correct or remove it")
    return dict(content)
