"""The theorems' rates on a small problem. docs/results/rates.md has the full measurement, with standard errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedxl.engine.drawing import Drawing, Schedule
from fedxl.models import weights_of
from studies.theory import rates
from studies.theory.rates import AUROC, PARTIAL_AUC, Line, Panel
from studies.theory.testbed import WithReplacement, linear, squared_norms
from tests.studies.running import made

SEEDS = (0, 1)


def test_the_exact_gradient_is_that_of_all_pairs():
    """Against the logistic loss of every pair, differentiated by hand."""
    bed = linear(AUROC, 3)
    w, x = bed.model.weight.detach().numpy()[0], bed.x.numpy()
    positives, negatives = x[bed.y.numpy() == 1], x[bed.y.numpy() == 0]
    total = np.zeros_like(w)
    for a in positives:
        for b in negatives:
            total -= (a - b) / (1 + np.exp(w @ (a - b)))
    exact = total / (len(positives) * len(negatives))
    assert bed.squared_norm(weights_of(bed.model)) == pytest.approx(float(exact @ exact), rel=1e-12)


@pytest.mark.parametrize("risk", [AUROC, PARTIAL_AUC], ids=["auroc", "pauc"])
def test_the_gradient_vanishes_at_the_start_of_a_floor(risk):
    for differ in (False, True):
        bed = linear(risk, 4, differ)
        assert bed.squared_norm(bed.stationary()) < 1e-20 < 1e-3 < bed.squared_norm(weights_of(bed.model))


def test_draws_are_with_replacement():
    """An epoch holds each example once; as many independent draws leave out about 1 / e of them, and are uniform."""
    bed = linear(AUROC, 1)
    reading, schedule = rates.fedxl1(0.1).reading(8, 8), Schedule(8, 8, 8)
    kinds = (reading, reading._replace(pairing=WithReplacement()))
    epochs, independent = (Drawing(bed.data, kind, schedule) for kind in kinds)
    assert len(np.unique(epochs.draw(0, 1, 0, None).rows)) == 64
    assert 32 < len(np.unique(independent.draw(0, 1, 0, None).rows)) < 50
    counts = np.bincount(np.concatenate([independent.draw(0, r, r, None).rows.ravel() for r in range(400)]))
    assert np.abs(counts / 400 - 1).max() < 5 / np.sqrt(400)  # five standard deviations


def test_clients_that_differ_hold_everything_once_between_them():
    bed = linear(AUROC, 5, differ=True)
    assert np.array_equal(np.sort(np.concatenate(bed.data.parts)), np.arange(128))
    last = [float(bed.x[torch.as_tensor(part), -1].mean()) for part in bed.data.parts]
    assert last == sorted(last)
    assert last[-1] - last[0] > 1


def test_a_run_is_determined_by_its_seed():
    bed, algorithm = linear(PARTIAL_AUC, 4), rates.fedxl2(0.5, 0.3)
    first, again, other = (
        squared_norms(bed, algorithm, rounds=5, local_steps=2, seed=seed, cohort=2) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.isclose(first[-1], other[-1])


def measured(panel: Panel) -> list[Line]:
    """The lines of a panel, measured."""
    planned = rates.cases({"": panel}, SEEDS)
    rows = [made(dict(run.case), **rates.measure(run, {"": panel})[0]) for run in planned]
    return list(rates.lines_of(rows, "").values())


def test_the_average_falls_with_the_number_of_rounds():
    """The theorem: -2/3. Measured with 3 seeds over R = 27 to 343: -.72 +- .01 and -.63 +- .02."""
    for line in measured(rates.rounds(cubes=(2, 4))):
        assert -0.85 < line.slope()[0] < -0.55


def test_the_floor_falls_with_the_number_of_clients():
    """The theorem: -1. Measured with 3 seeds and 1000 steps, N = 1 to 16: -1.02 +- .02 and -1.01 +- .02."""
    for line in measured(rates.clients(numbers=(1, 16), steps=120)):
        assert -1.2 < line.slope()[0] < -0.8


def test_local_steps_cost_nothing_where_clients_are_alike_and_much_where_they_differ():
    """Measured with 3 seeds and 1024 steps: K = 8 to 64 costs 1.2 times the floor if alike, 7.9 times if not."""
    alike, differ = measured(rates.local_steps(numbers=(8, 64), steps=128))
    assert alike.mean[1] < 1.6 * alike.mean[0]
    assert differ.mean[1] > 4 * differ.mean[0]


def test_the_floor_falls_with_the_size_of_the_cohort():
    """Theorem 3: -1. Measured with 3 seeds, 800 steps, |P| = 1 to 16: -.98 +- .02 if alike, -1.64 +- .02 if not."""
    alike, differ = measured(rates.cohort(sizes=(2, 16), steps=120))
    assert -1.2 < alike.slope()[0] < -0.8
    assert differ.slope()[0] < -1.2
    assert differ.mean[0] > 2 * alike.mean[0]


def test_the_table_and_the_picture_are_of_rows(tmp_path):
    norms = {1: (4.0, 8.0), 2: (2.0, 4.0), 4: (1.0, 2.0)}
    rows = [
        made({"panel": panel, "line": line, "x": x, "seed": seed}, norm=norms[x][seed])
        for panel, known in rates.PANELS.items()
        for line in known.lines
        for seed in (0, 1)
        for x in norms
    ]
    (line, _) = rates.lines_of(rows, "clients").values()
    assert (line.slope(), line.mean, line.error) == ((-1.0, 0.0), [6.0, 3.0, 1.5], pytest.approx([2.0, 1.0, 0.5]))
    text = rates.markdown(rows)
    assert "| \\|P\\|, clients of a round | 1 | 2 | 4 | slope |" in text
    assert "| FeDXL1, AUROC | 6.00e+00 ± 2e+00 | 3.00e+00 ± 1e+00 | 1.50e+00 ± 5e-01 | -1.00 ± 0.00 |" in text
    rates.draw(tmp_path / "rates.png", rows)
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
