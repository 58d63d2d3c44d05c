"""What several GPUs would bring, from the measured time of a step on one and the bytes of a round.

python benchmarks/cards.py

A model, not a measurement: nothing of it has run on more than one card. docs/performance.md says what goes into it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

NETWORKS = {"NVLink": 360e9, "InfiniBand": 45e9}  # bytes per second that a card sends, as NCCL reaches them
CALL = 50e-6  # seconds of a collective, whatever its size
CALLS = 6  # a round: scores, two for each sum of networks, the word of rank 0 whether to stop
DOUBLE = 8  # bytes; sums are sent in double precision
PAYS = 1.5  # how much faster a round must become when the number of cards doubles


@dataclass(frozen=True)
class Workload:
    """What one card does in a round."""

    name: str
    clients: int
    steps: int
    numbers: float  # that clients send and the server averages
    scores: float  # bytes that a client adds to the pool
    step: float  # seconds of a step, whatever the number of clients
    client: float  # seconds that each client adds to it
    least: float = 0.0  # seconds of a round that the host needs beside the card

    def round(self, cards: int, bandwidth: float) -> float:
        clients = math.ceil(self.clients / cards)
        computing = max(self.least, self.steps * (self.step + self.client * clients))
        if cards == 1:
            return computing
        sums = 2 * (cards - 1) / cards * DOUBLE * self.numbers
        gathered = (cards - 1) * clients * self.scores
        return computing + CALLS * CALL + (sums + gathered) / bandwidth


# ResNet18 with the 7x7 stem, FeDXL2: weights and G, 2,048 scores of 20 bytes per client; 1.11 ms per step of one
# client and 16.5 of 64 were measured. The CNN of federated benchmarks, Local SGD: measured with 1 to 400 clients.
WORKLOADS = (
    Workload("ResNet18, 16 clients", 16, 32, 2 * 11.2e6, 2048 * 20, 0.9e-3, 0.26e-3),
    Workload("ResNet18, 64 clients", 64, 32, 2 * 11.2e6, 2048 * 20, 0.9e-3, 0.26e-3),
    Workload("federated CNN, cohort 50", 50, 5, 1.6e6, 0, 0.18e-3, 0.0211e-3, 4.5e-3),
    Workload("federated CNN, cohort 400", 400, 5, 1.6e6, 0, 0.18e-3, 0.0211e-3, 4.5e-3),
)


def main() -> None:
    counts = (1, 2, 4, 8, 16, 32, 64)
    print("| | network | " + " | ".join(f"{cards}" for cards in counts) + " | pays up to |")
    print("|---|---|" + "---:|" * (len(counts) + 1))
    for work in WORKLOADS:
        for network, bandwidth in NETWORKS.items():
            times = [work.round(cards, bandwidth) for cards in counts]
            gains = [before / after for before, after in pairwise(times)]
            pays = next((counts[i] for i, gain in enumerate(gains) if gain < PAYS), counts[-1])
            shown = " | ".join(f"{1000 * seconds:.1f}" for seconds in times)
            print(f"| {work.name} | {network} | {shown} | {pays} |")


if __name__ == "__main__":
    main()
