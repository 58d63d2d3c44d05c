"""The paper's own results: mean and standard deviation over three runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

METHODS = ("Centralized", "Local SGD", "CODASCA", "Local Pair", "FeDXL")


class Cell(NamedTuple):
    mean: float
    spread: float


def _row(*numbers: float) -> dict[str, Cell]:
    """Mean and spread of each method, in units of 0.0001."""
    cells = [Cell(mean / 10_000, spread / 10_000) for mean, spread in zip(numbers[::2], numbers[1::2], strict=True)]
    return dict(zip(METHODS, cells, strict=True))


PublishedTable = Mapping[tuple[str, str], Mapping[str, Cell]]  # by (data set, metric), then by method

# Table 1: partial AUC on test data, on McClish's scale.
TABLE1: PublishedTable = {
    ("cifar10", "pauc@0.3"): _row(7655, 39, 6825, 47, 7288, 35, 7487, 59, 7580, 34),
    ("cifar10", "pauc@0.5"): _row(8032, 39, 7279, 50, 7702, 29, 7888, 52, 7978, 26),
    ("cifar100", "pauc@0.3"): _row(6287, 37, 5875, 16, 6131, 54, 6281, 32, 6332, 24),
    ("cifar100", "pauc@0.5"): _row(6487, 26, 6124, 21, 6406, 41, 6569, 17, 6623, 22),
    ("chexpert", "pauc@0.3"): _row(7220, 35, 6495, 39, 6903, 59, 6902, 53, 7344, 42),
    ("chexpert", "pauc@0.5"): _row(7861, 40, 7017, 42, 7770, 71, 7483, 33, 7918, 37),
    ("chestmnist", "pauc@0.3"): _row(6344, 53, 5904, 12, 6071, 40, 5802, 39, 6228, 48),
    ("chestmnist", "pauc@0.5"): _row(6622, 29, 6072, 34, 6272, 38, 6026, 25, 6490, 39),
}

# Table 2: AUC on test data, with one in five training labels of each class flipped.
TABLE2: PublishedTable = {
    ("cifar10", "auroc"): _row(7352, 43, 6501, 24, 6407, 44, 7287, 27, 7344, 38),
    ("cifar100", "auroc"): _row(6114, 38, 5700, 31, 5950, 39, 6175, 45, 6208, 41),
    ("chexpert", "auroc"): _row(8149, 31, 6782, 32, 7062, 85, 7924, 43, 8431, 27),
    ("chestmnist", "auroc"): _row(7227, 26, 5642, 41, 6509, 33, 6766, 19, 6925, 30),
}


class RunningTime(NamedTuple):
    rounds: int
    seconds: int  # on 16 machines, each with an A100


# The appendix's running times until training partial AUC (FPR <= 0.5) is within 0.01 of its best.
RUNTIME: Mapping[str, Mapping[str, RunningTime]] = {
    data: {name: RunningTime(*time) for name, time in zip(METHODS[1:], times, strict=True)}
    for data, times in {
        "cifar10": ((157, 664), (147, 955), (168, 740), (160, 819)),
        "cifar100": ((160, 644), (163, 974), (162, 688), (159, 758)),
        "chexpert": ((162, 2465), (151, 3501), (175, 2838), (182, 3246)),
        "chestmnist": (
            (172, 1537),
            (165, 3176),
            (164, 1484),
            (171, 1763),
        ),
    }.items()
}
