"""Batches of cached images: for training, shuffled and augmented on the device; for evaluation, each image once.

    batches = TrainBatches(data.train.to("cuda"), batch_size=512, seed=0, device="cuda",
                           augmentation=Augmentation(padding=4, flip=0.5), num_classes=10)
    for images, labels in batches.epoch(3, start=17):      # steps 17, 18, … of epoch 3, always bit-identical
    for images, labels in EvalBatches(data.val, batch_size=512, device="cuda"):

What a step sees depends only on (seed, epoch, step). `batch_size` is per process: with `world` processes, a step takes
`batch_size × world` images of one global order, and process `rank` gets the rank-th part of them. So two processes with
256 each see what one with 512 sees.
"""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from wellcond.data.augment import (
    DRAWS,
    Augmentation,
    draw_mixing,
    draw_places,
    erase_boxes,
    mix_images,
    mix_labels,
    vary_images,
)  # fmt: skip
from wellcond.data.dataset import Images
from wellcond.data.draws import draw_normal, draw_order, draw_uniform, send

__all__ = ["EvalBatches", "Share", "TrainBatches", "eval_cuts", "finish_batches"]

VARIED, NOISE = 1, 2  # streams of random numbers
AHEAD = 2  # groups of batches copied to the device while it computes
# Several batches are augmented together and handed out one by one: for a small batch, Python takes longer to launch the
# kernels than the GPU to run them. No image's result depends on the others in its group.
TOGETHER = 2048  # images that are augmented at once,
TOGETHER_BYTES = 128 << 20  # if they take no more bytes than this as float32
DRAWN = 16_384  # images whose random numbers are drawn at once


class Share:
    """Which rows of an epoch's order a process gets, step by step."""

    def __init__(
        self, count: int, *, batch_size: int, rank: int, world: int, drop_last: bool, what: str = "images"
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it needs to be 1 or more")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world} processes; ranks go from 0 to {world - 1}")
        self.rank: int = rank
        self.world: int = world
        self.count: int = count
        self.total: int = batch_size * world
        rest = count % self.total
        if not drop_last and 0 < rest < world:
            raise ValueError(
                f"the last batch would have {rest} {what} for {world} processes; change batch_size, or set drop_last"
            )
        self.steps: int = count // self.total + (rest > 0 and not drop_last)
        if self.steps == 0:
            shares = f" ({batch_size} × {world} processes)" if world > 1 else ""
            raise ValueError(
                f"{count} training {what} are less than one batch of {self.total}{shares}; make batch_size smaller"
            )

    def at(self, step: int) -> tuple[int, int]:
        """Return (from, to) in the order."""
        start = step * self.total
        total = min(self.total, self.count - start)
        return start + self.rank * total // self.world, start + (self.rank + 1) * total // self.world

    def check_start(self, start: int) -> None:
        if not 0 <= start <= self.steps:
            raise ValueError(f"start is {start}, but an epoch has {self.steps} steps: the data or batch_size changed")


class TrainBatches:
    """Epochs of cached images, shuffled and augmented; see the top of this file."""

    def __init__(
        self, images: Images, *, batch_size: int, seed: int, rank: int = 0, world: int = 1,
        device: torch.device | str = "cpu", augmentation: Augmentation, num_classes: int, drop_last: bool = True,
    ) -> None:  # fmt: skip
        augmentation.check_batches(batch_size, streamed=False)
        self.images: Images = images
        self.seed: int = seed
        self.augmentation: Augmentation = augmentation
        self.num_classes: int = num_classes
        self.device: torch.device = torch.device(device)
        self.share: Share = Share(len(images), batch_size=batch_size, rank=rank, world=world, drop_last=drop_last)
        self.steps_per_epoch: int = self.share.steps
        self.normalise: Normalising = Normalising(images, self.device)
        images_together = min(TOGETHER, TOGETHER_BYTES // (4 * math.prod(images.shape)))
        self.together: int = max(1, images_together // batch_size)
        """How many batches are augmented at once."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalised float32 (b, c, h, w) and labels: int64 (b,), or float32 (b, num_classes) if soft."""
        self.share.check_start(start)
        order = draw_order(seed=self.seed, epoch=epoch, count=len(self.images))
        spans = [self.share.at(step) for step in range(start, self.steps_per_epoch)]
        if not spans:
            return
        mine = torch.cat([order[low:high] for low, high in spans])
        firsts = range(0, len(spans), self.together)
        groups = [[high - low for low, high in spans[first : first + self.together]] for first in firsts]
        sizes = [sum(group) for group in groups]
        fetched = fetch_batches(self.images, list(send(mine, self.images.device).split(sizes)), self.device)
        drawn = self._draw(list(send(mine, self.device).split(sizes)), epoch)
        for (pixels, labels), draws, first, group in zip(fetched, drawn, firsts, groups, strict=True):
            yield from self._vary(pixels, labels, draws, group, epoch=epoch, step=start + first)

    def _draw(self, groups: list[Tensor], epoch: int) -> Iterator["_Draws"]:
        many = max(1, DRAWN // len(groups[0]))
        for first in range(0, len(groups), many):
            some = groups[first : first + many]
            sizes = [len(rows) for rows in some]
            draws = draw_uniform(seed=self.seed, epoch=epoch, rows=torch.cat(some), count=DRAWS, stream=VARIED)
            y, x = draw_places(draws, self.augmentation, *self.images.shape[1:])
            yield from map(_Draws, some, draws.split(sizes), zip(y.split(sizes), x.split(sizes), strict=True))

    def _vary(
        self, pixels: Tensor, labels: Tensor, drawn: "_Draws", sizes: list[int], *, epoch: int, step: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        how = self.augmentation
        images = self.normalise(vary_images(pixels, drawn.uniform, how, drawn.places))
        if how.erasing:
            count = math.prod(self.images.shape)
            noise = draw_normal(seed=self.seed, epoch=epoch, rows=drawn.rows, count=count, stream=NOISE)
            images = erase_boxes(images, drawn.uniform, noise, how)
        images, labels = finish_batches(
            images, labels, how, sizes, num_classes=self.num_classes, seed=self.seed, epoch=epoch, step=step
        )
        return zip(images.split(sizes), labels.split(sizes), strict=True)


class _Draws(NamedTuple):
    """The random draws for the images of a group of batches."""

    rows: Tensor
    uniform: Tensor
    places: tuple[Tensor, Tensor]


def finish_batches(
    images: Tensor, labels: Tensor, how: Augmentation, sizes: list[int], *, num_classes: int, seed: int, epoch: int,
    step: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mix the images, if that is asked for, of `step` and the steps after it; make labels soft if they have to be."""
    mixing = None
    if how.mixes:
        h, w = images.shape[2:]
        mixing = draw_mixing(how, sizes, seed=seed, epoch=epoch, step=step, h=h, w=w, device=images.device)
        images = mix_images(images, mixing)
    if how.soft_labels:
        labels = mix_labels(labels, mixing, num_classes=num_classes, smoothing=how.label_smoothing)
    return images, labels


class EvalBatches:
    """Every image once across all ranks, in a fixed order, cut alike on each rank; the last batch may be smaller."""

    def __init__(
        self, images: Images, *, batch_size: int, rank: int = 0, world: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        self.images: Images = images
        self.device: torch.device = torch.device(device)
        self.normalise: Normalising = Normalising(images, self.device)
        rows = torch.arange(len(images), device=images.device)[rank::world]
        self._parts = [rows[cut] for cut in eval_cuts(len(images), batch_size=batch_size, world=world)]
        self._parts = [part for part in self._parts if len(part)]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for pixels, labels in fetch_batches(self.images, self._parts, self.device):
            yield self.normalise(pixels.float()), labels


def eval_cuts(count: int, *, batch_size: int, world: int) -> list[slice]:
    """Return the same cuts for each rank's rows, if possible with none empty: sharded models wait for every rank."""
    longest, shortest = -(-count // world), count // world
    starts = list(range(0, longest, batch_size))
    if len(starts) > 1 and shortest == starts[-1] and batch_size > 1:
        starts[-1] -= 1  # the last batch would be one image on some ranks and none on the others
    return [slice(low, high) for low, high in zip(starts, [*starts[1:], longest], strict=True)]


class Normalising:
    """Normalise 0 … 255 to mean 0 and standard deviation 1 over the training part."""

    def __init__(self, images: Images, device: torch.device) -> None:
        self.scale: Tensor = (1 / (255 * images.std)).to(device)[:, None, None]
        self.shift: Tensor = (-images.mean / images.std).to(device)[:, None, None]

    def __call__(self, floats: Tensor) -> Tensor:
        return torch.addcmul(self.shift, floats, self.scale)


def fetch_batches(images: Images, parts: list[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (pixels, labels) on the device. If the images are elsewhere, a thread gathers the next ones meanwhile."""

    def fetch(rows: Tensor) -> tuple[Tensor, Tensor]:
        found = images.gather(rows), images.labels[rows]
        if device.type == "cuda" and images.device.type != "cuda":
            return found[0].pin_memory(), found[1].pin_memory()
        return found

    def move(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return found[0].to(device, non_blocking=True), found[1].to(device, non_blocking=True)

    if images.device.type == device.type:
        for rows in parts:
            yield move(fetch(rows))
        return
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting: deque[Future[tuple[Tensor, Tensor]]] = deque()
        try:
            for rows in parts:
                waiting.append(pool.submit(fetch, rows))
                if len(waiting) > AHEAD:
                    yield move(waiting.popleft().result())
            while waiting:
                yield move(waiting.popleft().result())
        finally:  # if the caller stops mid-epoch, do not wait for batches that nobody reads
            for future in waiting:
                future.cancel()
