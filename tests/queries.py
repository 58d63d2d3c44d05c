"""Items of queries that tests share."""

from __future__ import annotations

import torch

from fedxl.data.examples import Examples
from fedxl.data.inputs import from_queries


def scattered(seed: int = 0) -> Examples:
    """Three queries over three clients: at all, at two, and without a relevant item; one client holds none either."""
    generator = torch.Generator().manual_seed(seed)
    grades = [([2, 0, 1], [0, 0], [0]), ([1, 0], [3, 0, 0, 1], []), ([0], [0], [0, 0])]
    clients = []
    for client in range(3):
        y = torch.tensor([grade for query in grades for grade in query[client]])
        query = torch.tensor([number for number, query in enumerate(grades) for _ in query[client]])
        clients.append((torch.randn(len(y), 3, generator=generator, dtype=torch.float64), y, 10 + query))
    return from_queries(clients).train
