"""The loop over rounds: cohort -> round -> evaluate -> checkpoint, until the rounds are done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedxl import metrics, tree
from fedxl.algorithms.protocol import ServerState
from fedxl.algorithms.server_rules import begin
from fedxl.errors import DivergedError, UserError, require
from fedxl.evaluation.scores import Scores
from fedxl.models import Weights, load, weights_of
from fedxl.options import call
from fedxl.tracking import trackers as trackers_of
from fedxl.tracking.tracker import FAILED, FINISHED, STOPPED, Tracked, Trackers
from fedxl.training.choice import FEW, Choice, better, how_sure
from fedxl.training.evaluate import Findings
from fedxl.training.health import Watch
from fedxl.training.privacy import ledger, spent
from fedxl.training.result import Result
from fedxl.training.rounds import Task, Traffic, play_round, traffic
from fedxl.training.run_folder import COLLAPSED, STOPPED_EARLY
from fedxl.training.run_writer import STATES, VERSION, Checkpoint, RunWriter, describe_run, require_same
from fedxl.training.settings import Hooks, Progress
from fedxl.wire import RefusedError, fitted


class State(NamedTuple):
    """What a checkpoint holds besides what the engine remembers of its clients."""

    server: ServerState
    best: Weights


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a run is: what a checkpoint holds besides its tensors."""

    round: int
    best_round: int
    best_value: float
    seconds: float
    evaluating: float = 0.0
    remarks: dict[str, list[Any]] = field(default_factory=dict)  # of rounds since the last evaluation
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        require(self.round >= 0, f"its round is {self.round}")


def train(
    task: Task,
    hooks: Hooks,
    out: Path | None,
    resume: bool = False,
    files: Mapping[str, str] | None = None,
    open_folder: Callable[[Path, bool], RunWriter] = RunWriter,
) -> Result:
    """Run all rounds that are still to do. `files` go into the folder of a new run before its first round."""
    run = task.problem.settings
    about = describe_run(task, spent(ledger(task), run.rounds))
    if out is None:
        require(not run.track, "track needs a folder for the run: --out, in Python out=...")
        return replace(Trainer(task, hooks, None, resume).train(), about=about, files=files or {})
    # First: what is missing for them is said before anything is written.
    trackers = trackers_of(run.track, run.tracking_uri, hooks.say)
    with open_folder(out, resume) as folder:
        for name, text in (files or {}).items():
            folder.write(name, text)
        folder.describe(task, about, resume)
        trainer = Trainer(task, hooks, folder, resume, trackers)
        state = FAILED
        try:
            result = trainer.train()
            state = STOPPED if result.interrupted else FINISHED
        except KeyboardInterrupt:
            state = STOPPED
            raise
        finally:
            trackers.end(state)
        return replace(result, about=about, files=files or {})


class Trainer:
    """The loop over rounds, from the state before the first one or from a folder's newest whole checkpoint."""

    def __init__(
        self, task: Task, hooks: Hooks, folder: RunWriter | None, resume: bool, trackers: Trackers | None = None
    ) -> None:
        self.task, self.hooks, self.folder = task, hooks, folder
        self.trackers = trackers or Trackers({}, hooks.say)
        self.problem, self.run, self.algorithm = task.problem, task.problem.settings, task.problem.algorithm
        self.server = begin(self.algorithm, weights_of(task.problem.model))
        self.round = self.algorithm.first_round - 1  # the last round done
        self.best, self.best_round, self.best_value = self.server.weights, -1, -math.inf
        self.seconds, self.evaluating = 0.0, 0.0  # since the run began; of these, in evaluations
        self.remarks: dict[str, list[Any]] = {}  # of the engine, since the last evaluation
        self.traffic: Traffic | None = None
        self.history: list[dict[str, Any]] = []
        self.found: Findings | None = None  # of the best round on the validation data; None after a resumption
        self.watch = Watch(self.algorithm, hooks.say, self.server.weights)
        self.ledger = ledger(task)
        needs = f"patience = {self.run.patience} needs validation data"
        known = not self.run.patience or "validation" in task.examiner.splits
        require(known, f"{needs} to tell whether the model still improves")
        if folder and resume:
            checkpoint, complaints = folder.load()
            if checkpoint:
                self._restore(checkpoint)
            elif complaints:
                complaints.append("no intact checkpoint is left; starting from the beginning")
            self.history, more = folder.rewind(self.round, self._regular)
            self.watch.told = any(COLLAPSED in record for record in self.history)
            for cost in (row["traffic"] for row in self.history if isinstance(row.get("traffic"), dict)):
                self.traffic = Traffic(int(cost.get("down", 0)), int(cost.get("up", 0)))
            for line in complaints + more:
                hooks.say(line)
        if folder:
            run = (task.description, metrics.key(self.problem.select), resume, self.round, [*self.history])
            self.trackers.begin(Tracked(folder.path, *run))

    def train(self) -> Result:
        run, interrupted = self.run, False
        self.began = time.monotonic() - self.seconds
        if self.ledger:
            promise = f"{self.ledger.after(run.rounds)} after all {run.rounds} rounds"
            self.hooks.say(f"differential privacy of examples: {promise}")
        # A run that is resumed may have run out of patience before.
        while self.round < run.rounds and not interrupted and not self._out_of_patience:
            self.round += 1
            cohort, before = self.task.plan.cohort(self.round), self.server
            self.server, updates = play_round(self.algorithm, self.task.engine, before, self.round, cohort)
            if self.round > 0 and self.traffic is None:  # the warm-up is another kind of round; the rest are alike
                phase = self.algorithm.phase(self.round)
                self.traffic = traffic(phase, self.problem.reading, run.local_steps, before, updates)
            remarks = self.task.engine.remarks()
            self.remarks |= {name: [*self.remarks.get(name, []), *more] for name, more in remarks.items()}
            self.seconds = time.monotonic() - self.began
            interrupted = self.hooks.should_stop()
            if self._regular(self.round):
                self._evaluate()
                self.seconds = time.monotonic() - self.began
                interrupted |= self.hooks.stop_collapsed and COLLAPSED in self.history[-1]
            last = self.round == run.rounds or self._out_of_patience
            due = last or self.round % run.checkpoint_every == 0
            if self.folder and (due or interrupted):
                self._checkpoint(self.folder)
            latest = self.history[-1] if self.history else None
            select = self.problem.select
            self.hooks.on_progress(Progress(self.round, run.rounds, self.seconds, latest, remarks, select))
        if self.round < run.rounds and not self._out_of_patience:
            return self._result(interrupted=True)
        if self.round < run.rounds:
            many = f"{run.patience} evaluations" if run.patience > 1 else "one evaluation"
            self.hooks.say(f"stopped early after round {self.round}: {many} without a better {self.problem.select}")
        if not self._regular(self.round):
            # After the checkpoint, so that a run which is extended later has the evaluations of a longer run.
            self._evaluate()
        return self._result(interrupted=False)

    @property
    def _out_of_patience(self) -> bool:
        """Whether the last `patience` evaluations have not found a better metric; those without a reply do not count.

        It follows from the metrics rows alone, so that a resumed run decides as one that was never stopped.
        """
        rows = [row for row in self.history if "validation" in row]
        best = self._row(self.best_round)
        same = [row for row in rows if best and row.get("validation_from") == best.get("validation_from")]
        # Of rounds whose metrics tie, the first one counts.
        ties = [row["round"] for row in same if best and self._value(row) == self._value(best)]
        first = min(ties, default=self.best_round)
        return 0 < self.run.patience <= sum(int(row["round"]) > first for row in rows)

    def _row(self, round: int) -> dict[str, Any] | None:
        """The evaluation of a round."""
        return next((row for row in self.history if row["round"] == round), None)

    def _regular(self, round: int) -> bool:
        return round > 0 and round % self.run.eval_every == 0

    def _evaluate(self) -> None:
        self._require_finite()  # this waits for the GPU
        began = time.monotonic()
        task, weights = self.task, self.server.weights
        record: dict[str, Any] = {"round": self.round, "steps": int(self.server.step), "seconds": self.seconds}
        record["training_seconds"] = time.monotonic() - self.began - self.evaluating
        if self.traffic is not None:
            record["traffic"] = {**self.traffic._asdict(), "clients": task.cohort or task.num_clients}
        outputs, latest = None, None
        for name in ("train", "validation"):
            if name in task.examiner.splits:
                found = task.examiner.examine(weights, name)
                record |= {**({name: found.metrics} if found.metrics else {}), **found.remarks}
                outputs, latest = found.outputs, found if name == "validation" else None
        record |= self.remarks | self.watch(self.server, self.round, outputs)
        self.remarks = {}
        record |= spent(self.ledger, self.round)
        value = self._value(record)
        # Without validation data the latest round is the best.
        chooses = "validation" in task.examiner.splits
        if not chooses or better(record, self._row(self.best_round), self.problem.select):
            self.best, self.best_round, self.best_value, self.found = weights, self.round, value, latest
        self.history.append(record)
        if self.folder:
            self.folder.append(record)
            self.trackers.write(record)
        self.evaluating += time.monotonic() - began

    def _value(self, record: Mapping[str, Any]) -> float:
        """What the best round is chosen by."""
        if "validation" not in self.task.examiner.splits:
            return float(self.round)
        if "validation" not in record:
            return -math.inf
        value = metrics.value_of(record["validation"], self.problem.select)
        if math.isnan(value) and math.isfinite(record["validation"].get("risk", math.nan)):
            raise UserError(f"the metric '{self.problem.select}' is not defined on the validation data")
        if math.isnan(value):
            raise self._diverged("scores")
        return value

    def _require_finite(self) -> None:
        if not tree.finite(self.server.weights):
            raise self._diverged("weights")

    def _diverged(self, what: str) -> DivergedError:
        return DivergedError(
            f"the {what} were no longer finite by round {self.round}; a smaller lr or sigmoid scores would help"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same when this run is resumed."""
        return {**self.task.description, STATES: VERSION}

    def _checkpoint(self, folder: RunWriter) -> None:
        self._require_finite()
        state = {**State(self.server, self.best)._asdict(), "population": self.task.engine.population}
        standing = {item.name: getattr(self, item.name) for item in fields(Standing)}
        folder.save(self.round, tree.pack(state), standing)

    def _restore(self, checkpoint: Checkpoint) -> None:
        try:
            standing = call(Standing, checkpoint.info, "checkpoint")
            require_same(standing.settings, self.settings)
            done, wanted = standing.round, self.run.rounds
            require(done <= wanted, f"this run is at round {done} already, beyond rounds = {wanted}")
            self._take_up(checkpoint.tensors)
        except RefusedError as error:
            raise UserError(f"{checkpoint.path} is intact, but does not belong to this run: {error}") from None
        self.round, self.best_round, self.best_value = standing.round, standing.best_round, standing.best_value
        self.seconds, self.evaluating = standing.seconds, standing.evaluating
        self.remarks = standing.remarks

    def _take_up(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the state in a checkpoint; RefusedError if it is not a state of this run."""
        prefix, engine = "population.", self.task.engine
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
        like = State(self.server, self.best)
        state = fitted(like, own, ragged=True)
        self.server, self.best = tree.to(state, self.problem.device)
        population = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        # The checkpoint must hold at least what an engine remembers before the first round.
        now = engine.population
        fitted(now, {name: t for name, t in population.items() if name in tree.pack(now)})
        engine.restore(self.server, population)

    def _choice(self, validation: Scores | None) -> Choice | None:
        """How sure the choice of the round is; said if validation data are few."""
        select = self.problem.select
        values = [metrics.value_of(row["validation"], select) for row in self.history if "validation" in row]
        if validation is None or len(values) < 2:
            return None
        found = how_sure(metrics.key(select), values, self.best_value, validation)
        if found is not None and found.fewest < FEW and found.near > 1:
            self.hooks.say(str(found))
        return found

    def _result(self, interrupted: bool) -> Result:
        # Without any metric to choose by (stopped early, or no site replied) it is the latest.
        some = self.best_round > 0
        chosen, best_round = (self.best, self.best_round) if some else (self.server.weights, self.round)
        record = self._row(best_round) or {}
        early = not interrupted and self.round < self.run.rounds
        if self.ledger:
            self.hooks.say(f"differential privacy of examples: {self.ledger.after(self.round)}")
        model = load(self.problem.model, chosen).eval()
        examiner, examined = self.task.examiner, dict[str, Findings]()
        if "validation" in examiner.splits and not interrupted:
            # A run that was resumed after its best round evaluates that again.
            examined["validation"] = self.found or examiner.examine(chosen, "validation")
        if "test" in examiner.splits and not interrupted:
            examined["test"] = examiner.examine(chosen, "test")
        test = examined.get("test", Findings({}))

        scores = {name: found.scores for name, found in examined.items() if found.scores is not None}
        histograms = {name: found.histograms for name, found in examined.items() if found.histograms}
        choice = self._choice(scores.get("validation"))
        final: dict[str, Any] = {"round": self.round, "best_round": best_round, "seconds": self.seconds}
        final |= {**({STOPPED_EARLY: True} if early else {}), **test.remarks, "test": test.metrics}
        final |= spent(self.ledger, self.round) | ({"choice": choice._asdict()} if choice else {})
        if self.folder and not interrupted:
            self.folder.save_result(scores, histograms, model.state_dict())
            self.folder.append(final)
            self.trackers.write(final)
        return Result(
            model=model,
            weights=chosen,
            best_round=best_round,
            metrics={"validation": record.get("validation", {}), "test": test.metrics},
            history=self.history,
            final=None if interrupted else final,
            seconds=self.seconds,
            scores=scores,
            histograms=histograms,
            traffic=self.traffic,
            interrupted=interrupted,
            stopped_early=early,
            server=self.server,
            form=self.task.form,
            preparation=self.task.preparation,
        )
