"""Makes ranking data in the folder queries/: python make_queries.py

Five archives answer the same queries, each with images of its own two digits (scikit-learn's): a query's items lie in
five files. Grade 2: the digit that was asked for, grade 1: one that is mistaken for it. LETOR's format.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

ARCHIVE_OF = np.array([0, 1, 2, 2, 3, 4, 0, 1, 4, 3])  # of each digit: 0 and 6, 1 and 7, 2 and 3, 4 and 9, 5 and 8
ITEMS = 30  # of a query


def make(rng: np.random.Generator, pool: np.ndarray, queries: int) -> list[tuple[int, str]]:
    """The archive and the line of each item. Features are how far each of its pixels is from the query's."""
    found = load_digits()
    asked = rng.choice(pool, queries)
    answers = [rng.choice(np.setdiff1d(pool, [query]), ITEMS, replace=False) for query in asked]
    lines = []
    for number, (query, items) in enumerate(zip(asked, answers, strict=True)):
        digit, digits = found.target[query], found.target[items]
        grades = (digits == digit).astype(int) + (ARCHIVE_OF[digits] == ARCHIVE_OF[digit])
        for item, grade in zip(items, grades, strict=True):
            far = np.abs(found.data[item] - found.data[query]) / 16
            features = " ".join(f"{at + 1}:{value:.4g}" for at, value in enumerate(far) if value)
            lines.append((int(ARCHIVE_OF[found.target[item]]), f"{grade} qid:{number} {features}\n"))
    return lines


def main() -> None:
    folder = Path("queries")
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    pools = np.array_split(rng.permutation(len(load_digits().target)), 3)  # no image is in two splits
    train, validation, test = (make(rng, pool, count) for pool, count in zip(pools, (100, 40, 80), strict=True))
    for archive in range(5):
        own = [line for where, line in train if where == archive]
        (folder / f"archive{archive}.txt").write_text("".join(own))
    for name, items in (("validation", validation), ("test", test)):
        (folder / f"{name}.letor").write_text("".join(line for _, line in items))


if __name__ == "__main__":
    main()
