"""Images and labels as tensors, in memory, memory-mapped or on the GPU, and the parts of a data set.

data.train.pixels                      # (50000, 3, 32, 32) uint8; data.train.labels: (50000,) int64
train = data.train.to("cuda")          # on the GPU if it fits; otherwise unchanged, as train.device shows
train.gather(torch.tensor([4, 17]))    # (2, 3, 32, 32) uint8
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wellcond.data.draws import make_key

__all__ = ["DataSet", "Images", "fits_on", "hold_out", "pixel_sums", "split_rows"]

GPU_SHARE = 0.4  # of the free memory; the rest is for the model and its activations
CHUNK_BYTES = 64 << 20


class Images:
    """uint8 pixels (rows, channels, height, width) with labels, and the training part's mean and standard deviation."""

    def __init__(
        self, pixels: Tensor, labels: Tensor, *, mean: Tensor, std: Tensor, rows: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`rows` selects some of the pixels and labels, so that a part of a mapped file needs no copy.

        `mean` and `std` are per channel, of pixels scaled to [0, 1]. `sums` is `pixel_sums(pixels)`, if known already.
        """
        assert (pixels.dtype, labels.dtype) == (torch.uint8, torch.int64), (pixels.dtype, labels.dtype)
        assert labels.shape == pixels.shape[:1], (labels.shape, pixels.shape)
        self.rows = rows
        self.labels: Tensor = labels if rows is None else labels[rows.to(labels.device)]
        self.mean: Tensor = mean.float().cpu()
        self.std: Tensor = std.float().cpu()
        self._pixels, self._all_labels, self._sums = pixels, labels, sums

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape = " × ".join(str(side) for side in (len(self), *self.shape))
        return f"Images({shape}, on {self.device})"

    @property
    def pixels(self) -> Tensor:
        """All pixels. For a part of a mapped file, this copies them into memory; `gather` copies only some."""
        return self._pixels if self.rows is None else self._pixels[self.rows]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        channels, height, width = self._pixels.shape[1:]
        return channels, height, width

    @property
    def channels(self) -> int:
        """1 for gray images, 3 for colour."""
        return self._pixels.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of the pixels."""
        return self._pixels.device

    @property
    def nbytes(self) -> int:
        """The size of the images in bytes, one for each value."""
        channels, height, width = self.shape
        return len(self) * channels * height * width

    def gather(self, rows: Tensor) -> Tensor:
        """Return these images, in this order, as uint8 on the pixels' device."""
        rows = rows.to(self.device)
        return self._pixels.index_select(0, rows if self.rows is None else self.rows[rows])

    def to(self, device: torch.device | str, *, share: float = GPU_SHARE) -> "Images":
        """Move to the device if the pixels take no more than `share` of its free memory; otherwise return self.

        On the CPU a mapped file stays mapped: the system keeps in memory what is used.
        """
        return self._moved(torch.device(device)) if fits_on(device, self.device, self.nbytes, share) else self

    def part(self, rows: Tensor) -> "Images":
        """Return some of the images, without a copy, with the same mean and standard deviation."""
        rows = rows if self.rows is None else self.rows[rows]
        return Images(self._pixels, self._all_labels, mean=self.mean, std=self.std, rows=rows, sums=self._sums)

    def measured(self) -> "Images":
        """Return the same images with their own mean and standard deviation, computed exactly from integers."""
        sums = self._sums if self._sums is not None else pixel_sums(self._pixels)
        sums = sums if self.rows is None else sums[self.rows]
        count = 255 * len(self) * self.shape[1] * self.shape[2]
        total, squares = sums.sum(0).double().unbind(1)  # of integers, so exact below 2⁵³
        mean = total / count
        std = (squares / (255 * count) - mean**2).clamp_min(0).sqrt()
        std = torch.where(std > 0, std, torch.ones_like(std))  # a constant channel is only centred
        return self.normalised_by(mean, std)

    def normalised_by(self, mean: Tensor, std: Tensor) -> "Images":
        """Return the same images with another mean and standard deviation."""
        return Images(self._pixels, self._all_labels, mean=mean, std=std, rows=self.rows, sums=self._sums)

    def like(self, train: "Images") -> "Images":
        """Return the same images, normalised as the training part is."""
        return self.normalised_by(train.mean, train.std)

    def content(self) -> list[bytes]:
        """Return what changes when the data does, besides the labels: statistics from exact sums over all pixels."""
        own = self.measured()
        return [own.mean.numpy().tobytes(), own.std.numpy().tobytes()]

    def _moved(self, device: torch.device) -> "Images":
        pixels = torch.empty((len(self), *self.shape), dtype=torch.uint8, device=device)
        for chunk in split_rows(len(self), self.nbytes):  # a mapped file should not be read into memory whole
            pixels[chunk].copy_(self.gather(torch.arange(chunk.start, chunk.stop)))
        return Images(pixels, self.labels.to(device), mean=self.mean, std=self.std)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A checked data set: every class has images in both parts, and the labels are indices into `classes`."""

    name: str
    classes: list[str]
    train: Any
    """Parts are `loading.Part`s: `Images`, `ImageFiles`, `SequenceSet`, or what a source of your own returns."""
    val: Any
    """Evaluated during training: the set's own validation part, or what `holdout` took from `train`."""
    skipped: list[tuple[str, str]]
    """Files that could not be read, and why."""
    test: Any = None
    """Not used by the training: the set's own test part, or with a holdout its validation part; otherwise None."""


def hold_out(data: DataSet, share: float, *, seed: int) -> DataSet:
    """Move `share` of every class of `train` to `val`; the old `val` becomes `test`, unless there is a test part.

    The choice depends only on the seed and the labels. Mean and standard deviation are those of the rest of `train`.
    """
    if share == 0:
        return data
    if not 0 < share < 1:
        raise ValueError(f"holdout is {share}; it is the share of the training images to hold out, below 1")
    labels = data.train.labels.cpu()
    generator = torch.Generator().manual_seed(make_key(seed, 0x401D) >> 1)
    mixed = torch.randperm(len(labels), generator=generator)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label, name in enumerate(data.classes):
        members = mixed[labels[mixed] == label]
        count = round(share * len(members))
        if not 0 < count < len(members):
            raise ValueError(
                f"a holdout of {share} takes {count} of the {len(members)} training images of class {name!r}; "
                "both parts need at least one"
            )
        held[members[:count]] = True
    train = data.train.part((~held).nonzero()[:, 0]).measured()
    val = data.train.part(held.nonzero()[:, 0]).like(train)
    test = (data.test or data.val).like(train)
    return replace(data, train=train, val=val, test=test)


def fits_on(device: torch.device | str, now: torch.device, nbytes: int, share: float) -> bool:
    """Whether to move `nbytes` from `now` to `device`: they are elsewhere, and fit in `share` of its free memory."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device == now:
        return False
    return device.type != "cuda" or nbytes <= share * torch.cuda.mem_get_info(device)[0]


def pixel_sums(pixels: Tensor) -> Tensor:
    """Return (rows, channels, 2) int64: the exact sums of the pixels and of their squares."""
    sums = torch.empty((*pixels.shape[:2], 2), dtype=torch.int64)
    for chunk in split_rows(len(pixels), pixels.numel()):
        values = pixels[chunk].flatten(2).to(torch.int32)
        sums[chunk, :, 0] = values.sum(2, dtype=torch.int64).cpu()
        sums[chunk, :, 1] = values.square().sum(2, dtype=torch.int64).cpu()
    return sums


def split_rows(count: int, nbytes: int) -> Iterator[slice]:
    """Yield slices over `count` rows, of about `CHUNK_BYTES` each."""
    step = max(1, count * CHUNK_BYTES // max(1, nbytes))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))
