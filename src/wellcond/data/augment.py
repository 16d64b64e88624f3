"""Augmentation of training images: the settings, checked on creation, and the operations on whole batches.

    Augmentation(padding=4, flip=0.5)                               # the usual choice for CIFAR
    Augmentation(scale_min=0.08, flip=0.5, mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    Augmentation()                                                  # no augmentation

    floats = vary_images(pixels, draws, augmentation)               # uint8 → float32 in 0 … 255
    places = draw_places(draws, augmentation, h, w)                 # drawn for many batches at once,
    floats = vary_images(pixels, draws, augmentation, places)       # few small kernels remain for each
    floats = erase_boxes(normalised, draws, noise, augmentation)
    mixed = mix_images(floats, mixing)                              # neighbours: 0 with 1, 2 with 3, …

Each image has its own crop, flip, colours and erased box: `draws` holds (images, DRAWS) uniform random numbers, one row
per image. Batches are augmented on their device, one or several at a time. Shapes: b images, c channels, h × w pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import grid_sample

from wellcond.data.draws import make_key, send

__all__ = [
    "Augmentation", "CROP_RATIO", "DRAWS", "Mixing", "draw_mixing", "draw_places", "erase_boxes", "mix_images",
    "mix_labels", "vary_images",
]  # fmt: skip

TRIES = 10  # at a box's area and shape; if none fits, the whole image is taken (crop) or nothing (erasing), as usual
# The columns of `draws` that each operation uses.
PLACE, FLIP, COLORS, ERASE, ERASE_PLACE = slice(0, 2), 2, slice(3, 6), 6, slice(7, 9)
CROP_TRIES, ERASE_TRIES = slice(9, 9 + 2 * TRIES), slice(9 + 2 * TRIES, 9 + 4 * TRIES)
DRAWS = ERASE_TRIES.stop
GRAY = (0.299, 0.587, 0.114)  # brightness of red, green and blue, as in Pillow's conversion to "L"
CROP_RATIO = (3 / 4, 4 / 3)  # the range of a random crop's width over height
ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)
CUTMIX_SHARE = 0.5  # of the batches, if mixup is on as well


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Augmentation of training images and their labels, applied in this order. By default nothing is done."""

    padding: int = 0
    """Black pixels added on each side before cropping back to the image's size."""
    scale_min: float = 1.0
    """The smallest share of the area that a random resized crop takes; 1 is off. Not with `padding`."""
    flip: float = 0.0
    """The probability that an image is mirrored left to right."""
    auto_augment: str = ""
    """A policy by timm's name, such as "rand-m9-mstd0.5-inc1". It needs PIL images, so the data has to be streamed."""
    color_jitter: float = 0.0
    """Brightness, contrast and saturation are each multiplied by a factor between 1 − this and 1 + this."""
    erasing: float = 0.0
    """The probability that a box covering 2 % to a third of the image is replaced by noise."""
    mixup: float = 0.0
    """Alpha of the Beta distribution of mixup; 0 is off."""
    cutmix: float = 0.0
    """Alpha of the Beta distribution of CutMix; 0 is off. If both are on, each batch draws one of the two."""
    label_smoothing: float = 0.0
    """The share of the label that is spread over all classes."""

    def __post_init__(self) -> None:
        self.check()

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others, by mixup or CutMix."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def soft_labels(self) -> bool:
        """Whether each label is a row of class probabilities instead of one number."""
        return self.mixes or self.label_smoothing > 0

    def check(self) -> None:
        """Raise ValueError for invalid values."""
        for name in ("flip", "erasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a probability, from 0 to 1")
        for name in ("padding", "color_jitter", "mixup", "cutmix"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it cannot be negative, and 0 switches it off")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; it goes from 0 to below 1")
        if not 0 < self.scale_min <= 1:
            raise ValueError(
                f"scale_min is {self.scale_min}; it is a share of the area, above 0, and 1 switches it off"
            )
        if self.padding and self.scale_min < 1:
            raise ValueError("padding and scale_min are two ways to crop; set one of them")

    def check_batches(self, batch_size: int, *, streamed: bool) -> None:
        """Raise ValueError if batches of this size, cached or streamed, cannot be augmented like this."""
        if self.mixes and batch_size % 2:
            raise ValueError(f"mixup and CutMix mix pairs, but the batch size is {batch_size}; make it even")
        if self.auto_augment and not streamed:
            raise ValueError(
                f"auto_augment={self.auto_augment!r} works on PIL images, but this data is cached as tensors; "
                "open the data with cache_limit=0, or leave auto_augment out"
            )


# ---- on the device


def vary_images(
    pixels: Tensor, draws: Tensor, augmentation: Augmentation, places: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Crop, flip and jitter the colours: (b, c, h, w) uint8 to float32 between 0 and 255."""
    y, x = draw_places(draws, augmentation, *pixels.shape[2:]) if places is None else places
    if augmentation.scale_min < 1:
        h, w = pixels.shape[2:]
        grid = torch.stack([x[:, None, :].expand(-1, h, -1), y[:, :, None].expand(-1, -1, w)], dim=-1)
        floats = grid_sample(pixels.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    elif augmentation.padding or augmentation.flip:
        floats = _take(pixels, y, x, inside=not augmentation.padding).float()
    else:
        floats = pixels.float()
    return _color(floats, draws[:, COLORS], augmentation.color_jitter) if augmentation.color_jitter else floats


def draw_places(draws: Tensor, augmentation: Augmentation, h: int, w: int) -> tuple[Tensor, Tensor]:
    """Return where each image's rows (b, h) and columns (b, w) come from: indices, or grid_sample's −1 … 1."""
    flipped = draws[:, FLIP, None] < augmentation.flip
    if augmentation.scale_min < 1:
        y, x = _draw_crops(draws, augmentation, h, w)
        return y, torch.where(flipped, x.flip(1), x)
    moved = (draws[:, PLACE] * (2 * augmentation.padding + 1)).long() - augmentation.padding  # (b, 2): down and right
    column = torch.arange(w, device=draws.device)
    column = torch.where(flipped, w - 1 - column, column) + moved[:, 1:]
    return torch.arange(h, device=draws.device) + moved[:, :1], column


def _take(pixels: Tensor, row: Tensor, column: Tensor, *, inside: bool) -> Tensor:
    """Gather pixels from these rows and columns, black beyond the border: a padded crop without the padded image."""
    _, c, h, w = pixels.shape
    source = (row.clamp(0, h - 1)[:, :, None] * w + column.clamp(0, w - 1)[:, None, :]).flatten(1)  # (b, h·w)
    found = pixels.flatten(2).gather(2, source[:, None].expand(-1, c, -1)).view_as(pixels)
    if inside:
        return found
    seen = (row == row.clamp(0, h - 1))[:, None, :, None] & (column == column.clamp(0, w - 1))[:, None, None, :]
    return found * seen


def _draw_crops(draws: Tensor, augmentation: Augmentation, h: int, w: int) -> tuple[Tensor, Tensor]:
    high, wide, found = _draw_boxes(draws[:, CROP_TRIES], (augmentation.scale_min, 1.0), CROP_RATIO, h, w)
    high, wide = torch.where(found, high, h), torch.where(found, wide, w)
    top = (draws[:, 0] * (h - high + 1)).floor()
    left = (draws[:, 1] * (w - wide + 1)).floor()
    return _positions(h, top, high), _positions(w, left, wide)


def _positions(size: int, start: Tensor, length: Tensor) -> Tensor:
    """Return where the pixels of a crop resized to `size` come from, in grid_sample's −1 … 1. (b, size)."""
    start, length = start[:, None], length[:, None]
    place = (torch.arange(size, device=start.device) + 0.5) * (length / size) - 0.5
    place = start + torch.minimum(place.clamp_min(0), length - 1)  # nothing is sampled beyond the crop
    return (2 * place + 1) / size - 1


def _draw_boxes(
    draws: Tensor, area: tuple[float, float], ratio: tuple[float, float], h: int, w: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return height and width of each image's box, whole numbers as floats, and whether any try fitted. (b,) each."""
    share = area[0] + (area[1] - area[0]) * draws[:, :TRIES]
    log_ratio = math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * draws[:, TRIES:]
    wide = (share * (h * w) * log_ratio.exp()).sqrt().round()
    high = (share * (h * w) / log_ratio.exp()).sqrt().round()
    fits = (wide > 0) & (wide <= w) & (high > 0) & (high <= h)
    first = fits.int().argmax(1, keepdim=True)  # the first that fits
    return high.gather(1, first)[:, 0], wide.gather(1, first)[:, 0], fits.any(1)


def _color(floats: Tensor, draws: Tensor, strength: float) -> Tensor:
    """Jitter brightness, contrast and saturation, in this order, clamping to 0 … 255 after each."""
    low = max(0.0, 1 - strength)
    brightness, contrast, saturation = (low + (1 + strength - low) * draws).T[:, :, None, None, None]
    floats = (floats * brightness).clamp(0, 255)
    floats = torch.lerp(_gray(floats).mean((2, 3), keepdim=True), floats, contrast).clamp(0, 255)
    return torch.lerp(_gray(floats), floats, saturation).clamp(0, 255) if floats.shape[1] == 3 else floats


def _gray(floats: Tensor) -> Tensor:
    if floats.shape[1] != 3:
        return floats.mean(1, keepdim=True)
    red, green, blue = floats.split(1, dim=1)
    return GRAY[0] * red + GRAY[1] * green + GRAY[2] * blue


def erase_boxes(images: Tensor, draws: Tensor, noise: Tensor, augmentation: Augmentation) -> Tensor:
    """Replace a box in each image drawn for it by `noise`, (b, c·h·w)."""
    h, w = images.shape[2:]
    high, wide, found = _draw_boxes(draws[:, ERASE_TRIES], ERASED_AREA, ERASED_RATIO, h, w)
    found &= (draws[:, ERASE] < augmentation.erasing) & (high < h) & (wide < w)
    top, left = (draws[:, ERASE_PLACE] * torch.stack([h - high + 1, w - wide + 1], 1)).floor()[:, :, None].unbind(1)
    y, x = torch.arange(h, device=images.device), torch.arange(w, device=images.device)
    in_rows = (y >= top) & (y < top + high[:, None]) & found[:, None]
    in_columns = (x >= left) & (x < left + wide[:, None])
    box = (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
    return torch.where(box, noise.view_as(images), images)


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How mixup and CutMix combine each image of some batches with its neighbour."""

    share: Tensor
    """(b,) float32: the weight of the image's own label."""
    keep: Tensor
    """(b,) float32: the weight of the image's own pixels; 1 for CutMix, which takes whole pixels."""
    box: Tensor | None
    """(b, 4) float32, whole numbers: top, bottom, left, right of the box that CutMix takes from the neighbour, empty
    for mixup. None without CutMix."""


def draw_mixing(
    augmentation: Augmentation, sizes: Sequence[int], *, seed: int, epoch: int, step: int, h: int, w: int,
    device: torch.device,
) -> Mixing:  # fmt: skip
    """Draw the mixing for the batches of `step` and those after it, concatenated, of these `sizes`.

    Each step has its own numbers, the same on all ranks; those of all batches are sent in one copy.
    """
    drawn = [_draw_step(augmentation, make_key(seed, epoch, step + index), h, w) for index in range(len(sizes))]
    cuts, share, y, x = np.stack(drawn, axis=1)
    half_h, half_w = (np.sqrt(1 - share) * side // 2 for side in (h, w))
    box = np.stack([y - half_h, y + half_h, x - half_w, x + half_w]).clip(0, [[h], [h], [w], [w]])
    box = np.where(cuts, box, 0)
    keep = np.where(cuts, 1, share)
    share = np.where(cuts, 1 - (box[1] - box[0]) * (box[3] - box[2]) / (h * w), share)  # clipped at the border

    rows = [share[None], keep[None], box] if augmentation.cutmix > 0 else [share[None], keep[None]]
    table = np.concatenate(rows).astype(np.float32).repeat(sizes, axis=1)
    share, keep, *box = send(torch.from_numpy(table), device).split([1, 1, 4][: len(rows)])
    return Mixing(share=share[0], keep=keep[0], box=box[0].T if box else None)


def _draw_step(augmentation: Augmentation, key: int, h: int, w: int) -> NDArray[np.float64]:
    """Return (4,): 1 for CutMix or 0 for mixup, its share, and the centre of a box, which may be clipped."""
    draw = np.random.default_rng(key)
    draw.random()  # unused: without it, what follows would differ from that of older runs
    alphas = augmentation.mixup, augmentation.cutmix
    cuts = draw.random() < CUTMIX_SHARE if min(alphas) > 0 else augmentation.cutmix > 0
    shares = [draw.beta(alpha, alpha) if alpha > 0 else 1.0 for alpha in alphas]
    return np.array([cuts, shares[cuts], draw.integers(h), draw.integers(w)])


def mix_images(images: Tensor, mixing: Mixing) -> Tensor:
    other = _neighbours(images)
    blended = torch.lerp(other, images, mixing.keep[:, None, None, None])
    if mixing.box is None:
        return blended
    top, bottom, left, right = mixing.box[:, :, None].unbind(1)
    y, x = (torch.arange(side, device=images.device) for side in images.shape[2:])
    box = ((y >= top) & (y < bottom))[:, :, None] & ((x >= left) & (x < right))[:, None, :]
    return torch.where(box[:, None], other, blended)


def mix_labels(labels: Tensor, mixing: Mixing | None, *, num_classes: int, smoothing: float) -> Tensor:
    """Return soft labels, (b, num_classes) float32, each row a distribution."""
    own = labels[:, None] == torch.arange(num_classes, device=labels.device)
    soft = own.float() * (1 - smoothing) + smoothing / num_classes
    return soft if mixing is None else torch.lerp(_neighbours(soft), soft, mixing.share[:, None])


def _neighbours(rows: Tensor) -> Tensor:
    """Swap rows 0 and 1, 2 and 3, …; an odd last one stays in place. Works for several concatenated batches as well, if
    only the last has an odd size."""
    even = len(rows) // 2 * 2
    swapped = rows[:even].unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    return swapped if even == len(rows) else torch.cat([swapped, rows[even:]])
