"""What training images undergo each time they are read: everything random about it is one whole number, the code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedxl.errors import require
from fedxl.sampling import Purpose, generator

# Noise is read from a bank drawn once, from a place that the code names: the same bits on every device and in every
# executor, at the price of a gather. Two readings of a 32 x 32 colour image overlap once in about 170 pairs.
BANK = 2**20
MOST_CROP = 2**16  # so that there are no more codes than a whole number of 64 bits can tell


@dataclass(frozen=True)
class Augment:
    """Random crop, flip and noise, each off by default.

    >>> Augment(crop=4, flip=True).codes
    162
    """

    crop: int = 0  # pad with so many black pixels on each side, and cut back at a random place
    flip: bool = False  # left to right, every second time
    noise: float = 0.0  # standard deviation of the Gaussian noise that is added to pixels in [0, 1]
    site_means: tuple[float, ...] = ()  # the mean of that noise at each client; empty: 0 everywhere

    def __post_init__(self) -> None:
        require(self.crop >= 0, f"crop must not be negative, got {self.crop}")
        require(self.crop <= MOST_CROP, f"crop must be at most {MOST_CROP} pixels, got {self.crop}")
        require(self.noise >= 0, f"noise must not be negative, got {self.noise}")
        require(all(map(math.isfinite, self.site_means)), f"site_means must be finite, got {self.site_means}")

    @property
    def codes(self) -> int:
        """How many codes there are; 1 says that nothing is random."""
        return (2 * self.crop + 1) ** 2 * (2 if self.flip else 1) * (BANK if self.noise else 1)

    def bank(self) -> Tensor:
        """Standard normal numbers, or none where no noise is wanted."""
        size = BANK if self.noise else 0
        return torch.from_numpy(generator(0, Purpose.NOISE).standard_normal(size, "f4"))

    def read(self, images: Tensor, indices: Tensor, codes: Tensor, bank: Tensor) -> Tensor:
        """Of `images` [n, C, H, W] those asked for, [*indices.shape, C, H, W] in [0, 1], as their codes have them."""
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
    """Bytes as floats in [0, 1]; whatever else as it is."""
    return x.float() / 255 if x.dtype == torch.uint8 else x
