"""Handwritten digits (8x8 pixels, inside scikit-learn) as a federation of sites that see the world differently."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits

from fedxl.data.federation import Federation, Split, Splits
from fedxl.data.source import TensorSource
from fedxl.errors import require
from fedxl.sampling import Indices, Purpose, generator

Images = npt.NDArray[np.float32]


def digits(
    clients: int = 16,
    one_class: int = 6,
    referral: int = 4,
    positive: tuple[int, ...] = (3, 8, 9),
    ratio: float = 0.1,
    shift: float = 0.5,
    noise: float = 0.35,
    flip: float = 0.0,
    views: bool = False,
    seed: int = 0,
) -> Splits:
    """Is it one of these digits? Positives are rare, sites differ, and some sites have never seen one.

    clients: sites; one_class: how many of them hold no positive; ratio: positives to negatives in training;
    shift: how far sites differ in brightness and contrast; noise: standard deviation of pixel noise;
    views: pair the upper and the lower half of each image instead [2, 32], for the contrastive risk.
    """
    require(clients >= 1, f"clients must be at least 1, got {clients}")
    require(0 <= one_class < clients, f"one_class must lie in [0, clients), got {one_class} of {clients}")
    require(ratio > 0, f"ratio must be positive, got {ratio}")
    require(noise >= 0, f"noise must not be negative, got {noise}")
    require(set(positive) <= set(range(10)), f"positive must name digits 0 to 9, got {list(positive)}")

    bundle = load_digits()
    labels = np.isin(bundle.target, positive).astype(np.int64)
    rng = generator(seed, Purpose.DATA)
    sites = _assign(labels, clients, one_class, referral, rng)
    images = _through((bundle.images / 16).astype(np.float32), _lenses(clients, shift, rng)[sites], noise, rng)
    x, y = _tensor(images, views), torch.from_numpy(labels)

    train, validation, test = _stratified(labels, (0.5, 0.25, 0.25), rng)
    train = _imbalanced(train, labels, ratio, rng)
    parts = [np.flatnonzero(sites[train] == site) for site in range(clients)]
    wrong = (rng.random(len(train)) < flip) & (sites[train] < clients - one_class)
    given = np.where(wrong, 1 - labels[train], labels[train])
    federation = Federation(TensorSource(x[train], torch.from_numpy(given)), parts)
    return Splits(federation, *(Split(x[which], y[which]) for which in (validation, test)))


def _stratified(labels: Indices, parts: tuple[float, ...], rng: np.random.Generator) -> list[Indices]:
    """Disjoint index sets of the given sizes, each with the same share of positives."""
    cuts = np.cumsum(parts)[:-1]
    by_class = [
        np.split(order, (cuts * len(order)).astype(int))
        for order in (rng.permutation(np.flatnonzero(labels == label)) for label in (0, 1))
    ]
    return [np.concatenate(pieces) for pieces in zip(*by_class, strict=True)]


def _imbalanced(indices: Indices, labels: Indices, ratio: float, rng: np.random.Generator) -> Indices:
    """All negatives, and positives down to `ratio` times as many."""
    positives, negatives = (indices[labels[indices] == label] for label in (1, 0))
    kept = min(len(positives), max(1, round(ratio * len(negatives))))
    return np.concatenate([rng.permutation(positives)[:kept], negatives])


def _assign(labels: Indices, clients: int, screening: int, referral: int, rng: np.random.Generator) -> Indices:
    """A site for every example: the first sites hold positives only, the last ones negatives only."""
    sites = np.empty(len(labels), np.int64)
    holders = {0: np.arange(referral, clients), 1: np.arange(clients - screening)}
    for label, numbers in holders.items():
        members = np.flatnonzero(labels == label)
        sites[members] = rng.permutation(np.resize(numbers, len(members)))
    return sites


def _lenses(clients: int, shift: float, rng: np.random.Generator) -> Images:
    """Each site's (brightness, contrast), in random order so that they do not go with who has positives."""
    spread = np.linspace(-shift, shift, clients) if clients > 1 else np.zeros(1)
    brightness, contrast = rng.permutation(spread), np.exp(rng.permutation(spread))
    return np.stack([brightness, contrast], 1).astype(np.float32)


def _through(images: Images, lens: Images, noise: float, rng: np.random.Generator) -> Images:
    """Images as their sites see them."""
    brightness, contrast = lens[:, 0, None, None], lens[:, 1, None, None]
    grain = rng.normal(0, noise, images.shape).astype(np.float32)
    return images * contrast + brightness + grain


def _tensor(images: Images, views: bool) -> torch.Tensor:
    shape = (len(images), 2, 32) if views else (len(images), 1, 8, 8)
    return torch.from_numpy(images.reshape(shape))
