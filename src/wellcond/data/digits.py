"""The embedded default: 1,797 handwritten digits, 8 × 8 and gray, that come with scikit-learn.

    data = load_digits(image_size=8)
    data.train.pixels.shape           # (1437, 1, 8, 8)

The digits are stored writer after writer, so the last fifth is validation: mostly hands that training has not seen.
"""

import torch
from torch.nn.functional import interpolate

from wellcond.data.dataset import DataSet, Images
from wellcond.data.sources import Settings, register_source

__all__ = ["load_digits"]

SIDE, GRAYS = 8, 16
VALIDATION = 360


def load_digits(*, image_size: int = SIDE) -> DataSet:
    """Ten classes, one channel. Another size than 8 enlarges the digits, smoothly."""
    from sklearn import datasets

    stored = datasets.load_digits()
    pixels = torch.from_numpy(stored.images).float()[:, None] * (255 / GRAYS)  # pyright: ignore[reportAttributeAccessIssue]
    if image_size != SIDE:
        pixels = interpolate(pixels, size=(image_size, image_size), mode="bilinear", antialias=True)
    pixels = pixels.round().to(torch.uint8)
    labels = torch.from_numpy(stored.target).long()  # pyright: ignore[reportAttributeAccessIssue]
    unknown = torch.zeros(1)  # until the training part is measured
    train = Images(pixels[:-VALIDATION], labels[:-VALIDATION], mean=unknown, std=unknown).measured()
    val = Images(pixels[-VALIDATION:], labels[-VALIDATION:], mean=train.mean, std=train.std)
    return DataSet(name="digits", classes=[str(digit) for digit in range(10)], train=train, val=val, skipped=[])


@register_source("digits", takes="")
def _digits(_rest: str, settings: Settings) -> DataSet:
    return load_digits(image_size=settings.image_size or SIDE)
