"""Networks of torchvision, timm and Hugging Face by name, where the package is installed.

Nothing is downloaded, and no code comes with a network: its weights are random, or those of a file.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedxl.errors import UserError, first_line, require, require_known
from fedxl.models.functional import temporarily
from fedxl.models.layers import load_file, read_tensors

ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, AssertionError, ImportError)
FETCHES = ("pretrained", "checkpoint", "weights", "cache")  # how settings begin that load something
log = logging.getLogger("fedxl")


def torchvision(name: str, shape: tuple[int, ...], outputs: int = 1, weights: str = "", **settings: Any) -> nn.Module:
    """A classifier of torchvision: `torchvision:resnet18`. weights: a file to begin with; other settings: its own."""
    package = _package("torchvision", name, settings)
    colours = len(shape) == 3 and shape[0] == 3
    require(colours, f"networks of torchvision take images [3, height, width], not examples of shape {list(shape)}")
    model = _built(lambda: package.models.get_model(name, weights=None, num_classes=outputs, **settings), name)
    return _with_weights(model, weights)


def timm(name: str, shape: tuple[int, ...], outputs: int = 1, weights: str = "", **settings: Any) -> nn.Module:
    """A network of timm: `timm:vit_tiny_patch16_224`. weights: a file to begin with; other settings: its own.

    A network for images of one size is built for the size of the examples.
    """
    package = _package("timm", name, settings)
    require(len(shape) == 3, f"networks of timm take images [channels, height, width], not examples {list(shape)}")
    require(package.is_model(name), f"timm {package.__version__} has no network '{name}'")
    usual: Any = package.get_pretrained_cfg(name)
    size = {"img_size": shape[1:]} if usual is not None and usual.fixed_input_size else {}
    settings = {"in_chans": shape[0], "num_classes": outputs, **size, **settings}
    return _with_weights(_built(lambda: package.create_model(name, pretrained=False, **settings), name), weights)


class TokenScorer(nn.Module):
    """A classifier of Hugging Face as a function of token ids [B, length]; what is padding is not attended to."""

    def __init__(self, network: nn.Module, padding: int | None) -> None:
        super().__init__()
        self.network, self.padding = network, padding

    def forward(self, x: Tensor) -> Tensor:
        mask = None if self.padding is None else x.ne(self.padding).long()
        logits: Tensor = self.network(input_ids=x, attention_mask=mask).logits
        return logits


def transformers(
    name: str, shape: tuple[int, ...], outputs: int = 1, weights: str = "", **settings: Any
) -> nn.Module:
    """A text classifier of Hugging Face by its type: `transformers:bert`. Examples are token ids, padded alike.

    weights: a file to begin with; other settings: those of its config.json, where they are not the type's defaults.
    """
    package = _package("transformers", name, settings)
    require(len(shape) == 1, f"networks of transformers take token ids [length], not examples of shape {list(shape)}")
    auto, kind = package.AutoConfig, package.AutoModelForSequenceClassification
    known = _built(lambda: auto.for_model(name), name).to_dict()
    for setting in settings:
        require_known("setting", setting, (name for name in known if not name.startswith("_")), "model.")
    # Plain attention: the kernels of others have no rules for vmap, or would be fetched.
    given = {**settings, "num_labels": outputs, "attn_implementation": "eager"}
    config = _built(lambda: auto.for_model(name, **given), name)
    model = _built(lambda: kind.from_config(config, trust_remote_code=False), name)
    model = _hugging_weights(package, model, config, weights) if weights else model
    return TokenScorer(model, config.pad_token_id)


# "package:name" -> function that builds it
LIBRARIES = {"torchvision": torchvision, "timm": timm, "transformers": transformers}


def library_of(name: str) -> str:
    """The library that a name begins with; "" if it is none of ours."""
    prefix, colon, _ = name.partition(":")
    return prefix if colon and prefix in LIBRARIES else ""


def _package(library: str, name: str, settings: Mapping[str, Any]) -> Any:
    """The package. Raises UserError if it is missing, or would have to fetch something."""
    fetches = [name] if {"/", ":"} & {*name} else [each for each in settings if each.startswith(FETCHES)]
    told = "name a network of {} itself, with weights = the path of a file; nothing is downloaded"
    require(not fetches, f"'{''.join(fetches[:1])}': {told.format(library)}")
    try:
        return importlib.import_module(library)
    except Exception as error:  # a package built for another torch may raise anything
        told = f"the network '{library}:{name}' needs the package {library}"
        raise UserError(f"{told}, which cannot be imported: {first_line(error)}") from error


def _built(build: Callable[[], Any], name: str) -> Any:
    try:
        return build()
    except ERRORS as error:
        raise UserError(f"cannot build '{name}': {first_line(error)}") from error


def _with_weights(model: nn.Module, weights: str) -> nn.Module:
    head, *_ = [name.rpartition(".")[0] for name, _ in reversed(list(model.named_parameters()))]
    return load_file(model, weights, head) if weights else model


def _hugging_weights(package: Any, model: Any, config: Any, weights: str) -> Any:
    """The network with a file's weights, by the rules of transformers: old names, and encoders without a head."""
    state = dict(read_tensors(Path(weights)))
    given = {"config": config, "state_dict": state, "ignore_mismatched_sizes": True, "output_loading_info": True}
    reports = package.logging  # one line of ours says what matters
    with temporarily(reports.set_verbosity, reports.get_verbosity(), logging.ERROR):
        model, told = _built(lambda: type(model).from_pretrained(None, **given), weights)
    new = sorted({*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])})
    fits = 2 * len(new) < len(model.state_dict())
    require(fits, f"{weights} is not of this network: it lacks '{next(iter(new), '')}' and {len(new) - 1} more")
    if new:
        log.warning("%s: these layers are not in it and start untrained: %s", weights, ", ".join(new))
    return model
