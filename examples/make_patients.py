"""Makes the tables of three hospitals in the folder patients/: python make_patients.py

Each row is a patient: how many days somebody was followed, whether that ended with death, and what was known on the
first day. Hazards are proportional: a year of age multiplies the hazard by e^0.04, a stage by e^0.6, a unit of the
marker by e^0.3. The clinic follows its patients for at most half a year and has seen nobody die.
"""

from pathlib import Path

import numpy as np
import pandas as pd

HOSPITALS = {"clinic": (120, 180), "north": (300, 1800), "south": (180, 1200)}  # patients, and days at most
STAGES = ("I", "II", "III", "IV")
SCALE = 2400.0  # mean days of a patient at the baseline


def patients(rng: np.random.Generator, count: int, most: float) -> pd.DataFrame:
    age, stage = rng.normal(62, 10, count).round(1), rng.choice(4, count, p=[0.4, 0.3, 0.2, 0.1])
    marker = rng.normal(5, 2, count).round(2)
    hazard = np.exp(0.04 * (age - 62) + 0.6 * (stage - 1) + 0.3 * (marker - 5))
    died, seen = rng.exponential(SCALE / hazard), rng.uniform(0, most, count)
    rows = pd.DataFrame({"age": age, "sex": rng.choice(["f", "m"], count), "stage": np.array(STAGES)[stage]})
    rows["pressure"] = rng.normal(130, 15, count).round(1)  # has no effect, and neither has sex
    rows["marker"] = np.where(rng.random(count) < 0.1, np.nan, marker)
    rows["days"] = np.ceil(np.minimum(died, seen)).astype(int)
    rows["status"] = np.where(died <= seen, "died", "alive")
    return rows


def main() -> None:
    rng, folder = np.random.default_rng(0), Path("patients")
    folder.mkdir(exist_ok=True)
    for name, (count, most) in HOSPITALS.items():
        rows = patients(rng, count, most)
        rows = rows[rows.status == "alive"].copy() if name == "clinic" else rows
        rows["patient"] = [f"{name}{number:03}" for number in range(len(rows))]
        rows.to_csv(folder / f"{name}.csv", index=False)


if __name__ == "__main__":
    main()
