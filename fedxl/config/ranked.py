"""A config in several processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedxl.config.experiment import Config, dump, simulate
from fedxl.engine.ranks.team import Team
from fedxl.training.ranked import RankedSimulation, hooks_on, opening
from fedxl.training.result import Result
from fedxl.training.settings import Hooks
from fedxl.training.trainer import train


def execute_on(
    team: Team, device: str, config: Config, out: Path | None, resume: bool, hooks: Hooks | None = None
) -> Result:
    """Run a config in one of several processes. All of them come to the same result, and the first writes it.

    device: that of this process.
    """
    hooks = hooks_on(team, hooks or Hooks())
    here = replace(config, run={**config.run, "device": device, **({} if team.leads else {"track": []})})
    simulation = team.together(lambda: simulate(here, hooks.say, processes=team.size))
    files = {} if resume else {"config.toml": dump(config)}
    return train(RankedSimulation(simulation, team, hooks.say), hooks, out, resume, files, opening(team))
