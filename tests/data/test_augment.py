"""Crops, flips and noise: against plain slicing, the same bits wherever they are read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedxl import UserError
from fedxl.data.examples import BANK, Augment, Examples

LABELS = torch.tensor([[0], [1], [0], [1]])


def bytes_of(count: int = 5, channels: int = 3, size: int = 6) -> Tensor:
    return torch.randint(
        0, 256, (count, channels, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def source(augment: Augment) -> Examples:
    return Examples(bytes_of(), torch.tensor([[0], [1], [0], [1], [1]]), augment=augment)


def by_hand(image: Tensor, crop: int, down: int, right: int, flip: int) -> Tensor:
    """Pad, cut, flip: as one would write it for one image."""
    padded = functional.pad(image.float() / 255, [crop] * 4)
    height, width = image.shape[1:]
    cut = padded[:, down : down + height, right : right + width]
    return cut.flip(-1) if flip else cut


def test_every_crop_and_flip():
    augment = Augment(crop=2, flip=True)
    x, found = bytes_of(), source(augment)
    assert found.codes == 5 * 5 * 2
    codes = torch.arange(found.codes)
    images = found.fetch(torch.full_like(codes, 3), codes)
    expected = []
    for code in codes.tolist():
        down, right, flip = code % 5, code // 5 % 5, code // 25
        expected.append(by_hand(x[3], 2, down, right, flip))
    torch.testing.assert_close(images, torch.stack(expected), rtol=0, atol=0)
    assert len({tuple(image.flatten().tolist()) for image in images}) == found.codes, "all are different"


def test_any_shape_of_indices():
    found = source(Augment(crop=1, flip=True, noise=0.1))
    indices = torch.randint(0, 5, (2, 3, 4), generator=torch.Generator().manual_seed(1))
    codes = torch.randint(0, found.codes, (2, 3, 4), generator=torch.Generator().manual_seed(2))
    whole = found.fetch(indices, codes)
    assert whole.shape == (2, 3, 4, 3, 6, 6)
    for place in np.ndindex(2, 3, 4):
        assert torch.equal(whole[place], found.fetch(indices[place], codes[place]))


def test_noise_has_its_mean_and_deviation():
    plain = Examples(torch.full((4, 3, 16, 16), 0.5), LABELS, site=np.array([0, 0, 1, 1]))
    noisy = plain.augmented(Augment(noise=0.2, site_means=(-0.08, 0.1)))
    codes = torch.randint(0, BANK, (400,), generator=torch.Generator().manual_seed(0))
    for site, mean in enumerate((-0.08, 0.1)):
        pixels = noisy.fetch(torch.full((400,), 2 * site), codes) - 0.5
        assert float(pixels.mean()) == pytest.approx(mean, abs=0.005)
        assert float(pixels.std()) == pytest.approx(0.2, abs=0.005)
    assert not torch.equal(noisy.fetch(torch.tensor(0), codes[0]), noisy.fetch(torch.tensor(0), codes[1]))


def test_what_is_evaluated_is_left_alone():
    plain, found = source(Augment()), source(Augment(crop=2, flip=True, noise=0.2))
    everything = torch.arange(5)
    assert torch.equal(found.fetch(everything), plain.fetch(everything))
    assert plain.codes == 1
    assert torch.equal(plain.fetch(everything, torch.zeros(5, dtype=torch.int64)), plain.fetch(everything))


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match="crop must lie between 0 and"):
        Augment(crop=-1)
    with pytest.raises(UserError, match="noise must not be negative"):
        Augment(noise=-0.1)
    features = Examples(torch.randn(4, 3), LABELS)
    with pytest.raises(UserError, match=r"are for images \[channels, height, width\], not for \[3\]"):
        features.augmented(Augment(flip=True))
    with pytest.raises(UserError, match="site_means has 3 entries for 1 clients"):
        features.augmented(Augment(site_means=(0.1, 0.2, 0.3)))
    numbers = Examples(torch.ones(4, 1, 2, 2, dtype=torch.int16), LABELS)
    with pytest.raises(UserError, match=r"examples of torch\.int16 cannot be augmented"):
        numbers.augmented(Augment(noise=0.1))
