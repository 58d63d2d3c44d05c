"""Capture lanes of work once and replay them: as a CUDA graph, or, where there is none, by calling them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

Play = Callable[[], None]  # reads and writes fixed memory, returns nothing

# Fewer leave the card idle between small kernels; large kernels rather share the cache with few others
# (docs/performance.md).
STREAMS, STREAMS_OF_LARGE = 16, 4
# Of a convolution, to be timed. The library names the likeliest first; all hundred take minutes to build.
MOST_ALGORITHMS = 10


class Capture(Protocol):
    def __call__(self, lanes: Sequence[Play], repeats: int, large: bool) -> Play:
        """One call of the result runs every lane `repeats` times; lanes know nothing of each other.

        large: whether the kernels of one lane nearly fill the device.
        """


def again(lanes: Sequence[Play], repeats: int, large: bool) -> Play:
    """The stand-in for devices without graphs: the same lanes in the same memory, warmed up and called again."""
    for lane in lanes:
        lane()

    def replay() -> None:
        for lane in lanes:
            for _ in range(repeats):
                lane()

    return replay


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
