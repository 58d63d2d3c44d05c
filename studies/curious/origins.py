"""Whose a pooled score is, guessed from its value: with rounds as a reference in which every owner is known.

That is more than a curious party has by itself, and so bounds what the values of scores give away to this classifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial import cKDTree
from scipy.stats import rankdata

from fedxl.sampling import Floats, Indices
from studies.curious.attacks import Upload

NEIGHBOURS = 40  # 80 find no more than .01 more entries; a tenth of the references where these are few
LEAST = 0.1  # neighbours that every site has besides, so that one missing does not rule it out
REFERENCES = 3  # rounds


class View(NamedTuple):
    """What the curious see of an upload."""

    u: bool = True  # of S1; not with pool_u = "server"
    position: bool = False  # in the upload, from which the step follows; sorted uploads have none
    most: int = 0  # scores of an upload, evenly spread; 0: all
    noise: float = 0.0  # standard deviation of noise on scores, which then are cut to [0, 1] again
    early: bool = False  # the references are the first rounds, not those just before


VIEWS = {
    "scores and u, in the order of draws": View(position=True),
    "scores and u, sorted": View(),
    "scores and u, sorted; references are rounds 1 to 3": View(early=True),
    "scores, sorted": View(u=False),
    "8 scores, sorted": View(u=False, most=8),
    "1 score": View(u=False, most=1),
    "scores, sorted, noise .05": View(u=False, noise=0.05),
    "scores, sorted, noise .2": View(u=False, noise=0.2),
    "scores, sorted, noise 1": View(u=False, noise=1.0),
}


class Seen(NamedTuple):
    """One side of the pool of a round."""

    values: Floats  # [n, columns] as ranks in the pool, since all scores move from round to round
    owners: Indices  # [n]


def see(uploads: Sequence[Upload | None], view: View, rng: np.random.Generator) -> Seen:
    """The uploads of all sites; None: a site has none."""
    values, owners = [], []
    for site, upload in enumerate(uploads):
        if upload is not None:
            count = len(upload.values)
            chosen = np.arange(view.most or count) * count // (view.most or count)
            each = upload.values[chosen, : None if view.u else 1].copy()
            if view.noise:
                each[:, 0] = np.clip(each[:, 0] + view.noise * rng.normal(size=len(each)), 0, 1)
            values.append(np.column_stack((each, chosen)) if view.position else each)
            owners.append(np.full(len(each), site))
    ranks = rankdata(np.concatenate(values), axis=0)
    return Seen(ranks / len(ranks), np.concatenate(owners))


def guess(references: Sequence[Seen], values: Floats, sites: Indices) -> Floats:
    """How likely each value is of each site, [n, sites]: the logarithm of its share of the nearest references."""
    known, owners = (np.concatenate(each) for each in zip(*references, strict=True))
    count = max(1, min(NEIGHBOURS, len(known) // 10))
    nearest = cKDTree(known).query(values, np.arange(1, count + 1))[1]
    shares = (owners[nearest][..., None] == sites).sum(1) + LEAST  # [n, sites]
    found: Floats = np.log(shares / shares.sum(1, keepdims=True))
    return found


class Success(NamedTuple):
    """Which share of the guesses is right, and which share would be by chance, of entries as of uploads."""

    entries: float
    uploads: float
    chance: float


def judge(references: Sequence[Seen], pool: Seen, rng: np.random.Generator) -> Success:
    """Each entry by itself; and each upload as a whole, if it is known which entries form one, and each site has one.

    Sites are in a random order, so that equal likelihoods do not favour the truth.
    """
    sites, uploads = (rng.permutation(np.unique(pool.owners)) for _ in range(2))
    likely = guess(references, pool.values, sites)
    entries = float((sites[likely.argmax(1)] == pool.owners).mean())
    whole = np.stack([likely[pool.owners == upload].sum(0) for upload in uploads])
    named = sites[linear_sum_assignment(-whole)[1]]
    return Success(entries, float((named == uploads).mean()), 1 / len(sites))


def attack(rounds: Sequence[Sequence[Upload | None]], view: View, seed: int = 0) -> Success:
    """The mean over all rounds that have enough before them. In the first round there is no u."""
    rng = np.random.default_rng(seed)
    pools = [see(uploads, view, rng) for uploads in rounds[1:]]
    attacked = range(REFERENCES, len(pools))
    starts = ((0 if view.early else at - REFERENCES, at) for at in attacked)
    found = [judge(pools[start : start + REFERENCES], pools[at], rng) for start, at in starts]
    return Success(*np.mean(found, 0).tolist())
