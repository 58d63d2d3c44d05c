"""model.onnx: written by torch, checked against torch, and read with nothing but what the file itself holds."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedxl.errors import UserError, first_line, require
from fedxl.training.run_folder import Form

ONNX = "model.onnx"
AGREES = 1e-5  # the largest difference between the scores of torch and of ONNX, over max(1, |score|)
BATCHES = (1, 2, 7, 64)  # the file must serve any; torch would bake in the one it was shown
MOST = 2**31 - 1  # bytes of a file of ONNX
LARGER = f"the network is larger than the {MOST / 2**30:.0f} GB that one ONNX file holds; --no-onnx leaves it out"


class Checked(NamedTuple):
    """A file of ONNX, and how well it agrees with torch."""

    content: bytes
    opset: int
    largest_error: float  # over max(1, |score|)
    examples: int  # that it was compared on


class Scores(nn.Module):
    """The network with [B] scores where it gives [B, 1]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).cpu().eval()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.network(x)
        return h.squeeze(-1) if h.ndim == 2 and h.shape[-1] == 1 else h


def to_onnx(network: nn.Module, form: Form) -> Checked:
    """The network as ONNX, compared with torch on examples of the run's shape; an error if they disagree."""
    require_extra()
    scores = Scores(network)
    proto = _stripped(_exported(copy.deepcopy(scores).float(), form))
    try:
        content: bytes = proto.SerializeToString()
    except ValueError:
        raise UserError(LARGER) from None
    require(len(content) <= MOST, LARGER)
    error, count = _compare(scores, content, form)
    require(error <= AGREES, f"ONNX and torch disagree by {error:.1e}, more than {AGREES:g}; --no-onnx leaves it out")
    return Checked(content, max(each.version for each in proto.opset_import), error, count)


def _exported(scores: nn.Module, form: Form) -> Any:
    options: dict[str, Any] = {"input_names": ["x"], "output_names": ["score"], "external_data": False}
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    x = _examples(form, 2, 0, 1.0)
    try:
        with _quiet():
            program: Any = torch.onnx.export(
                scores, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False, **options
            )
            return program.model_proto
    except Exception as error:  # the exporter may raise anything on a user's network
        why = f"torch cannot write this network as ONNX: {first_line(error)}"
        raise UserError(f"{why}; --no-onnx leaves it out") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporter warns of its own parts and of packages that nobody needs here."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _stripped(proto: Any) -> Any:
    """Without the traces that torch leaves at every node: they name files of this machine."""
    for graph in [proto.graph, *proto.functions]:
        for part in [graph, *graph.node, *getattr(graph, "initializer", ()), *graph.value_info]:
            del part.metadata_props[:]
            part.doc_string = ""
    del proto.metadata_props[:]
    return proto


def _compare(scores: nn.Module, content: bytes, form: Form) -> tuple[float, int]:
    """The largest difference between torch and ONNX, and how many examples were compared."""
    run, worst, count = scorer(content), 0.0, 0
    dtype = getattr(torch, form.dtype)  # torch scores in the precision of the run, ONNX in single precision
    for seed, size in enumerate(BATCHES):
        for scale in (0.0, 1.0, 10.0):
            x = _examples(form, size, seed, scale)
            with torch.no_grad():
                expected = scores(x.to(dtype))
            found = run(x)
            same = found.shape == expected.shape
            require(same, f"ONNX gives scores of shape {list(found.shape)}, torch of {list(expected.shape)}")
            gap = (found.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
            worst = max(worst, float(gap.max())) if bool(gap.isfinite().all()) else math.inf
            count += size
    return worst, count


def _examples(form: Form, count: int, seed: int, scale: float) -> Tensor:
    """Numbers of the shape and type of an example; scale 0: those of a picture, between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, form.dtype)
    if not dtype.is_floating_point:  # numbers of which we know only that 0 and 1 are among them
        return torch.randint(2, (count, *form.shape), generator=generator).to(dtype)
    if not scale:
        return torch.rand(count, *form.shape, generator=generator)
    return scale * torch.randn(count, *form.shape, generator=generator)


def scorer(content: bytes) -> Any:
    """The file as a function of examples [B, ...] -> [B]."""
    require_extra()
    import onnxruntime

    _require_closed(content)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        entry = session.get_inputs()[0]
        single = len(session.get_inputs()) == 1 and len(session.get_outputs()) == 1
    except Exception as error:  # the runtime's errors have no common class
        raise UserError(f"{ONNX} cannot be used: {first_line(error)}") from None
    require(single, f"{ONNX} must have one input and one output")

    def score(x: Tensor) -> Tensor:
        given = x.float() if x.is_floating_point() else x
        try:
            found = session.run(None, {entry.name: given.cpu().numpy()})[0]
        except Exception as error:
            shape = list(x.shape[1:])
            raise UserError(f"{ONNX} cannot score examples of shape {shape}: {first_line(error)}") from None
        return torch.from_numpy(np.asarray(found))

    return score


def _require_closed(content: bytes) -> None:
    """Refuse a file that names other files, which the runtime would read, wherever they lie."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from onnx.external_data_helper import _get_all_tensors, uses_external_data

    try:
        proto = onnx.load_model_from_string(content)
    except DecodeError as error:
        raise UserError(f"{ONNX} is not a file of ONNX: {first_line(error)}") from None
    outside = any(map(uses_external_data, _get_all_tensors(proto)))
    require(not outside, f"{ONNX} names other files for its weights, which fedxl never writes and does not read")


def require_extra() -> None:
    """Raises UserError if the packages for ONNX are not there."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(name)
        except ImportError:
            raise UserError(f"ONNX needs {name}; pip install 'fedxl[export]', or --no-onnx leaves it out") from None
