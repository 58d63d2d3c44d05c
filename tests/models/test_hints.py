"""Shapes that a network does not take: the one line says what would be right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedxl.errors import UserError
from fedxl.models import check_output


def images(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 2, 3), nn.Flatten(), nn.Linear(72, 1))


CASES = {
    "channels last": (images(3), (8, 8, 3), "these are [height, width, channels]: give x.permute(0, 3, 1, 2)"),
    "no channels": (images(1), (8, 8), "these have no channels: give x.unsqueeze(1)"),
    "flat images": (images(3), (64,), "images must be [channels, height, width], these have the shape [64]"),
    "other channels": (images(3), (1, 8, 8), "its first convolution takes 3 channels, these images have 1"),
    "images for rows": (
        nn.Linear(64, 1),
        (8, 8),
        "its first layer takes flat rows: begin the model with nn.Flatten()",
    ),
    "other features": (nn.Linear(7, 1), (5,), "its first layer takes 7 features, these examples have 5"),
    # A later layer is to blame, so torch's own words stand.
    "another size": (images(3), (3, 9, 9), "mat1 and mat2 shapes cannot be multiplied"),
    "wrong inside": (nn.Sequential(nn.Linear(5, 4), nn.Linear(3, 1)), (5,), "(2x4 and 3x1)"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_wrong_shape_is_one_line(case):
    model, shape, told = CASES[case]
    with pytest.raises(UserError) as error:
        check_output(model, torch.zeros(2, *shape), ())
    assert str(error.value).startswith(f"the model cannot score examples of shape {list(shape)}: ")
    assert told in str(error.value)


def test_tokens_beyond_the_embedding_are_told():
    model = nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(8, 1))
    with pytest.raises(UserError, match="its embedding takes 0 to 2, these examples hold 7"):
        check_output(model, torch.full((2, 2), 7), ())
