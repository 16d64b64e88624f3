"""The built-in default: 1,797 handwritten digits, 8 × 8 and gray, that come with scikit-learn.

    data = load_digits(image_size=8)
    data.train.pixels.shape           # (1437, 1, 8, 8)

The digits are stored writer by writer. The last fifth is for validation: mostly writers that training has not seen.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from wellcond.data.dataset import DataSet, Images
from wellcond.data.sources import Settings, register_source

__all__ = ["load_digits"]

SIDE, GRAYS = 8, 16
VALIDATION = 360


def load_digits(*, image_size: int = SIDE) -> DataSet:
    """Load the digits: ten classes, one channel. If `image_size` is not 8, they are resized smoothly."""
    images, targets = _stored()
    pixels = images[:, None] * (255 / GRAYS)
    if image_size != SIDE:
        pixels = interpolate(pixels, size=(image_size, image_size), mode="bilinear", antialias=True)
    pixels = pixels.round().to(torch.uint8)
    labels = targets.clone()
    unknown = torch.zeros(1)  # until the training part is measured
    train = Images(pixels[:-VALIDATION], labels[:-VALIDATION], mean=unknown, std=unknown).measured()
    val = Images(pixels[-VALIDATION:], labels[-VALIDATION:], mean=train.mean, std=train.std)
    return DataSet(name="digits", classes=[str(digit) for digit in range(10)], train=train, val=val, skipped=[])


@cache
def _stored() -> tuple[Tensor, Tensor]:
    """Return images and labels, read only once: a process may train on them many times."""
    from sklearn import datasets

    pixels, targets = datasets.load_digits(return_X_y=True)
    return torch.from_numpy(pixels).float().reshape(-1, SIDE, SIDE), torch.from_numpy(targets).long()


@register_source("digits", takes="")
def _digits(_rest: str, settings: Settings) -> DataSet:
    return load_digits(image_size=settings.image_size or SIDE)
