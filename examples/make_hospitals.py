"""Makes the data of three hospitals in the folder hospitals/: python make_hospitals.py

Each has a table of its patients (scikit-learn's breast cancer data, with missing values, categories and patients of
several rows) and one of its images (scikit-learn's digits as PNG files: is it a 3, an 8 or a 9?).
"""

from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits

HOSPITALS = {"north": 0.5, "south": 0.3, "east": 0.2}


def patients(rng: np.random.Generator) -> pd.DataFrame:
    cells = load_breast_cancer(as_frame=True)
    rows = cells.data.rename(columns=lambda name: name.replace(" ", "_"))
    rows["sex"] = rng.choice(["f", "m"], len(rows), p=[0.95, 0.05])
    rows["scanner"] = rng.choice(["A", "B", "C", "prototype"], len(rows), p=[0.5, 0.3, 0.195, 0.005])
    for column in ("mean_area", "worst_texture"):
        rows.loc[rng.random(len(rows)) < 0.1, column] = np.nan
    rows["patient"] = [f"P{number:04}" for number in rng.integers(0, 400, len(rows))]
    rows["diagnosis"] = np.where(cells.target == 0, "malignant", "benign")
    return rows


def main() -> None:
    rng = np.random.default_rng(0)
    rows, digits = patients(rng), load_digits()
    # All rows of a patient are at one hospital, and so are all images.
    homes = dict(
        zip(sorted(set(rows.patient)), rng.choice(list(HOSPITALS), 400, p=list(HOSPITALS.values())), strict=False)
    )
    owners = np.arange(len(digits.images)) // 2  # a patient has two images
    seen_at = rng.choice(list(HOSPITALS), len(digits.images), p=list(HOSPITALS.values()))[owners]
    for hospital in HOSPITALS:
        folder = Path("hospitals") / hospital
        (folder / "images").mkdir(parents=True, exist_ok=True)
        rows[rows.patient.map(homes) == hospital].to_csv(folder / "patients.csv", index=False)
        listed = []
        for number in np.flatnonzero(seen_at == hospital):
            file = f"images/{number:04}.png"
            Image.fromarray((digits.images[number] * 15).astype(np.uint8)).save(folder / file)
            finding = "yes" if digits.target[number] in (3, 8, 9) else "no"
            listed.append({"image": file, "patient": f"D{owners[number]:04}", "finding": finding})
        pd.DataFrame(listed).to_csv(folder / "images.csv", index=False)


if __name__ == "__main__":
    main()
