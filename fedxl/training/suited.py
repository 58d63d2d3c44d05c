"""Examples in a type that the network takes: integers stay for networks of tokens, and become floats for others."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedxl.data.source import Source, TensorSource
from fedxl.models import takes
from fedxl.training.problem import Problem


def suited(problem: Problem, source: Source) -> Source:
    """The source itself, or with floats for its integers if the network takes floats alone.

    The network decides: one that begins with an embedding takes integers and stays with them; a linear layer or a
    convolution refuses them and takes floats.
    """
    probe = source.fetch(torch.arange(min(2, len(source.labels)), device=source.labels.device)).to(problem.device)
    if probe.is_floating_point() or not isinstance(source, TensorSource) or takes(problem.model, probe):
        return source
    if not takes(problem.model, probe.to(problem.dtype)):
        return source  # the shape is wrong, not the type; whoever checks the output says so
    return replace(source, x=source.x.to(problem.dtype))
