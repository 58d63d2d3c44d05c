"""What a site gets once: weights of a run that do not train, kept under their digest, and in the end its model."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read
from safetensors.torch import save
from torch import nn

from fedxl import tree, wire
from fedxl.deploy.protocol.envelope import Envelope
from fedxl.deploy.provision.settings import SiteFile
from fedxl.deploy.site import permission
from fedxl.deploy.storage import locked, writing_to
from fedxl.errors import refuse, require
from fedxl.files import DAMAGED, private_folder, read_bytes, write_atomically
from fedxl.models import Weights, check_buffers, digest, frozen_tensors, load
from fedxl.training.run_folder import WEIGHTS

MODEL = "model"  # the folder of the final model, in the site's own
log = logging.getLogger("fedxl")
FOLDER = "frozen"  # in a site's state; runs with the same backbone share a file


def keep(site: SiteFile, model: nn.Module, request: Envelope) -> None:
    """Write the frozen weights in a request to disk, if they are of this network and have the run's digest."""
    path = _path(site, request)
    received = wire.restore(tree.to(frozen_tensors(model), "cpu"), request.tensors)
    check_buffers(received)
    load(model, Weights(received, {}))
    refuse(digest(model) != request.facts["frozen"], "the frozen weights that it sends have another digest")
    content = save({name: leaf.clone() for name, leaf in received.items()})
    with locked(path.parent), writing_to(path.parent):
        write_atomically(path, content, private=True)


def load_kept(site: SiteFile, model: nn.Module, request: Envelope) -> bool:
    """Whether the network has the run's frozen weights, now that those on disk, if any, are in it."""
    wanted = str(request.facts.get("frozen", ""))
    if wanted == digest(model):  # nothing is frozen, or weights that follow from the run's seed
        return True
    refuse(not wanted, "it freezes nothing, and at this site parts of the network are frozen")
    try:
        kept = read(read_bytes(_path(site, request)))
        load(model, Weights(wire.fitted(tree.to(frozen_tensors(model), "cpu"), kept), {}))
    except (*DAMAGED, SafetensorError):  # missing or damaged: the server sends them
        return False
    return digest(model) == wanted


def take_model(site: SiteFile, request: Envelope) -> Envelope:
    """Whether this site has the final model of a run; it keeps the one that a request brings, if it took part."""
    permission.require_acceptable(request)
    took_part = sorted((site.state / str(request.facts["run"])).glob("round-*"))
    require(bool(took_part), "this site took no part in this run, and takes no model of it")
    if request.tensors:
        permission.count(site, "model")
        with locked(site.state, ".model.lock"), writing_to(site.folder, "the model that was there is intact"):
            _write_model(site, request)
    known = site.folder / MODEL / "model.json"
    has = known.is_file() and hashlib.sha256(read_bytes(known)).hexdigest() == request.facts["digest"]
    return Envelope({"site": site.settings.name, "has": has}, {})


def _write_model(site: SiteFile, request: Envelope) -> None:
    """Write a folder that `fedxl predict` reads, whole or not at all: files of fixed names, and none of them code."""
    from fedxl.prediction.export import DESCRIPTION, is_exported, read_exported  # loads scipy: only when needed
    from fedxl.prediction.run import rebuilt, with_weights

    flat = all(each.dtype == torch.uint8 and each.ndim == 1 for each in request.tensors.values())
    refuse(not flat or request.tensors.keys() != {DESCRIPTION, WEIGHTS}, "it sends other files than those of a model")
    target, fresh, old = (site.folder / name for name in (MODEL, f".{MODEL}.partial", f".{MODEL}.old"))
    free = not target.exists() or is_exported(target)
    require(free, f"{target} holds something else; its owner must move it away")
    for folder in (fresh, old):
        shutil.rmtree(folder, ignore_errors=True)
    private_folder(fresh)
    for name, content in request.tensors.items():
        write_atomically(fresh / name, content.numpy().tobytes(), private=True)
    found = read_exported(fresh)
    permission.require_listed(site, "model", str((found.model or {}).get("name")))
    # That network is one which this site has trained, wherever its code is from.
    with_weights(rebuilt(found.model or {}, found.form, found.weights_dtype, True), found.content(WEIGHTS), fresh)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    log.warning("the model of run %s is in %s", request.facts["run"], target)
    log.warning("sent so far, over all runs: %s", permission.answered(site))


def _path(site: SiteFile, request: Envelope) -> Path:
    wanted = str(request.facts.get("frozen", ""))
    refuse(not re.fullmatch(r"[0-9a-f]{64}", wanted), "the digest of its frozen weights is malformed")
    return site.state / FOLDER / f"{wanted}.safetensors"
