"""A small sample of images for measurements: from a folder, a tar archive, or built in.

    sample = read_images("imagenette/val", transform, limit=64)   # spread over the classes, the same for the same seed
    model(sample.images)                                          # (64, 3, 224, 224)
    sample.skipped                                                # [("n01440764/a.JPEG", "image file is truncated")]
    sample = sample_images(transform, limit=64)                   # no data at hand: crops of two photographs

A file that cannot be read, or would exhaust memory, is listed in `skipped`, and another takes its place.
"""

import os
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wellcond.data.files import (
    NOT_UTF8,
    SUFFIXES,
    ImageFile,
    Opener,
    Skipped,
    decode_image,
    is_image,
    is_utf8,
    list_members,
    open_file,
    printable,
    say_why,
    walk_images,
)

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageSample", "read_images", "sample_images"]

PHOTOGRAPHS = ("china.jpg", "flower.jpg")  # from scikit-learn

Transform = Callable[["Image"], Any]


@dataclass(frozen=True, kw_only=True)
class ImageSample:
    """Images ready for a model, and where they come from."""

    images: Tensor
    """(count, channels, height, width)."""
    names: list[str]
    """The file of each image, relative to the folder."""
    skipped: list[tuple[str, str]]
    """Files that could not be read, and why."""
    found: int
    """How many images there were to choose from."""
    source: str
    """Where they come from, in one phrase."""


def read_images(folder: str | os.PathLike[str], transform: Transform, *, limit: int = 64, seed: int = 0) -> ImageSample:
    """Read up to `limit` images from a folder with subfolders of any depth, or from a .tar archive, as one batch.

    Files are drawn in turn from each folder that holds some, in an order that depends only on their names and the seed,
    so that classes share the sample as evenly as possible. `transform` turns an RGB PIL image into a tensor, as timm's
    `create_transform(**data_config)` does.

    Raises ValueError if there is nothing to read, or if `transform` returns tensors of different shapes.
    """
    _check_limit(limit)
    path = Path(folder)
    skipped: Skipped = []
    files = _list_images(path, skipped)
    images, names = [], []
    for name in _spread(list(files), seed):
        try:
            image = decode_image(files[name])
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise all sorts of things on damaged files
            skipped.append((name, say_why(error)))
            continue
        images.append(_apply(transform, image, name))
        names.append(name)
        if len(names) == limit:
            break
    if not images:
        named = "; ".join(f"{name}: {why}" for name, why in skipped[:3])
        raise ValueError(
            f"none of the {len(files)} images in {path} can be read ({named}{'; …' if len(skipped) > 3 else ''}): "
            "copy or download them again"
        )
    source = path.resolve().name or str(path)
    return ImageSample(images=_batch(images, names), names=names, skipped=skipped, found=len(files), source=source)


def sample_images(transform: Transform, *, limit: int = 64, seed: int = 0) -> ImageSample:
    """Return square crops of scikit-learn's two photographs, for when there are no images at hand.

    The first two are the largest central squares; the others lie at random places and have half their height or more.
    """
    _check_limit(limit)
    from PIL import Image
    from sklearn.datasets import load_sample_image

    photographs = [Image.fromarray(load_sample_image(name)) for name in PHOTOGRAPHS]
    draw = random.Random(seed)
    images, names = [], []
    for index in range(limit):
        which = index % len(photographs)
        photograph = photographs[which]
        side = full = min(photograph.size)
        left, top = (photograph.width - side) // 2, (photograph.height - side) // 2
        if index >= len(photographs):
            side = draw.randint(full // 2, full)
            left, top = draw.randint(0, photograph.width - side), draw.randint(0, photograph.height - side)
        name = f"{PHOTOGRAPHS[which]}[{left}:{left + side},{top}:{top + side}]"
        images.append(_apply(transform, photograph.crop((left, top, left + side, top + side)), name))
        names.append(name)
    source = f"crops of two photographs ({', '.join(PHOTOGRAPHS)} of scikit-learn)"
    return ImageSample(images=_batch(images, names), names=names, skipped=[], found=limit, source=source)


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise ValueError(f"limit is {limit}; measuring needs at least one image")


def _apply(transform: Transform, image: "Image", name: str) -> Tensor:
    try:
        tensor = transform(image)
    except Exception as error:
        raise ValueError(f"the transform failed on {name} ({image.width} × {image.height}): {error!r}") from error
    if not isinstance(tensor, Tensor):
        raise ValueError(f"the transform gave a {type(tensor).__name__}; end it with a conversion to a tensor")
    return tensor


def _batch(images: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    for image, name in zip(images, names, strict=True):
        if image.shape != images[0].shape:
            raise ValueError(
                f"the transform gives {tuple(images[0].shape)} for {names[0]} but {tuple(image.shape)} for {name}: "
                "let it crop to one size"
            )
    return torch.stack(list(images))


# ---- which


def _list_images(path: Path, skipped: Skipped) -> dict[str, Opener]:
    """Map the name of every image, relative to `path`, to a function that opens it."""
    if not path.exists():
        raise ValueError(f"there is no folder {path}; name one that holds images, or a .tar archive of them")
    if path.is_dir():
        files: dict[str, Opener] = {
            name: lambda file=file: open_file(file) for name, file in walk_images(path, skipped)
        }
    elif path.suffix.lower() == ".tar":
        files = _list_archive(path, skipped)
    else:
        raise ValueError(f"{path} is a file; name the folder that holds the images, or an uncompressed .tar of them")
    if not files:
        archives = sorted(other.name for other in path.glob("*.tar"))[:3] if path.is_dir() else []
        hint = f"; it holds {', '.join(archives)}: name one of these instead" if archives else ""
        hint += f"; {skipped[0][0]} cannot be read: {skipped[0][1]}" if skipped else ""
        raise ValueError(f"no images in {path} or below (looked for {', '.join(SUFFIXES)} in any case){hint}")
    return files


def _list_archive(path: Path, skipped: Skipped) -> dict[str, Opener]:
    files: dict[str, Opener] = {}
    try:
        for member in list_members(path, skipped):
            if member.isreg() and is_image(PurePosixPath(member.name).name):
                if is_utf8(member.name):
                    files[member.name] = ImageFile(member.name, str(path), member.offset_data, member.size).open
                else:
                    skipped.append((printable(member.name), NOT_UTF8))
    except (tarfile.TarError, OSError, ValueError) as error:
        raise ValueError(f"{path} is no uncompressed tar archive ({error}); unpack it, and name the folder") from error
    return files


def _spread(names: list[str], seed: int) -> Iterator[str]:
    """Yield all names, one from each folder in turn, in an order that depends on the seed."""
    draw = random.Random(seed)
    folders: dict[str, list[str]] = {}
    for name in sorted(names):
        folders.setdefault(name.rpartition("/")[0], []).append(name)
    queues = list(folders.values())
    draw.shuffle(queues)
    for queue in queues:
        draw.shuffle(queue)
    while queues:
        for queue in queues:
            yield queue.pop()
        queues = [queue for queue in queues if queue]
