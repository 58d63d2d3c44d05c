"""A secure sum over real processes, with a site killed in the middle: what the server got, and what came of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("cryptography", reason="needs fedxl[deploy]")

from fedxl import tree
from fedxl.deploy.protocol.envelope import Failure
from fedxl.deploy.provision.folders import SAFE
from fedxl.deploy.provision.settings import ServerFile, ServerSettings
from fedxl.deploy.server.serve import serve
from fedxl.deploy.site import requests
from fedxl.deploy.storage import kept_seed
from tests.deploy.deployment import Deployment
from tests.deploy.federated import DATA, QUIET, SITES, InProcess, config

NAMES = SITES[:3]  # two of them must be left
# In every process: what the server receives, and what each site has come to, go to files. Site c dies in round 1 as
# soon as it has masked its update. Started again, it is asked for the same once more, and does no step twice.
HOOK = """
import importlib.abc, importlib.machinery, os, signal, sys
from pathlib import Path

FOLDER = Path(os.environ["SEEN"])

def save(name, tensors):
    from safetensors.torch import save_file
    copies = {key: leaf.detach().clone().contiguous() for key, leaf in tensors.items()}
    save_file(copies, FOLDER / f"{name}.safetensors")

def server(hub):
    read = hub.read_reply
    def noted(content, megabytes):
        found = read(content, megabytes)
        if getattr(found, "tensors", None):
            save(f"received-{found.facts['site']}-{found.facts['round']}", found.tensors)
        return found
    hub.read_reply = noted

def site(secure):
    disclosed = secure.disclosed
    def noted(site, request, algorithm, phase, server, update):
        sent = disclosed(site, request, algorithm, phase, server, update)
        name, round = os.environ["SITE"], request.facts["round"]
        save(f"own-{name}-{round}", secure.tree.pack({"weights": update.weights, "G": update.G}))
        if "masked" in sent:
            one = secure.tree.map(lambda leaf: leaf[None], update)
            save(f"codes-{name}-{round}", {"codes": secure.flat(secure.codes(64, algorithm, server, one))})
        if name == "c" and round == 1 and not (FOLDER / "dead").exists():
            (FOLDER / "dead").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sent
    secure.disclosed = noted

SPOILT = {"fedxl.deploy.transport.tls.hub": server, "fedxl.deploy.site.secure": site}

class Spoil(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in SPOILT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            SPOILT[name](module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Spoil())
"""


def plain(folder: Path, experiment: Any, dropped: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The same rounds without masks, and without the sites that were lost."""
    carrier = InProcess(folder, private_draws=True)
    carrier.sites = {
        str(100 + n): replace(carrier.sites[str(100 + n)], data=experiment.data) for n in range(len(NAMES))
    }
    carrier.faults = {(NAMES.index(entry["site"]), entry["round"]): Failure("lost") for entry in dropped}
    experiment = replace(experiment, algorithm={**SAFE, "clip_change": 0.0, **experiment.algorithm})
    settings = ServerSettings(sites=NAMES, deadline=5.0, join=60.0)
    return tree.pack(serve(ServerFile(settings, experiment, folder / "server"), carrier, QUIET).server)


@pytest.mark.deploy
def test_a_site_is_killed_and_the_sum_is_exact_and_nothing_else_is_seen(tmp_path, monkeypatch):
    seen, hooks = tmp_path / "seen", tmp_path / "hooks"
    seen.mkdir()
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(hooks), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = config("fedxl2", rounds=2, cohort=0, eval_every=1)
    experiment = replace(given, data={**DATA, "one_class": 0}, algorithm={**given.algorithm, "fixed_point": 64})
    with Deployment(tmp_path / "f", NAMES, experiment, minimum=2, secure="true", private_draws="false") as federation:
        for name in ("server", *NAMES):
            federation.start(name, PYTHONPATH=path, SEEN=str(seen), SITE=name)
        federation.until((seen / "dead").exists, "a site that dies")
        federation.processes["c"].wait()
        federation.start("c", PYTHONPATH=path, SEEN=str(seen), SITE="c")
        found = federation.finished()
        dropped = federation.dropped()
    # The reference draws what the sites drew, from the seeds that they kept to themselves.
    kept = [*(tmp_path / "f" / "sites").glob("*/state/*/private.seed")]
    seeds = {path.parents[2].name: kept_seed(path) for path in kept}
    assert seeds.keys() == set(NAMES)
    monkeypatch.setattr(requests, "kept_seed", lambda path: seeds[path.parents[2].name])
    assert ("c", 1) in {(entry["site"], entry["round"]) for entry in dropped}
    assert (seen / "dead").exists()
    for name, tensor in plain(tmp_path / "plain", experiment, dropped).items():
        torch.testing.assert_close(found.tensors[f"server.{name}"], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    assert int(found.tensors["population.base.c"]) == 2, "it has returned"
    assert not (seen / "received-c-1.safetensors").exists()
    received = sorted(seen.glob("received-*.safetensors"))
    assert len(received) >= 3 + 2 + 2, "all of round 0, two sites of round 1, and at least two of round 2"
    for file in received:
        require_hidden(file, seen)


def require_hidden(file: Path, seen: Path) -> None:
    """What arrived of a site holds no number of its weights and G, and what is masked looks like noise."""
    who = file.name.removeprefix("received-")
    sent, own = load_file(file), load_file(seen / f"own-{who}")
    assert not any(name.startswith(("weights", "G")) for name in sent)
    open_ones = np.concatenate([t.double().numpy().ravel() for name, t in sent.items() if name != "masked"])
    mine = np.concatenate([leaf.double().numpy().ravel() for leaf in own.values()])
    assert not np.isin(mine[mine != 0], open_ones).any()
    assert ("masked" in sent) is (seen / f"codes-{who}").exists()
    if "masked" in sent:
        masked, codes = sent["masked"].numpy(), load_file(seen / f"codes-{who}")["codes"].numpy()
        assert not (masked == codes).any()
        assert abs(np.corrcoef(masked.astype(float), codes.astype(float))[0, 1]) < 5 / np.sqrt(len(codes))
