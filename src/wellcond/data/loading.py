"""Batches for training and evaluation, for every kind of data.

    batches = train_batches(data.train, batch_size=256, seed=0, augmentation=…, num_classes=10, device="cuda")
    for batch in batches.epoch(3, start=17):             # steps 17, 18, … of epoch 3, always bit-identical
        model(*batch.inputs), batch.targets, batch.count
    for batch in eval_batches(data.val, batch_size=256, rank=0, world=8, device="cuda"):

A part of a data set is anything with the methods of `Part`. Batches of cached images (`Images`) and streamed ones
(`ImageFiles`) are made here; sequences (`SequenceSet`) make their own. Lengths may vary from batch to batch, so code
that captures or compiles has to check the shapes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from wellcond.data.augment import Augmentation
from wellcond.data.batches import EvalBatches, TrainBatches, eval_cuts
from wellcond.data.dataset import Images
from wellcond.data.files import ImageFiles
from wellcond.data.stream import StreamBatches, StreamEvalBatches

__all__ = ["Batch", "Batches", "Part", "eval_batches", "train_batches"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The data of one step."""

    inputs: tuple[Tensor, ...]
    """The arguments of the model."""
    targets: Tensor
    count: int
    """How many samples count: 0 in a blank batch, which a process without data runs to keep up with the others."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Inputs and targets."""
        return *self.inputs, self.targets

    def holding(self, tensors: Sequence[Tensor]) -> "Batch":
        """Return the same batch with its tensors replaced by these."""
        *inputs, targets = tensors
        return replace(self, inputs=tuple(inputs), targets=targets)


class Batches(Protocol):
    """The batches of a training part, for one process."""

    steps_per_epoch: int

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from number `start` on."""
        ...


class Part(Protocol):
    """The training, validation or test part of a set, as needed to train on it, hold out some of it or compare it.

    A part that is not made of images makes its own batches, in methods `train_batches` and `eval_batches` that take
    the settings of the functions below.
    """

    labels: Tensor
    """(samples,) int64, indices into the set's classes."""

    def __len__(self) -> int: ...
    @property
    def device(self) -> torch.device:
        """The device of its samples."""
        ...

    def to(self, device: torch.device | str) -> Any:
        """Move to the device if it fits there."""

    def part(self, rows: Tensor) -> Any:
        """Return some of the samples."""

    def measured(self) -> Any:
        """Return it with the mean and standard deviation of its own samples, if it needs any."""

    def like(self, train: Any) -> Any:
        """Return it with the mean and standard deviation of the training part."""

    def content(self) -> list[bytes]:
        """Return what changes when the samples do."""
        ...


def train_batches(
    part: Any, *, batch_size: int, seed: int, rank: int = 0, world: int = 1, device: torch.device | str = "cpu",
    augmentation: Augmentation | None = None, num_classes: int = 0, drop_last: bool = True, workers: int = 4,
) -> Batches:  # fmt: skip
    """Return the batches of a training part. Cached images are moved to the device first, if they fit.

    `workers` is how many processes decode streamed images; `num_classes` is needed if labels become soft.
    """
    augmentation = augmentation or Augmentation()
    shared: dict[str, Any] = {
        "batch_size": batch_size, "seed": seed, "rank": rank, "world": world, "device": device,
        "augmentation": augmentation, "num_classes": num_classes, "drop_last": drop_last,
    }  # fmt: skip
    if isinstance(part, Images):
        return _OfImages(TrainBatches(part.to(device), **shared))
    if isinstance(part, ImageFiles):
        return _OfImages(StreamBatches(part, **shared, workers=workers))
    return part.train_batches(**shared, workers=workers)


def eval_batches(
    part: Any, *, batch_size: int, rank: int = 0, world: int = 1, device: torch.device | str = "cpu", workers: int = 4
) -> Iterable[Batch]:
    """Return every sample once across all ranks, in equally many batches on each: the last ones may be blank."""
    shared: dict[str, Any] = {"batch_size": batch_size, "rank": rank, "world": world, "device": device}
    if isinstance(part, Images):
        return _Once(EvalBatches(part, **shared), part, shared)
    if isinstance(part, ImageFiles):
        return _Once(StreamEvalBatches(part, **shared, workers=workers), part, shared)
    return part.eval_batches(**shared, workers=workers)


class _OfImages:
    """Pairs of images and labels as batches."""

    def __init__(self, pairs: TrainBatches | StreamBatches) -> None:
        self.pairs, self.steps_per_epoch = pairs, pairs.steps_per_epoch

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Streamed images that could not be read so far, and why."""
        return getattr(self.pairs, "skipped", [])

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for images, labels in self.pairs.epoch(epoch, start):
            yield Batch(inputs=(images,), targets=labels, count=len(images))


class _Once:
    def __init__(
        self, pairs: EvalBatches | StreamEvalBatches, part: Images | ImageFiles, shared: dict[str, Any]
    ) -> None:
        self.pairs, self.part, self.shared = pairs, part, shared

    @property
    def skipped(self) -> list[tuple[str, str]]:
        return getattr(self.pairs, "skipped", [])

    def __iter__(self) -> Iterator[Batch]:
        made = 0
        for images, labels in self.pairs:
            yield Batch(inputs=(images,), targets=labels, count=len(images))
            made += 1
        # Sharded models wait for every process, even one without a (readable) image: that one evaluates a black image.
        device = self.shared["device"]
        cuts = eval_cuts(len(self.part), batch_size=self.shared["batch_size"], world=self.shared["world"])
        for _ in range(made, len(cuts)):
            black = torch.zeros(1, *self.part.shape, device=device)
            yield Batch(inputs=(black,), targets=torch.zeros(1, dtype=torch.int64, device=device), count=0)
