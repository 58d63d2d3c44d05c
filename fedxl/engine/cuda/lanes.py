"""Clients side by side: the fixed memory in which they step, and whether each has its own lane or all share one.

They are captured once as a CUDA graph and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedxl import tree
from fedxl.algorithms.protocol import Batch
from fedxl.engine.cuda.products import as_products
from fedxl.engine.cuda.trace import Census, Traced, TraceError, explained, outline, trace
from fedxl.engine.executors import ClientRound, Feed, Group

Play = Callable[[], None]  # reads and writes fixed memory, returns nothing

# Fewer leave the card idle between small kernels; large kernels rather share the cache with few others
# (docs/performance.md).
STREAMS, STREAMS_OF_LARGE = 16, 4
# Of a convolution, to be timed. The library names the likeliest first; all hundred take minutes to build.
MOST_ALGORITHMS = 10
# (lanes, repeats, large): one call of the result runs every lane so many times; lanes know nothing of each other.
# large: whether the kernels of one lane nearly fill the device.
Capture = Callable[[Sequence[Play], int, bool], Play]
Layout = Literal["auto", "streams", "vectorised"]

# So many operations may be compiled together. Where several steps fit in, a step's last kernel does the next one's
# first, too: weights are cast as they are updated, and need not be read again.
TOGETHER = 2000
# Up to so many numbers in the windows of a client's convolutions all clients share a lane, whose program lays them
# out in memory; beyond, each client has a lane and its stream. Not compiled, every network with convolutions that
# was measured is faster on streams (docs/notes/compiler.md).
SHARED_WINDOWS, SHARED_WINDOWS_NOT_COMPILED = 2**25, 0
# With more in the windows of one convolution, on average, the kernels of a client nearly fill a GPU.
LARGE_WINDOWS = 2**23
SMALLEST_MAPS = 4  # pixels
ALIGNMENT = 512  # bytes: where compiled kernels and the allocator like a tensor to begin


def cuda_graph(lanes: Sequence[Play], repeats: int, large: bool) -> Play:
    """A CUDA graph, the lanes side by side. A lane's repeats follow each other without waiting for other lanes."""
    number = min(STREAMS_OF_LARGE if large else STREAMS, len(lanes))
    origin, streams = torch.cuda.Stream(), [torch.cuda.Stream() for _ in range(number)]
    on = [streams[i % len(streams)] for i in range(len(lanes))]
    # A warm-up on the stream of the capture: libraries choose their algorithms and workspaces now, not then.
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(2):
        for lane, stream in zip(lanes, on, strict=True):
            with torch.cuda.stream(stream):
                lane()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=origin):
        for stream in streams:
            stream.wait_stream(origin)
        for lane, stream in zip(lanes, on, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(repeats):
                    lane()
        for stream in streams:
            origin.wait_stream(stream)
    return graph.replay


@contextmanager
def searching() -> Iterator[None]:
    """Let the library time its convolutions and take the fastest, unless results must be the same bits each time."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = not torch.are_deterministic_algorithms_enabled(), MOST_ALGORITHMS
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


class Lane(NamedTuple):
    """The memory of clients that step together: feeds [K, ...] of one, or [C, K, ...] of all."""

    k: Tensor  # [1] the step to come
    work: Any
    feed: Feed
    slots: Any  # the traces of all steps


class Stepper(NamedTuple):
    """A step in a lane, or several: read, step, and write the results where they are read from next."""

    step: Callable[..., tuple[Any, Any]]
    batch: Callable[[Feed], Batch]
    dim: int  # where a feed has its steps: 0, or 1 behind the clients
    steps: int  # of a round
    at_a_time: int = 1

    def __call__(self, lane: Lane, server: Any) -> None:
        for _ in range(self.at_a_time):
            work, trace = self.compute(lane.k, lane.work, lane.feed, server)
            _refuse_crossed(lane.work, work)
            tree.map(lambda slot, new: slot.index_copy_(self.dim, lane.k, new.unsqueeze(self.dim)), lane.slots, trace)
            tree.map(lambda old, new: old.copy_(new), lane.work, work)
            lane.k.copy_((lane.k + 1) % self.steps)

    def compute(self, k: Tensor, work: Any, feed: Feed, server: Any) -> tuple[Any, Any]:
        now = tree.map(lambda leaf: leaf.index_select(self.dim, k).squeeze(self.dim), feed)
        return self.step(server, work, self.batch(now))

    def slots(self, k: Tensor, work: Any, feed: Feed, server: Any) -> Any:
        """Room for the traces of all steps of one client."""

        def room(leaf: Tensor) -> Tensor:
            return torch.zeros((self.steps, *leaf.shape), dtype=leaf.dtype, device=k.device)

        with explained():
            _, trace = outline(self.compute, (k, work, feed, server))
        return tree.map(room, trace)


def _refuse_crossed(old: Any, new: Any) -> None:
    """One leaf is written after another, so none may be read for another that comes later.

    A copy would do, but Inductor takes it for the leaf itself (torch 2.11 to 2.15; test_workarounds.py).
    """
    places = {leaf.untyped_storage()._cdata: name for name, leaf in tree.pack(old).items()}
    for name, leaf in tree.pack(new).items():
        held = places.get(leaf.untyped_storage()._cdata, name)
        if held != name:
            raise TraceError(f"its new {name} is its old {held}; a copy of it (+ 0) would do")


class Plan(NamedTuple):
    """Who steps where: what one lane's step does, all lanes, and their memory as one, one row per client."""

    traced: Traced
    lanes: list[Lane]
    everyone: Lane
    shared: bool  # one lane for all clients
    at_a_time: int  # steps that the trace holds
    large: bool  # whether the kernels of one client nearly fill a GPU


def plan(
    algorithm: ClientRound, server: Any, works: Any, group: Group, layout: Layout, compiled: bool,
    say: Callable[[str], None],
) -> Plan:  # fmt: skip
    """Lanes for the clients of a group, and the trace of what happens in each."""
    stepper = Stepper(algorithm.step, group.batch, 0, group.steps)
    k = group.feed.y.new_zeros((len(group.clients), 1), dtype=torch.int64)
    with Census() as census:
        slots = stepper.slots(*tree.map(lambda leaf: leaf[0].contiguous(), (k, works, group.feed)), server)
    slots, reason = tree.map(lambda leaf: leaf.expand(len(group.clients), *leaf.shape), slots), ""
    most = SHARED_WINDOWS if compiled else SHARED_WINDOWS_NOT_COMPILED
    if layout == "vectorised" or (layout == "auto" and census.windows <= most):
        lane = Lane(k[0], *tree.map(lambda leaf: _rows(leaf, alignment=1), (works, group.feed, slots)))
        try:
            return _shared(algorithm, server, lane, group, compiled)
        except TraceError as error:
            if layout == "vectorised":
                raise
            reason = str(error)
            del lane  # and its memory
    everyone = Lane(*tree.map(_rows, (k, works, group.feed, slots)))
    lanes = tree.unstack(everyone, len(group.clients))
    traced = _trace(stepper, lanes[0], server, vectorised=False, compiled=compiled)
    if reason:
        say(f"executor: one stream per client, because {reason}")
    # On maps this small all layouts of a convolution's numbers look alike, and the compiler takes one for another
    # (torch 2.11; tests/engine/cuda/test_workarounds.py).
    as_products(traced.module, 1, pixels=SMALLEST_MAPS)
    large = census.windows > LARGE_WINDOWS * census.convolutions
    return Plan(traced, lanes, everyone, shared=False, at_a_time=1, large=large)


def _shared(algorithm: ClientRound, server: Any, lane: Lane, group: Group, compiled: bool) -> Plan:
    """One lane, in which a vectorised program moves all clients."""
    step = vmap(algorithm.step, in_dims=(None, 0, 0), randomness="different")
    stepper = Stepper(step, group.batch, 1, group.steps)
    try:
        traced = _trace(stepper, lane, server, vectorised=True, compiled=compiled)
        fitting = TOGETHER // len(traced.module.graph.nodes) if compiled else 1
        stepper = stepper._replace(at_a_time=divisor(group.steps, fitting))
        if stepper.at_a_time > 1:
            traced = _trace(stepper, lane, server, vectorised=True, compiled=compiled)
    except TraceError as error:
        raise TraceError(f"the model cannot be vectorised: {error}") from error
    as_products(traced.module, len(group.clients))
    return Plan(traced, [lane], lane, shared=True, at_a_time=stepper.at_a_time, large=False)


def divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most `most`, or 1.

    >>> divisor(32, 20), divisor(5, 4), divisor(6, 0)
    (16, 1, 1)
    """
    return max((n for n in range(1, min(most, number) + 1) if number % n == 0), default=1)


def _rows(stacked: Tensor, alignment: int = ALIGNMENT) -> Tensor:
    """A copy with one row per client. Rows are aligned, and weights of convolutions have their channels last."""
    count, *shape = stacked.shape
    multiple = math.ceil(alignment / stacked.element_size())
    pitch = multiple * max(1, math.ceil(math.prod(shape) / multiple))
    images = len(shape) == 4 and stacked.is_floating_point()
    row = torch.empty(shape, device="meta", memory_format=torch.channels_last if images else torch.contiguous_format)
    memory = stacked.new_zeros(count, pitch)
    return memory.as_strided(stacked.shape, (pitch, *row.stride())).copy_(stacked)


def _trace(stepper: Stepper, lane: Lane, server: Any, vectorised: bool, compiled: bool) -> Traced:
    # Told of channels that come last, some layers ask vmap for what it does only client by client, and others refuse
    # to view their weights; so the trace is made as if all were contiguous, and takes what comes. Each leaf is a
    # tensor of its own: one that stood in two places (a first zero) would be one input, the other place never read.
    like = tree.map(lambda leaf: leaf.contiguous().detach(), (lane, server))
    return trace(lambda *leaves: stepper(*tree.rebuild(like, leaves)), tree.leaves(like), vectorised, compiled)
