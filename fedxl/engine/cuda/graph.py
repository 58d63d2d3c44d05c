"""The executor for GPUs: a step of all clients is captured once and replayed, so that no kernel waits for Python.

The algorithm's own `step`, with the reading of its examples before it, is *traced* into one flat list of operations,
compiled into a *program* and *captured* as a CUDA graph, with the clients side by side (`lanes.py`). All that is read
and written stays at its place in memory: a round is copy in, replay, copy out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedxl import tree
from fedxl.engine.cuda.lanes import Capture, Layout, cuda_graph, divisor, plan, searching
from fedxl.engine.cuda.trace import TraceError, explained, fuse, refused_compiler
from fedxl.engine.executors import ClientRound, Feed, Group, loop, seeded

# Operations in one capture: beyond, more steps in it save nothing and take long to capture. Of a step that is not
# compiled each is a call of Python's then.
LONGEST, LONGEST_PLAIN = 400_000, 40_000


@dataclass
class GraphExecutor:
    """Captures a step the first time it is called, and replays it from then on. Falls back to `loop`, saying why."""

    capture: Capture = cuda_graph
    compiled: bool = True
    layout: Layout = "auto"
    say: Callable[[str], None] = lambda line: None
    captured: CapturedStep | None = field(default=None, init=False)
    at_once: int = field(default=0, init=False)  # how many clients the captured step holds
    broken: bool = field(default=False, init=False)

    def __call__(self, running: ClientRound, server: Any, group: Group) -> tuple[list[Any], Any]:
        if self.broken or not group.comes_again:
            return loop(running, server, group)
        with seeded(group.seed(0), group.device), torch.no_grad(), searching():
            try:
                return self._shrinking(running, server, group)
            except TraceError as error:
                self.say(f"executor: loop, because graph cannot trace this step: {error}")
                self.captured, self.broken = None, True
        return loop(running, server, group)

    def _shrinking(self, algorithm: ClientRound, server: Any, group: Group) -> tuple[list[Any], Any]:
        """The round with as many clients together as memory holds."""
        self.at_once = self.at_once or len(group.clients)
        while True:
            try:
                return self._in_parts(algorithm, server, group)
            except torch.OutOfMemoryError:
                pass  # until here the error itself holds on to what was allocated
            size = self.at_once
            if size == 1:
                raise TraceError("the device's memory does not hold it, not even for one client at a time")
            self.captured, self.at_once = None, math.ceil(size / 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.say(f"executor: {size} clients do not fit in the device's memory together, trying {self.at_once}")

    def _in_parts(self, algorithm: ClientRound, server: Any, group: Group) -> tuple[list[Any], Any]:
        """All clients together, or in parts that fit in memory; a short part is filled up with its last client."""
        count, size = len(group.clients), self.at_once
        clients: list[Any] = []
        updates: list[Any] = []
        for begin in range(0, count, size):
            members = range(begin, min(begin + size, count))
            padded = [*members, *[members[-1]] * (size - len(members))]
            states, update = self._part(algorithm, server, group.take(padded))
            clients += states[: len(members)]
            update = tree.map(lambda leaf, few=members: leaf[: len(few)], update)
            # The next part will be written over this one.
            updates.append(update if size >= count else tree.map(torch.clone, update))
        return clients, updates[0] if len(updates) == 1 else tree.concat(updates)

    def _part(self, algorithm: ClientRound, server: Any, group: Group) -> tuple[list[Any], Any]:
        states = tree.stack_ragged(group.clients, group.largest_state())
        with explained():
            works = vmap(algorithm.start, in_dims=(None, 0, 0))(server, states, group.shares)
        captured = self.captured
        if captured is None or not captured.fits(algorithm, server, works, group.feed):
            captured = self.captured = None  # its memory goes to the next one
            captured = self.captured = self._captured(algorithm, server, works, group)
            self.say(f"executor: graph, {captured.description}")
        # Seed anew: a capture is warmed up, and a resumed run must draw what one without a stop would have drawn.
        torch.manual_seed(group.seed(0))
        works, traces = captured.run(server, works, group.feed)
        with explained():
            states, update = vmap(algorithm.finish, in_dims=(None, 0, 0, 0))(server, group.shares, works, traces)
        return tree.unstack_ragged(states, group.clients), update

    def _captured(self, algorithm: ClientRound, server: Any, works: Any, group: Group) -> CapturedStep:
        """A step, compiled if it can be; without, it is slower with the same numbers."""
        try:
            if self.compiled and refused_compiler():
                raise CompilerError(refused_compiler())
            with explained():
                return CapturedStep(self, algorithm, server, works, group)
        except CompilerError as error:
            reason = str(error)  # the error itself holds on to what was allocated
        self.say(f"executor: the step runs without the compiler, which cannot take it: {reason}")
        self.compiled = False  # for good: a round of other sizes would fail alike, after minutes
        with explained():
            return CapturedStep(self, algorithm, server, works, group)


class CompilerError(TraceError):
    """What the compiler does not make of a step."""


class CapturedStep:
    """A captured step of a number of clients, and the memory that it reads and writes."""

    def __init__(self, how: GraphExecutor, algorithm: ClientRound, server: Any, works: Any, group: Group) -> None:
        self.plan = plan(algorithm, server, works, group, how.layout, how.compiled, how.say)
        self.algorithm, self.steps = algorithm, group.steps
        # Of the server's state only what a step reads: the pool, which it does not, changes its size.
        leaves, before = tree.leaves(server), len(tree.leaves(self.plan.everyone))
        read = [i - before for i in self.plan.traced.reads if i >= before]
        self.server = {i: leaves[i].clone() for i in read}
        fixed = [self.server.get(i, leaf) for i, leaf in enumerate(leaves)]
        inputs = [self.plan.traced.inputs([*tree.leaves(lane), *fixed]) for lane in self.plan.lanes]
        operations = len(self.plan.traced.module.graph.nodes) * len(self.plan.lanes)
        longest = LONGEST if how.compiled else LONGEST_PLAIN
        self.repeats = divisor(self.steps // self.plan.at_a_time, longest // operations)
        self.replay = self._captured(how, inputs)
        together = "as one vectorised program" if self.plan.shared else "with a stream each"
        what = "compiled" if how.compiled else "not compiled"
        launch = self.repeats * self.plan.at_a_time
        self.description = f"{len(group.clients)} clients {together}, {what}, {launch} steps per launch"

    def _captured(self, how: GraphExecutor, inputs: list[list[Tensor]]) -> Callable[[], None]:
        step: Callable[..., Any] = self.plan.traced.module

        def lane(mine: list[Tensor]) -> Callable[[], None]:
            return lambda: step(*mine) and None

        lanes = [lane(mine) for mine in inputs]
        if not how.compiled:
            return how.capture(lanes, self.repeats, self.plan.large)
        how.say("executor: compiling the step, up to a few minutes for a deep network ...")
        try:
            with explained():
                step = fuse(self.plan.traced.module, inputs[0])
                return how.capture(lanes, self.repeats, self.plan.large)
        except TraceError as error:
            raise CompilerError(str(error)) from error

    def fits(self, algorithm: ClientRound, server: Any, works: Any, feed: Feed) -> bool:
        """Whether this round's tensors are of the sizes that were captured."""
        leaves, everyone = tree.leaves(server), self.plan.everyone
        pairs = [(leaves[i], mine) for i, mine in self.server.items()]
        pairs += zip(tree.leaves((works, feed)), tree.leaves((everyone.work, everyone.feed)), strict=True)
        return algorithm is self.algorithm and all(given.shape == mine.shape for given, mine in pairs)

    def run(self, server: Any, works: Any, feed: Feed) -> tuple[Any, Any]:
        """A whole round: (works, traces), one row per client. Nothing here waits for the device."""
        leaves, everyone = tree.leaves(server), self.plan.everyone
        everyone.k.zero_()
        into = [*self.server.values(), *tree.leaves((everyone.work, everyone.feed))]
        torch._foreach_copy_(into, [*(leaves[i] for i in self.server), *tree.leaves((works, feed))])
        for _ in range(self.steps // (self.repeats * self.plan.at_a_time)):
            self.replay()
        return everyone.work, everyone.slots
