"""Traces of functions that write into their arguments, replayed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedxl.engine.cuda.trace import refused_compiler, trace

compiles = pytest.mark.skipif(
    shutil.which("g++") is None or bool(refused_compiler()), reason=refused_compiler() or "needs a C++ compiler"
)


def replayed(function: Callable[..., None], arguments: Sequence[Tensor], vectorised: bool = False) -> list[Any]:
    """Replay a trace that is not compiled on the arguments themselves; its operations."""
    traced = trace(function, arguments, vectorised=vectorised, compiled=False)
    with torch.no_grad():
        traced.module(*traced.inputs(arguments))
    return list(traced.module.graph.nodes)


def assert_same(function: Callable[..., None], examples: Sequence[Tensor]) -> list[Any]:
    """Replayed, a function writes the numbers that it writes itself; the targets of its trace."""
    wanted, found = ([tensor.clone() for tensor in examples] for _ in range(2))
    function(*wanted)
    nodes = replayed(function, found)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return [node.target for node in nodes]
