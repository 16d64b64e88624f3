"""Batches of a part of a data set, cached or streamed: the caller need not know which.

batches = train_batches(data.train, batch_size=256, seed=0, augmentation=…, num_classes=10, device="cuda")
for images, labels in batches.epoch(0):
for images, labels in eval_batches(data.val, batch_size=256, device="cuda"):
"""

import torch

from wellcond.data.augment import Augmentation
from wellcond.data.batches import EvalBatches, TrainBatches
from wellcond.data.dataset import Images
from wellcond.data.files import ImageFiles
from wellcond.data.stream import StreamBatches, StreamEvalBatches

__all__ = ["eval_batches", "train_batches"]


def train_batches(
    images: Images | ImageFiles, *, batch_size: int, seed: int, rank: int = 0, world: int = 1,
    device: torch.device | str = "cpu", augmentation: Augmentation, num_classes: int, drop_last: bool = True,
    workers: int = 4,
) -> TrainBatches | StreamBatches:  # fmt: skip
    """Cached images are moved to the device first, if they fit. `workers` are processes that decode streamed ones."""
    if isinstance(images, Images):
        return TrainBatches(
            images.to(device), batch_size=batch_size, seed=seed, rank=rank, world=world, device=device,
            augmentation=augmentation, num_classes=num_classes, drop_last=drop_last,
        )  # fmt: skip
    return StreamBatches(
        images, batch_size=batch_size, seed=seed, rank=rank, world=world, device=device, augmentation=augmentation,
        num_classes=num_classes, drop_last=drop_last, workers=workers,
    )  # fmt: skip


def eval_batches(
    images: Images | ImageFiles, *, batch_size: int, rank: int = 0, world: int = 1,
    device: torch.device | str = "cpu", workers: int = 4,
) -> EvalBatches | StreamEvalBatches:  # fmt: skip
    """Every image once over all the ranks."""
    if isinstance(images, Images):
        return EvalBatches(images, batch_size=batch_size, rank=rank, world=world, device=device)
    return StreamEvalBatches(images, batch_size=batch_size, rank=rank, world=world, device=device, workers=workers)
