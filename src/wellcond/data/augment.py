"""How training images are varied: the settings, checked when they are made.

    Augmentation(padding=4, flip=0.5)                               # what CIFAR is usually trained with
    Augmentation(scale_min=0.08, flip=0.5, mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    Augmentation()                                                       # the images as they are

Every image draws its own crop, flip, colours and erased box.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Augmentation"]


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What is done to a training image, in this order, and to its label. Nothing, unless asked for."""

    padding: int = 0
    """Pixels of black added on each side before a crop of the image's own size."""
    scale_min: float = 1.0
    """The smallest share of the area that a random crop takes, to be resized; 1 is off. Not with `padding`."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height of such a crop, from and to."""
    flip: float = 0.0
    """The probability that an image is mirrored left to right."""
    auto_augment: str = ""
    """timm's name of a policy, as "rand-m9-mstd0.5-inc1". It needs PIL images, so the data has to be streamed."""
    color_jitter: float = 0.0
    """Brightness, contrast and saturation are each multiplied by a factor between 1 − this and 1 + this."""
    erasing: float = 0.0
    """The probability that a box of 2 % to a third of the image is erased."""
    erasing_mode: Literal["const", "rand", "pixel"] = "pixel"
    """Erased by the mean, one random colour, or noise."""
    mixup: float = 0.0
    """Alpha of the Beta distribution of mixup; 0 is off."""
    cutmix: float = 0.0
    """Alpha of the Beta distribution of CutMix; 0 is off. With mixup on as well, `mix_switch` chooses."""
    mix_prob: float = 1.0
    """The probability that mixing happens at all."""
    mix_switch: float = 0.5
    """The probability of CutMix where both are on."""
    mix_per: Literal["batch", "pair"] = "batch"
    """One draw of the above for a whole batch, as in timm's default, or one for each pair of images."""
    label_smoothing: float = 0.0
    """This much of the label is spread over all the classes."""

    def __post_init__(self) -> None:
        self.check()

    @property
    def mixes(self) -> bool:
        return self.mix_prob > 0 and (self.mixup > 0 or self.cutmix > 0)

    @property
    def soft_labels(self) -> bool:
        """Whether labels come as one row of probabilities per image instead of one number."""
        return self.mixes or self.label_smoothing > 0

    def check(self) -> None:
        """Raises ValueError for values that mean nothing."""
        for name in ("flip", "erasing", "mix_prob", "mix_switch"):
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
        if len(self.crop_ratio) != 2 or not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError(f"crop_ratio is {self.crop_ratio}; it is (from, to), above 0")
        if self.padding and self.scale_min < 1:
            raise ValueError("padding and scale_min are two ways to crop; set one of them")
        for name, choices in (("erasing_mode", ("const", "rand", "pixel")), ("mix_per", ("batch", "pair"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}")

    def check_batches(self, batch_size: int, *, streamed: bool) -> None:
        """Raises ValueError for what batches of this size, from the cache or streamed, cannot do."""
        if self.mixes and batch_size % 2:
            raise ValueError(f"mixup and CutMix mix pairs, but the batch size is {batch_size}; make it even")
        if self.auto_augment and not streamed:
            raise ValueError(
                f"auto_augment={self.auto_augment!r} works on PIL images, but this data is cached as tensors; "
                "open the data with cache_limit=0, or leave auto_augment out"
            )
