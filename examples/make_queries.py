"""Makes ranking data in the folder queries/: python make_queries.py

Five archives answer the same queries, each with images of its own two digits (scikit-learn's): a query's items lie in
five files. Grade 2: the digit that was asked for, grade 1: one that is mistaken for it. LETOR's format.
"""

from pathlib import Path

import numpy as np

from fedxl.experiments.retrieval import ARCHIVES, Items, digits


def write(path: Path, items: Items, which: np.ndarray) -> None:
    with path.open("w") as file:
        for row in np.flatnonzero(which):
            features = " ".join(f"{at + 1}:{value:.4g}" for at, value in enumerate(items.x[row]) if value)
            file.write(f"{items.grades[row]} qid:{items.queries[row]} {features}\n")


def main() -> None:
    folder = Path("queries")
    folder.mkdir(exist_ok=True)
    train, validation, test = digits(np.random.default_rng(0))
    for archive in range(ARCHIVES):
        write(folder / f"archive{archive}.txt", train, train.kinds == archive)
    for name, items in (("validation", validation), ("test", test)):
        write(folder / f"{name}.letor", items, np.ones(len(items.grades), bool))


if __name__ == "__main__":
    main()
