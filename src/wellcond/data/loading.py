"""A batch, and where batches come from: what a training reads, whatever the data are.

    batches = train_batches(data.train, batch_size=256, seed=0, augmentation=…, num_classes=10, device="cuda")
    for batch in batches.epoch(3, start=17):             # steps 17, 18, … of epoch 3, to the same bits as always
        model(*batch.inputs), batch.targets, batch.count
    for batch in eval_batches(data.val, batch_size=256, rank=0, world=8, device="cuda"):

A part of a data set is anything with the methods of `Part`, of which sequences (`SequenceSet`) give batches themselves;
cached images (`Images`) and streamed ones (`ImageFiles`) are served here. Lengths may vary from batch to batch:
whoever captures or compiles looks at the shapes.
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
    """What one step reads."""

    inputs: tuple[Tensor, ...]
    """What the model is called with."""
    targets: Tensor
    count: int
    """How many samples count: none in a blank batch, which a process without data of its own runs beside the others."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Inputs and targets."""
        return *self.inputs, self.targets

    def holding(self, tensors: Sequence[Tensor]) -> "Batch":
        """The same batch with these in the place of its tensors."""
        *inputs, targets = tensors
        return replace(self, inputs=tuple(inputs), targets=targets)


class Batches(Protocol):
    """The batches of a training part, for one process."""

    steps_per_epoch: int

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from the one of number `start` on."""
        ...


class Part(Protocol):
    """What a training, or whoever holds out or compares data, asks of the training, validation or test part of a set.

    A part that is not made of images gives batches itself, by methods `train_batches` and `eval_batches` of the
    settings of the functions below.
    """

    labels: Tensor
    """(samples,) int64, places in the set's classes."""

    def __len__(self) -> int: ...
    @property
    def device(self) -> torch.device:
        """Where its samples are."""
        ...

    def to(self, device: torch.device | str) -> Any:
        """Moved there, if it fits."""

    def part(self, rows: Tensor) -> Any:
        """Some of the samples."""

    def measured(self) -> Any:
        """With the mean and deviation, if it needs any, of its own samples."""

    def like(self, train: Any) -> Any:
        """With those of the training part."""

    def content(self) -> list[bytes]:
        """What changes when the samples do."""
        ...


def train_batches(
    part: Any, *, batch_size: int, seed: int, rank: int = 0, world: int = 1, device: torch.device | str = "cpu",
    augmentation: Augmentation | None = None, num_classes: int = 0, drop_last: bool = True, workers: int = 4,
) -> Batches:  # fmt: skip
    """What is cached is moved to the device first, if it fits. `workers` are processes that decode streamed images.

    `num_classes` is wanted where labels become soft.
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
    """Every sample once over all the ranks, and as many batches on each: the last ones may be blank."""
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
        # Sharded models wait for every process, also for one without a (readable) image: it looks at a black one.
        device = self.shared["device"]
        cuts = eval_cuts(len(self.part), batch_size=self.shared["batch_size"], world=self.shared["world"])
        for _ in range(made, len(cuts)):
            black = torch.zeros(1, *self.part.shape, device=device)
            yield Batch(inputs=(black,), targets=torch.zeros(1, dtype=torch.int64, device=device), count=0)
