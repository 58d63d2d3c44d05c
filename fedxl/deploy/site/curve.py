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
import torch
from torch import Tensor

from fedxl.deploy.protocol.envelope import CurveReply
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.site.locks import locked
from fedxl.deploy.site.permission import remember
from fedxl.errors import UserError, require
from fedxl.evaluation.binned import Binned, count
from fedxl.evaluation.grid import Grid
from fedxl.evaluation.noise import exactly, noise, written
from fedxl.risks import XRisk

GRIDS = "grids.json"  # of a run, by split
SPENT = "epsilon.json"  # of all runs


class Grant(NamedTuple):
    """What this site is about to disclose: counts in these bins, with noise of this epsilon (0: none)."""

    grid: Grid
    epsilon: Fraction
    spent: Fraction  # with this one, over all runs


def granted(site: SiteFile, facts: Mapping[str, Any], risk: XRisk) -> Grant:
    """The curve that a request asks for, if it may have one. Its epsilon is spent now, whatever happens next."""
    told = 'this site discloses a curve, which is of one label; site.toml may say evaluate = "metrics" or "scores"'
    require(not risk.labels, told)
    require(not risk.score_shape, "a curve needs one score an example, and the risk pairs vectors")
    grid = _grid(facts.get("grid"))
    most = site.settings.bins
    require(grid.bins <= most, f"this site counts its scores in at most {most} bins, not {grid.bins}")
    _fix(site.state / str(facts["run"]), str(facts["split"]), grid)
    return Grant(grid, *_spend(site))


def disclosed(site: SiteFile, grant: Grant, scores: Tensor, labels: Tensor) -> tuple[dict[str, Any], CurveReply]:
    """The facts and the counts of a reply."""
    h, y = scores.double().numpy(), (labels > 0).long().numpy()
    found = count(grant.grid.edges(), h, y)
    counts = np.stack([found.positives, found.negatives])
    if grant.epsilon:
        counts = counts + noise(grant.epsilon, counts.size).reshape(counts.shape)
    else:
        # With noise, nothing is refused: whether a request is refused would depend on single examples.
        _require_harmless(site, found, bool(np.isfinite(h).all()))
    facts = {"epsilon": float(grant.epsilon), "spent": float(grant.spent)}
    return facts, CurveReply(torch.from_numpy(counts[0]), torch.from_numpy(counts[1]))


def _grid(text: Any) -> Grid:
    try:
        content = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise UserError("cannot read the request's bins") from None
    return Grid.from_json(content)


def _fix(folder: Path, split: str, grid: Grid) -> None:
    """The first request of a run decides: counts in two sets of bins, subtracted, would show single scores."""
    with locked(folder):
        known = _read(folder / GRIDS)
        if split not in known:
            remember(folder / GRIDS, known | {split: grid.to_json()})
            return
        same = known[split] == grid.to_json()
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


def _require_harmless(site: SiteFile, found: Binned, finite: bool) -> None:
    """Refuse counts of few examples, and bins that look closely at some scores and leave out the others."""
    require(finite, "the scores of this model are not finite")
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
