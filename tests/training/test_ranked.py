"""Runs in several processes: the files of one process, resumed by another number of them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedxl.algorithms import FeDXL2, Level
from fedxl.algorithms.protocol import DataFacts
from fedxl.config.experiment import Config, execute, execute_on
from fedxl.data.examples import Examples
from fedxl.engine.ranks.team import Team
from fedxl.errors import UserError
from fedxl.models import weights_of
from fedxl.risks import auroc, listwise, several
from fedxl.training.evaluate import HeldBack
from fedxl.training.problem import assemble
from fedxl.training.ranked import SplitUp
from fedxl.training.run_writer import load_latest
from fedxl.training.settings import Hooks, Settings
from tests.ranks import on_ranks

ROUNDS = 6


def config(**run: object) -> Config:
    settings = {"rounds": ROUNDS, "local_steps": 2, "batch1": 4, "batch2": 4, "cohort": 5, "dtype": "float64"}
    return Config(
        data={"name": "digits"},
        model={"name": "mlp", "hidden": [4]},
        risk={"name": "pauc"},
        algorithm={"name": "fedxl2", "lr": 0.1},
        run={**settings, "eval_every": 2, "checkpoint_every": 3, "train_metrics": True, **run},
    )


def runs(out: Path, resume: bool, stop: bool, team: Team) -> None:
    """One rank's part; only the first one's hooks count."""
    seen: list[int] = []
    hooks = Hooks(
        on_progress=lambda progress: seen.append(progress.round),
        say=lambda line: None,
        should_stop=lambda: stop and len(seen) == 4 and team.leads,  # rounds 0 to 3 are done
    )
    result = execute_on(team, "cpu", config(), out, resume, hooks)
    assert result.interrupted == stop
    assert bool(seen) == team.leads


def test_a_run_begun_on_four_ranks_goes_on_on_two(tmp_path):
    execute(config(), tmp_path / "one", hooks=Hooks(say=lambda line: None))
    assert on_ranks(4, partial(runs, tmp_path / "many", False, True)) == [0] * 4
    stopped, _ = load_latest(tmp_path / "many/checkpoints")
    assert stopped is not None
    assert stopped.info["round"] == 4
    assert on_ranks(2, partial(runs, tmp_path / "many", True, False)) == [0] * 2
    assert_alike(tmp_path / "one", tmp_path / "many")


def assert_alike(one: Path, many: Path) -> None:
    assert {path.name for path in one.iterdir()} == {path.name for path in many.iterdir()}
    assert (one / "config.toml").read_text() == (many / "config.toml").read_text()
    expected, found = (load_file(path / "model.safetensors") for path in (one, many))
    for name, leaf in expected.items():
        torch.testing.assert_close(found[name], leaf, rtol=0, atol=1e-12)
    rows = [[json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (one, many)]
    for row, other in zip(*rows, strict=True):
        assert row.keys() == other.keys()
        assert row.get("traffic") == other.get("traffic")
        for split in ("train", "validation", "test"):
            for name, value in row.get(split, {}).items():
                assert value == pytest.approx(other[split][name], abs=1e-12), name
    last, other = (load_latest(path / "checkpoints")[0] for path in (one, many))
    assert last is not None
    assert other is not None
    for name, leaf in last.tensors.items():
        torch.testing.assert_close(other.tensors[name], leaf, rtol=0, atol=1e-12, equal_nan=True, msg=name)


def mistaken(folder: Path, team: Team) -> None:
    def work() -> int:
        if team.rank == 2:
            raise UserError("this disk holds no data")
        return team.rank

    with pytest.raises(UserError) as found:
        team.together(work)
    (folder / str(team.rank)).write_text(str(found.value))
    assert team.together(lambda: team.rank) == team.rank
    assert team.heard({"rank": team.rank}) == [{"rank": rank} for rank in range(3)]
    assert team.tell(["first"] if team.leads else None) == ["first"]


def test_a_mistake_at_one_rank_is_the_line_of_all(tmp_path):
    assert on_ranks(3, partial(mistaken, tmp_path)) == [0] * 3
    lines = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert lines == [*["rank 2: this disk holds no data"] * 2, "this disk holds no data"]


def taken(out: Path, team: Team) -> None:
    with pytest.raises(UserError, match="already holds a run"):
        execute_on(team, "cpu", config(), out, False, Hooks(say=lambda line: None))


def test_a_folder_that_is_taken_ends_all_ranks(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert on_ranks(2, partial(taken, tmp_path)) == [0] * 2


class Alone:
    """A team of one, which needs no other process."""

    rank, size, leads = 0, 1, True

    def gather(self, own: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        assert [len(own)] == sizes
        return [own]

    def tell(self, what: Any) -> Any:
        return what


@pytest.mark.parametrize("risk", [several(auroc(), 3), listwise(queries=2)], ids=["several labels", "queries"])
def test_an_evaluation_that_is_split_finds_what_a_whole_one_does(risk):
    """With metrics by label, and of items within their queries."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(24, 5, generator=rng)
    y = torch.randint(2, (24, 3 if risk.labels else 1), generator=rng)
    y[:2] = torch.tensor([[0], [1]])
    queries = torch.arange(24) // 6 if risk.pairing.ranked else None
    data = Examples(x, y, group=queries)
    model = nn.Linear(5, 3 if risk.labels else 1)
    problem = assemble(model, FeDXL2(risk, level=Level("free")), Settings(batch1=4, batch2=4), DataFacts())
    whole = HeldBack(problem.evaluator, {"validation": data})
    weights = weights_of(problem.model)
    found, expected = (each.examine(weights, "validation") for each in (SplitUp(**vars(whole), team=Alone()), whole))
    assert found.metrics == expected.metrics
    assert found.remarks == expected.remarks
    assert ("validation_by_label" in found.remarks) == bool(risk.labels)
    assert (found.scores.labels != ("",)) == bool(risk.labels)
    assert (found.scores.scores == expected.scores.scores).all()
