"""The configuration's augmentation, in the words of wellcond.data."""

from wellcond.data import Augmentation
from wellcond.train.config import Config

__all__ = ["augmentation_of"]


def augmentation_of(config: Config) -> Augmentation:
    return Augmentation(
        crop_padding=config.padding,
        crop_scale=(config.scale_min, 1.0) if config.scale_min < 1 else None,
        flip=config.flip,
        auto_augment=config.auto_augment or None,
        color_jitter=config.color_jitter,
        erasing=config.erasing,
        mixup=config.mixup,
        cutmix=config.cutmix,
        label_smoothing=config.label_smoothing,
    )
