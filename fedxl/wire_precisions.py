"""How the weights of networks may be sent. Settings name it, and reading settings must not load torch."""

from __future__ import annotations

HALF = "bfloat16"
PRECISIONS = ("float32", HALF)  # of networks in messages; state keeps its own precision
