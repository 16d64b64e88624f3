"""Images where they lie: in files, inside tar archives, in arrays or tables, listed and labelled but not decoded.

    part = FilePart([ImageFile(name="cat/1.jpg", path="data/train/cat/1.jpg")], labels=[0])
    part.read(0)                            # a PIL image, RGB; wrap many of these in images.strict_decoding()
    listing.check()                         # ValueError for an empty class, or classes that train and val do not share

An archive's members are known by their place in it, so any of them can be read at any time, by any process.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from wellcond.data.finding import ImageFile, Skipped
from wellcond.data.images import decode_opened

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ArrayPart", "FilePart", "ImageFiles", "Listing", "Part", "Source", "compare_classes", "sort_names"]


class Part(Protocol):
    """The training or the validation images of a source."""

    @property
    def labels(self) -> Sequence[int]: ...
    def name(self, row: int) -> str: ...
    def read(self, row: int) -> "Image": ...


class FilePart:
    """Images in files."""

    def __init__(self, files: list[ImageFile], labels: Sequence[int]) -> None:
        self.files, self.labels = files, labels

    def name(self, row: int) -> str:
        return self.files[row].name

    def read(self, row: int) -> "Image":
        return decode_opened(self.files[row].open)


class ArrayPart:
    """Images in one array (rows, height, width, 3) of uint8."""

    def __init__(self, pixels: Any, labels: Sequence[int]) -> None:
        self.pixels, self.labels = pixels, labels

    def name(self, row: int) -> str:
        return str(row)

    def read(self, row: int) -> "Image":
        from PIL import Image

        return Image.fromarray(self.pixels[row])


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a source holds."""

    classes: list[str]
    train: Part
    val: Part
    skipped: Skipped
    """What could not even be listed, and why."""

    def check(self, where: str) -> None:
        for split, part in (("train", self.train), ("val", self.val)):
            check_labels(part.labels, self.classes, f"the {split} part of {where}")


def check_labels(labels: Sequence[int], classes: list[str], where: str) -> None:
    """Raises ValueError unless the labels are places in `classes`, and every class has one."""
    if not len(labels):
        raise ValueError(f"no images in {where}")
    found = torch.as_tensor(labels)
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= len(classes):
        raise ValueError(
            f"the labels in {where} run from {low} to {high}, but there are {len(classes)} classes, "
            f"0 to {len(classes) - 1}: the labels and the list of classes do not fit"
        )
    empty = [classes[label] for label in (torch.bincount(found, minlength=len(classes)) == 0).nonzero()[:, 0].tolist()]
    if empty:
        named = ", ".join(repr(name) for name in empty[:5]) + (", …" if len(empty) > 5 else "")
        raise ValueError(
            f"no image of {len(empty)} of the {len(classes)} classes in {where}: {named}; add some, or remove the class"
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set by name, before it is read."""

    name: str
    """Short, for people."""
    where: str
    """All that tells it from another of that name."""
    fingerprint: str
    """Changes when the data does."""
    list: Callable[[Path], Listing]
    """Reads what there is. It is given a folder that lasts until the images are decoded, to unpack into."""
    random_access: bool = True
    """Whether the files can be read in any order later on, without that folder."""


class ImageFiles:
    """One part of a set that is too large for the cache: the images are decoded when they are needed."""

    device = torch.device("cpu")
    channels = 3

    def __init__(self, part: Part, *, image_size: int, rows: Tensor | None = None) -> None:
        from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

        self.source, self.image_size = part, image_size
        self.rows = torch.arange(len(part.labels)) if rows is None else rows
        self.labels = torch.as_tensor(part.labels, dtype=torch.int64)[self.rows]
        self.mean, self.std = torch.tensor(IMAGENET_DEFAULT_MEAN), torch.tensor(IMAGENET_DEFAULT_STD)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"ImageFiles({len(self)} × 3 × {self.image_size} × {self.image_size}, streamed)"

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.image_size, self.image_size

    def name(self, row: int) -> str:
        return self.source.name(int(self.rows[row]))

    def read(self, row: int) -> "Image":
        return self.source.read(int(self.rows[row]))

    def part(self, rows: Tensor) -> "ImageFiles":
        return ImageFiles(self.source, image_size=self.image_size, rows=self.rows[rows])

    def measured(self) -> "ImageFiles":
        """Itself: measuring would mean to decode everything, so these keep ImageNet's mean and deviation."""
        return self

    def normalised_by(self, mean: Tensor, std: Tensor) -> "ImageFiles":
        assert torch.equal(mean, self.mean), "streamed images are normalised by ImageNet's numbers"
        assert torch.equal(std, self.std), "streamed images are normalised by ImageNet's numbers"
        return self

    def like(self, train: "ImageFiles") -> "ImageFiles":
        return self.normalised_by(train.mean, train.std)

    def content(self) -> list[bytes]:
        """What changes when the data does, beside the labels: their names, since they are not decoded yet."""
        return ["\n".join(self.source.name(row) for row in self.rows.tolist()).encode()]

    def to(self, device: torch.device | str, *, share: float = 0.0) -> "ImageFiles":
        """Itself: there is nothing to move yet."""
        return self


def stat_line(path: Path | str) -> str:
    """What changes when a file does."""
    try:
        found = os.stat(path)
    except OSError as error:  # a link to nothing, say: reading it will say so
        return error.strerror or str(error)
    return f"{found.st_size} {found.st_mtime_ns}"


def compare_classes(train: Iterable[str], val: Iterable[str], *, where: str) -> None:
    """Raises ValueError unless both parts have the same classes: labels would mean different things otherwise."""
    trained, seen = set(train), set(val)
    for only, having, lacking in ((trained - seen, "train", "val"), (seen - trained, "val", "train")):
        if only:
            names = sorted(only)
            named = ", ".join(repr(name) for name in names[:5]) + (", …" if len(names) > 5 else "")
            raise ValueError(f"in {where} the classes {named} are in {having} but not in {lacking}; both need the same")


def sort_names(names: Iterable[str]) -> list[str]:
    """By number if all are whole numbers, else by name."""
    found = set(names)
    return sorted(found, key=int) if all(name.isdecimal() for name in found) else sorted(found)
