"""Augmentation of training images as they are read. One integer, the code, determines all random choices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.options import require_types
from fedxl.sampling import Purpose, generator

# Noise is read from a bank that is drawn once, at an offset that the code gives: the same bits on every device and in
# every executor, at the cost of a gather. Two reads for a 32 x 32 colour image overlap in about one of 170 pairs.
BANK = 2**20
MOST_CROP = 2**16  # so that a 64-bit integer can hold every code


@dataclass(frozen=True)
class Augment:
    """Random crop, flip and noise, each off by default.

    >>> Augment(crop=4, flip=True).codes
    162
    """

    crop: int = 0  # pad with so many black pixels on each side, then crop at a random place
    flip: bool = False  # horizontally, with probability 1/2
    noise: float = 0.0  # standard deviation of Gaussian noise, added to pixels in [0, 1]
    site_means: tuple[float, ...] = ()  # the mean of that noise at each client; empty: 0 everywhere

    def __post_init__(self) -> None:
        require_types(Augment, vars(self))
        require(self.crop >= 0, f"crop must not be negative, got {self.crop}")
        require(self.crop <= MOST_CROP, f"crop must be at most {MOST_CROP} pixels, got {self.crop}")
        require(self.noise >= 0, f"noise must not be negative, got {self.noise}")
        require(all(map(math.isfinite, self.site_means)), f"site_means must be finite, got {self.site_means}")

    @property
    def codes(self) -> int:
        """The number of codes; 1: nothing is random."""
        return (2 * self.crop + 1) ** 2 * (2 if self.flip else 1) * (BANK if self.noise else 1)

    def bank(self) -> Tensor:
        """Standard normal numbers, or none if there is no noise."""
        size = BANK if self.noise else 0
        return torch.from_numpy(generator(0, Purpose.NOISE).standard_normal(size, "f4"))

    def read(self, images: Tensor, indices: Tensor, codes: Tensor, bank: Tensor) -> Tensor:
        """The images [n, C, H, W] at `indices`, [*indices.shape, C, H, W] in [0, 1], augmented by their codes."""
        channels, height, width = images.shape[1:]
        side = 2 * self.crop + 1

        def arange(size: int) -> Tensor:
            return torch.arange(size, device=images.device)

        codes = codes[..., None, None, None]
        down, codes = codes % side - self.crop, codes // side
        right, codes = codes % side - self.crop, codes // side
        columns = arange(width)
        if self.flip:
            columns, codes = torch.where(codes % 2 > 0, width - 1 - columns, columns), codes // 2
        y, x = arange(height)[:, None] + down, columns + right
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        pixels = scaled(images[indices[..., None, None, None], arange(channels)[:, None, None], y, x])
        pixels = torch.where(inside, pixels, torch.zeros_like(pixels))
        if not self.noise:
            return pixels
        place = arange(channels * height * width).view(channels, height, width)
        return pixels + self.noise * bank[(codes + place) % BANK].to(pixels.dtype)


NOTHING = Augment()


def scaled(x: Tensor) -> Tensor:
    """Bytes as floats in [0, 1]; other types unchanged."""
    return x.float() / 255 if x.dtype == torch.uint8 else x
