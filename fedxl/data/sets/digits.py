"""Handwritten digits (8x8 pixels, from scikit-learn) as a federation of sites whose images differ."""

from __future__ import annotations

import numpy as np
import torch

from fedxl.data.examples import Examples, Splits
from fedxl.data.splits import PARTITIONS, Sites, Stream, at_most, corrupt, deal, first_parts
from fedxl.errors import require, require_known
from fedxl.sampling import Indices, Purpose, generator

SKEW = "skew"  # the partition of the demo, which other data sets do not have


def digits(
    clients: int = 16,
    one_class: int | None = None,
    positive: tuple[int, ...] = (3, 8, 9),
    ratio: float = 0.1,
    skew: float = 20.0,
    shift: float = 0.5,
    noise: float = 0.2,
    copies: int = 2,
    views: bool = False,
    flipped: float = 0.0,
    present: int = 0,
    seed: int = 0,
    partition: str = SKEW,
    alpha: float = 0.5,
    everywhere: bool = False,
) -> Splits:
    """Is it one of these digits? Positives are rare, sites differ, and some hold none.

    clients: sites; partition: skew, or one that images have: equal, dirichlet, quantity, one_class; alpha: of
    dirichlet and quantity. With skew, one_class sites hold no positive (three in eight, unless said), and skew times
    as many negatives as the others. With one_class, so many sites trade in pairs, positives for negatives.

    ratio: positives to negatives in training; shift: how far sites differ in brightness and contrast; noise: standard
    deviation of pixel noise; copies: at how many sites each training image is seen; flipped: the share of training
    labels that is wrong; present: only the first so many sites take part (0: all); views: pair the upper and the
    lower half of each image instead [2, 32], for the contrastive risk. Held back are other images, seen at sites
    drawn at random: who never had a positive before will meet one, so a model gains nothing by telling sites apart.
    everywhere: hold back every image at every site instead, for metrics by site that differ by their sites alone.
    """
    require(clients >= 1, f"clients must be at least 1, got {clients}")
    require_known("partition", partition, (SKEW, *PARTITIONS))
    shared = None if partition == SKEW else Sites(clients, 0, partition, alpha, one_class or 0, seed=seed)
    without = 3 * clients // 8 if one_class is None else one_class
    right = shared is not None or 0 <= without < clients
    require(right, f"one_class must lie in [0, clients), got {without} of {clients}")
    require(0 < skew <= 1e6, f"skew must lie in (0, 1,000,000], got {skew}")
    require(ratio > 0, f"ratio must be positive, got {ratio}")
    require(abs(shift) <= 10, f"shift must lie in [-10, 10], got {shift}")
    require(0 <= noise <= 1000, f"noise must lie between 0 and 1000, got {noise}")
    require(seed >= 0, f"seed must not be negative, got {seed}")
    require(0 <= flipped <= 1, f"flipped must lie in [0, 1], got {flipped}")
    require(1 <= copies <= 1000, f"copies must lie between 1 and 1000, got {copies}")
    require(set(positive) <= set(range(10)), f"positive must name digits 0 to 9, got {list(positive)}")

    from sklearn.datasets import load_digits  # takes a second, which users of other data need not wait for

    bundle = load_digits()
    images = (bundle.images / 16).astype(np.float32)
    labels = np.isin(bundle.target, positive).astype(np.int64)
    # The test images are the same for every seed, so that tuning with one seed never sees the test data of another.
    rest, test = _stratified(np.arange(len(labels)), labels, 0.75, generator(0, Purpose.DATA))
    rng = generator(seed, Purpose.DATA, 0, 1)
    train, validation = _stratified(rest, labels, 2 / 3, rng)
    positives, negatives = (train[labels[train] == label] for label in (1, 0))
    kept = at_most(len(positives), ratio * len(negatives))
    train = np.tile(np.concatenate([rng.permutation(positives)[:kept], negatives]), copies)
    require(clients <= len(train), f"there are {clients} clients for only {len(train)} training images")
    # Of each site, in random order, independent of which sites hold positives.
    spread = np.linspace(-shift, shift, clients) if clients > 1 else np.zeros(1)
    brightness, contrast = rng.permutation(spread).astype("f4"), np.exp(rng.permutation(spread)).astype("f4")

    def seen(which: Indices, sites: Indices, y: Indices, known: bool = True) -> Examples:
        x = images[which] * contrast[sites, None, None] + brightness[sites, None, None]
        x = x + rng.normal(0, abs(noise), x.shape).astype(np.float32)  # numpy refuses -0.0 as negative
        pixels = torch.from_numpy(x.reshape(-1, *((2, 32) if views else (1, 8, 8))))
        return Examples(pixels, torch.from_numpy(y)[:, None], sites if known else None)

    if shared is None:
        sites = _assign(labels[train], clients, without, skew, rng)
    else:  # a stream of its own: noise and held-back images are the same, whichever the partition
        held = shared.parts(labels[train])
        sites = np.repeat(np.arange(clients), list(map(len, held)))[np.argsort(np.concatenate(held))]
    y = corrupt(labels[train], flipped, generator(seed, Purpose.DATA, 0, Stream.CORRUPT))
    parts = first_parts(present, [np.flatnonzero(sites == site) for site in range(clients)])
    trained = seen(train, sites, y).share_out(parts)
    everyone = len(parts) == clients  # else some images are held back as sites see them that take no part

    def held_back(which: Indices) -> Examples:
        at = rng.integers(clients, size=len(which))
        if everywhere:
            which, at = np.tile(which, clients), np.repeat(np.arange(clients), len(which))
        return seen(which, at, labels[which], everyone)

    return Splits(trained, held_back(validation), held_back(test))


def _stratified(indices: Indices, labels: Indices, share: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """The indices in two parts, the first with this share of them, both with the same share of positives."""
    halves = [
        np.split(order, [int(share * len(order))])
        for order in (rng.permutation(indices[labels[indices] == label]) for label in (0, 1))
    ]
    first, second = (np.concatenate(pieces) for pieces in zip(*halves, strict=True))
    return first, second


def _assign(labels: Indices, clients: int, one_class: int, skew: float, rng: np.random.Generator) -> Indices:
    """The site of every example: positives at the first sites only, negatives mostly at the others."""
    sees_positives = np.arange(clients) < clients - one_class
    shares = {0: np.where(sees_positives, 1.0, skew), 1: sees_positives.astype(float)}
    sites = np.empty(len(labels), np.int64)
    for label, share in shares.items():
        members = rng.permutation(np.flatnonzero(labels == label))
        sites[members] = deal(len(members), share)
    return sites
