"""What private training has released of a site's examples, over all runs: on its disk before an answer leaves.

Each run adds the squared mu of the example that it may have used most, by what this site has answered and holds. Runs
have seeds of their own, so that nothing else may be said of which example that is. Squared mu of Gaussian mechanisms
add up. Curves are of other examples, those held back, and have their own account (`curve.py`), in the same file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedxl.data.examples import Examples
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.site.curve import SPENT
from fedxl.deploy.storage import locked, updating
from fedxl.errors import require
from fedxl.training.privacy import epsilon_of, most_released
from fedxl.training.problem import Problem

TRAINING = "training"  # in the file: squared mu, by run


def released(problem: Problem, mine: Examples, rounds: Sequence[int]) -> float:
    """The squared mu of these rounds of a run, for the example that may have been used most."""
    reading, steps = problem.reading, problem.settings.local_steps
    algorithm: Any = problem.algorithm
    counts = [len(mine.side(side)[0]) for side in (reading.first, reading.second)]
    found = most_released(algorithm, reading, steps, counts, int(0 in rounds), len(rounds))  # round 0: the warm-up
    return max((each.squared_mu(algorithm.gradient) for each in found), default=0.0)


def spend(site: SiteFile, run: str, squared_mu: float) -> float:
    """Count what a run has released with the answer that is about to be given. Refuse it above the site's limit.

    Returns the epsilon that training has spent here with it; 0 if the site has no limit.
    """
    path, most, delta = site.state / SPENT, site.settings.training_epsilon, site.settings.training_delta
    with locked(site.state, ".requests.lock"), updating(path) as content:
        known = content.get(TRAINING, {})
        right = isinstance(known, dict) and all(type(one) is float and one >= 0 for one in known.values())
        require(right, f"cannot read {path}; its owner must correct or remove it")
        content[TRAINING] = spent = {**known, run: max(squared_mu, known.get(run, 0.0))}
        epsilon = epsilon_of(math.fsum(spent.values()), delta) if most else 0.0
        told = f"with this answer, training here would have spent epsilon {epsilon:.3g} at delta {delta:g}"
        require(epsilon <= most, f"{told}; its site.toml allows {most:g} (training_epsilon)")
    return epsilon
