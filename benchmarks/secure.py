"""What a secure sum costs against a plain one: bytes, seconds of the processor, seconds of a round over processes.

python benchmarks/secure.py [FOLDER] [--deployed]

Sites and server share one process here, so seconds are those of the processor and do not depend on a network. With
--deployed, rounds over real processes on this machine are timed, too. It writes secure.json, .md and .png.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from common import machine

from fedxl.cli.processes import free_port
from fedxl.config.experiment import Config
from fedxl.deploy.processes import local
from fedxl.deploy.protocol.envelope import Envelope, Failure, Kind
from fedxl.deploy.provision import folders
from fedxl.deploy.provision.settings import read_server, read_site
from fedxl.deploy.server.serve import serve
from fedxl.deploy.site.requests import HANDLERS
from fedxl.errors import first_line
from fedxl.files import write_json
from fedxl.progress import progress
from fedxl.training.run_folder import read_run
from fedxl.training.settings import Hooks

WAYS = {"plain": (0, False), "secure, 32 bits": (32, True), "secure, 64 bits": (64, True)}
ROUNDS = 1
DEPLOYED = ("plain", "secure, 64 bits")


class Counting:
    """Calls sites directly. Counts the bytes of all messages, and the seconds that sites take for them.

    `lost` sites fail to train in every round: they are dropouts after the shares.
    """

    def __init__(self, folder: Path, names: Sequence[str], lost: int) -> None:
        self.sites = {name: read_site(folder / "sites" / name / "site.toml") for name in names}
        self.lost, self.waiting = set(names[:lost]), dict[str, Envelope | Failure]()
        self.bytes, self.seconds = Counter[str](), 0.0

    def nodes(self) -> Mapping[str, str]:
        return {name: name for name in self.sites}

    def approved(self) -> None:
        return None

    def wait(self, seconds: float) -> None:
        pass

    def send(self, envelopes: Mapping[str, Envelope], kind: Kind, seconds: float) -> Mapping[str, str]:
        tickets = {}
        for node, request in envelopes.items():
            ticket = f"{len(self.waiting)} {node} {time.monotonic_ns()}"
            tickets[ticket], began = node, time.process_time()
            gone = node in self.lost and kind == "train" and request.facts["round"] > 0
            reply = Failure("lost") if gone else self._reply(node, kind, request)
            if request.facts.get("round", 1) > 0 and kind != "hello":
                self.seconds += time.process_time() - began
                self.bytes["down"] += size(request)
                self.bytes["up"] += size(reply) if isinstance(reply, Envelope) else 0
            self.waiting[ticket] = reply
        return tickets

    def _reply(self, node: str, kind: Kind, request: Envelope) -> Envelope | Failure:
        try:
            return HANDLERS[kind](self.sites[node], request)
        except ValueError as error:
            return Failure(first_line(error))

    def replies(self, tickets: Sequence[str]) -> Iterable[tuple[str, Envelope | Failure]]:
        return [(ticket, self.waiting.pop(ticket)) for ticket in tickets]

    def forget(self, tickets: Sequence[str]) -> None:
        pass


def size(message: Envelope) -> int:
    return message.size + sum(len(name) + len(str(value)) for name, value in message.facts.items())


def experiment(sites: int, hidden: Sequence[int], bits: int, rounds: int = ROUNDS) -> Config:
    return Config(
        data={"name": "digits", "clients": sites, "one_class": 0},
        model={"name": "mlp", "hidden": list(hidden)},
        risk={"name": "pauc"},
        algorithm={"name": "fedxl2", "lr": 0.02, "fixed_point": bits},
        run={"rounds": rounds, "local_steps": 8, "batch1": 8, "batch2": 8, "eval_every": 1, "device": "cpu"},
    )


def measured(sites: int, hidden: Sequence[int], way: str, lost: int = 0) -> dict[str, float]:
    """Bytes and seconds of a round, means over rounds; of the server, and of a site."""
    bits, masked = WAYS[way]
    names = [f"s{number}" for number in range(sites)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "f"
        folders.init(names, folder, config=experiment(sites, hidden, bits))
        file = read_server(folder / "server" / "server.toml")
        file = replace(file, settings=replace(file.settings, secure=masked, minimum=1))
        carrier = Counting(folder, names, lost)
        began: list[float] = []

        def start(progress: Any) -> None:
            """After the warm-up."""
            if progress.round == 0:
                began.append(time.process_time())

        serve(file, carrier, Hooks(start, lambda line: None))
        total = time.process_time() - began[0]
    each = sites * ROUNDS
    found = {name: count / each for name, count in carrier.bytes.items()}
    return {**found, "site": carrier.seconds / each, "server": (total - carrier.seconds) / ROUNDS}


def deployed(sites: int, way: str, rounds: int = 12) -> float:
    """Seconds of a round over real processes: the median."""
    bits, masked = WAYS[way]
    names = [f"s{number}" for number in range(sites)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "f"
        folders.init(names, folder, port=free_port(), config=experiment(sites, [64], bits, rounds))
        file = folder / "server" / "server.toml"
        file.write_text(file.read_text().replace("[server]", f"[server]\nsecure = {str(masked).lower()}", 1))
        rows = read_run(local(folder, lambda line: None).out).rows
    gaps = sorted(after["seconds"] - before["seconds"] for before, after in itertools.pairwise(rows))
    return gaps[len(gaps) // 2]


CASES = [
    ("4 sites, 4,200 weights", 4, (64,), 0),
    ("16 sites, 4,200 weights", 16, (64,), 0),
    ("8 sites, 280,000 weights", 8, (500, 500), 0),
    ("8 sites, 280,000 weights, 2 lost", 8, (500, 500), 2),
]
COLUMNS = {"up": "bytes up", "down": "bytes down", "site": "a site's seconds", "server": "the server's seconds"}


def table(rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    lines = [f"| | | {' | '.join(COLUMNS.values())} |", f"| --- | --- |{' ---: |' * len(COLUMNS)}"]
    for case, ways in rows.items():
        for way, found in ways.items():
            plain = ways["plain"]
            cells = [f"{found[name]:,.0f}" if name in ("up", "down") else f"{found[name]:.3f}" for name in COLUMNS]
            if way != "plain":
                cells = [
                    f"{cell} ({found[name] / plain[name]:.2f})" for cell, name in zip(cells, COLUMNS, strict=True)
                ]
            lines.append(f"| {case} | {way} | {' | '.join(cells)} |")
    return lines


def heading() -> list[str]:
    about = (
        "A round of FeDXL2 (weights and G, 8 local steps, batches of 8 and 8), after the warm-up: bytes of "
        "a site's messages, and processor seconds of a site and of the server, its evaluation and checkpoint "
        "included. In brackets: times plain. Seconds are of one round each, on a machine that was busy."
    )
    return ["# The cost of secure sums", "", about, "", f"On {machine()}. `python benchmarks/secure.py`", ""]


def over_processes(found: Mapping[str, Sequence[float]]) -> list[str]:
    plain, masked = (min(found[way]) for way in DEPLOYED)
    return [
        f"Over real processes (three sites, 4,200 weights, one machine) a round takes {plain:.2f} s plain and "
        f"{masked:.2f} s under masks, {masked / plain:.1f} times as long (the faster of two runs each, in turns; "
        "`--deployed`). A round has five exchanges instead of one."
    ]


def draw(rows: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True, layout="constrained")
    for axis, name in zip(axes, ("up", "site", "server"), strict=True):
        for offset, way in enumerate(list(WAYS)[1:]):
            ratios = [ways[way][name] / ways["plain"][name] for ways in rows.values()]
            places = [place + 0.38 * offset - 0.19 for place in range(len(rows))]
            bars = axis.barh(places, ratios, 0.36, label=way)
            axis.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlim(0, 3)
        axis.set_title(f"{COLUMNS[name]}, times plain", fontsize=10)
    axes[0].set_yticks(range(len(rows)), list(rows))
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", default="docs/results")
    parser.add_argument("--deployed", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    measured(2, (8,), "plain")  # imports and caches
    rows: dict[str, dict[str, dict[str, float]]] = {}
    with progress("cases", len(CASES)) as done:
        for case, sites, hidden, lost in CASES:
            rows[case] = {way: measured(sites, hidden, way, lost) for way in WAYS}
            done(1)
    content: dict[str, Any] = {"rounds": rows}
    lines = [*heading(), *table(rows)]
    if arguments.deployed:
        # In turns, so that a noisy moment of the machine falls on all of them.
        turns = [(way, deployed(3, way)) for _ in range(2) for way in DEPLOYED]
        content["deployed"] = {way: [seconds for each, seconds in turns if each == way] for way in DEPLOYED}
        lines += ["", *over_processes(content["deployed"])]
    write_json(folder / "secure.json", content)
    (folder / "secure.md").write_text("\n".join(lines) + "\n\n![Times plain](secure.png)\n")
    draw(rows, folder / "secure.png")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
