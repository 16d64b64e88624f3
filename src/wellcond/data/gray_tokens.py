"""Gray images as sequences of pixels, for the Image task of the Long Range Arena.

data = open_data("lra_image:cifar-10-batches-py")      # CIFAR-10: 45,000 + 5,000 + 10,000, 1,024 tokens of 0 to 255
data = open_data("lra_image:wds:shards")               # in any other form that some source reads
data = open_data("digit_tokens")                       # not CIFAR: scikit-learn's digits, 64 tokens, built in
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellcond.data.dataset import DataSet, Images, hold_out, split_rows
from wellcond.data.digits import load_digits
from wellcond.data.sequences import MaskRule, SequenceSet, spread
from wellcond.data.sources import SOURCES, Settings, open_data, register_source

__all__ = ["to_gray"]

VOCAB = 256
GRAY = (0.2989, 0.5870, 0.1140)  # weights of red, green and blue
SIDE = 32
HELD = 0.1
CIFAR = (
    "CIFAR-10 as torchvision.datasets.CIFAR10(FOLDER, download=True) unpacks it, or a folder or shards of its images; "
    "another source may be named, as lra_image:wds:PATTERN"
)


def to_gray(pixels: Tensor) -> Tensor:
    """Convert (rows, 3, height, width) uint8 to (rows, height, width), rounded as by TensorFlow's rgb_to_grayscale."""
    floats = pixels.float() * (1 / 255)
    weights = torch.tensor(GRAY, device=pixels.device)
    return (torch.einsum("rchw,c->rhw", floats, weights) * 255.5).to(torch.uint8)


def _tokens(images: Any, mask: MaskRule) -> SequenceSet:
    assert isinstance(images, Images)
    count, (channels, height, width) = len(images), images.shape
    tokens = torch.empty(count, height * width, dtype=torch.uint8)
    for chunk in split_rows(count, 16 * images.nbytes):
        pixels = images.gather(torch.arange(chunk.start, chunk.stop))
        tokens[chunk] = (to_gray(pixels) if channels == 3 else pixels[:, 0]).flatten(1)
    lengths = torch.full((count,), height * width, dtype=torch.int32)
    return SequenceSet(tokens, lengths, images.labels.cpu(), vocab=VOCAB, mask=mask)


@register_source("lra_image", takes="FOLDER", wants=CIFAR)
def _image(
    rest: str, settings: Settings, *, samples: int | None = None, mask: MaskRule = "published"
) -> DataSet:  # fmt: skip
    word = rest.partition(":")[0]
    path = Path(rest).expanduser()
    if ":" not in rest or word not in SOURCES:
        if not path.exists():
            raise ValueError(f"there is no {path}; lra_image:FOLDER is {CIFAR}")
        is_python = any((folder / "data_batch_1").is_file() for folder in (path, path / "cifar-10-batches-py"))
        rest = f"{'cifar10' if is_python else 'folder'}:{rest}"
    images = open_data(rest, image_size=SIDE, cache_dir=settings.cache_dir, progress=settings.progress)
    train, test = (_in_order(_tokens(part, mask)) for part in (images.train, images.test or images.val))
    whole = replace(images, name="lra_image", train=train, val=test, test=None)
    data = hold_out(whole, HELD, seed=0)  # of every class, independent of the training's seed
    return replace(data, **{part: spread(getattr(data, part), samples) for part in ("train", "val", "test")})


def _in_order(images: SequenceSet) -> SequenceSet:
    """Sort by class, and by pixels within it: files and shards come in different orders, and neither what is held out
    nor what a seed makes of it should depend on that."""
    pixels = images.tokens.numpy()
    by_pixels = np.argsort(pixels.view(f"V{pixels.shape[1]}").ravel(), kind="stable")
    by_class = np.argsort(images.labels.numpy()[by_pixels], kind="stable")
    return images.part(torch.from_numpy(by_pixels[by_class]))


@register_source("digit_tokens", takes="")
def _digit_tokens(_rest: str, _settings: Settings, *, mask: MaskRule = "published") -> DataSet:
    digits = load_digits()
    train, val = (_tokens(part, mask) for part in (digits.train, digits.val))
    return replace(digits, name="digit_tokens", train=train, val=val, test=val)
