"""A round's cost against the size of the population, cohort fixed, and what the population itself takes in memory.

python benchmarks/population.py
"""

from __future__ import annotations

from common import compare, job, machine, population

from fedxl import tree

COHORT = 50


def main() -> None:
    print(machine())
    jobs = {n: job("fedxl2", population(n), "vmap", 4, cohort=COHORT) for n in (100, 1_000, 10_000)}

    def rounds(num_clients: int) -> None:
        for _ in range(5):
            jobs[num_clients].round()

    seconds = compare({str(n): lambda n=n: rounds(n) for n in jobs}, 9)
    base = seconds["100"]
    print(f"\ncohort {COHORT}, 64 examples per client, MLP 64-64-1, batch 16+16, 4 steps per round:")
    for num_clients, one in jobs.items():
        states = one.engine.population.states
        held = sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(states))
        data = one.engine.data.x.numel() * 4
        ratio = seconds[str(num_clients)] / base
        print(
            f"  {num_clients:>6} clients: {ratio:.2f} times the cost for 100; data {data / 1e6:.1f} MB, private state"
        )
        print(f"         of the {len(states)} seen so far {held / 1e3:.1f} kB ({held / len(states):.0f} bytes each)")


if __name__ == "__main__":
    main()
