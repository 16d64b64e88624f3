"""The image sets of the experiments, fixed before the runs: sizes, patches, and what a plain model must reach.

given = parse_data(["cifar10=/data/cifar10"])          # where they lie: NAME=PATH, a folder, shards or CIFAR's files
given[0].set.respectable                               # 0.85: below it a comparison of arms decides nothing
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["IMAGE_SETS", "GivenData", "ImageSet", "parse_data"]

CIFAR_FILES = ("cifar-10-batches-py", "cifar-100-python", "data_batch_1", "meta")  # of the python version


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    name: str
    title: str
    classes: int
    train_images: int
    image_size: int
    patch_size: int
    epochs: int = 100
    batch_size: int = 256
    """Both of a `lab` training, fixed before the runs."""
    respectable: float = 0.0
    """Top-1 that the plain arm has to reach at `lab` scale; otherwise a verdict is undecided."""

    @property
    def settings(self) -> dict[str, Any]:
        """Of a recipe: 64 tokens and a class token, of Imagenette 196, of the digits 16."""
        return {
            "image_size": self.image_size,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "model_kwargs": {"img_size": self.image_size, "patch_size": self.patch_size},
        }


def _sets(*found: ImageSet) -> dict[str, ImageSet]:
    return {one.name: one for one in found}


IMAGE_SETS = _sets(
    ImageSet(name="digits", title="Digits", classes=10, train_images=1437, image_size=8, patch_size=2),
    ImageSet(
        name="cifar10", title="CIFAR-10", classes=10, train_images=50_000, image_size=32, patch_size=4, respectable=0.85
    ),
    ImageSet(
        name="cifar100", title="CIFAR-100", classes=100, train_images=50_000, image_size=32, patch_size=4,
        respectable=0.58,
    ),
    ImageSet(
        name="tiny-imagenet", title="Tiny-ImageNet", classes=200, train_images=100_000, image_size=64, patch_size=8,
        epochs=50, batch_size=512, respectable=0.43,
    ),
    ImageSet(
        name="imagenette", title="Imagenette", classes=10, train_images=9_469, image_size=224, patch_size=16,
        epochs=50, respectable=0.75,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GivenData:
    """An image set, and where it lies: what `wellcond.data.open_data` takes."""

    set: ImageSet
    spec: str


def parse_data(given: Iterable[str]) -> list[GivenData]:
    """What `--data-dir` says, `NAME=PATH` each; ValueError names the sets and what a path may be."""
    found = []
    for text in given:
        name, equals, where = text.partition("=")
        if not equals and text in ("digits", *IMAGE_SETS):
            name, where = text, "digits" if text == "digits" else ""
        elif not equals:
            name, where = _name_in(text), text
        if name not in IMAGE_SETS or not where:
            raise ValueError(
                f"--data-dir {text!r} does not say which set lies where; write NAME=PATH with a name of "
                f"{', '.join(IMAGE_SETS)}, e.g. cifar10=data/cifar10"
            )
        found.append(GivenData(set=IMAGE_SETS[name], spec=_spec(name, where)))
    names = [one.set.name for one in found]
    if len(set(names)) < len(names):
        raise ValueError(f"--data-dir names a set twice: {', '.join(names)}")
    return found


def _name_in(text: str) -> str:
    """cifar10:PATH, and folders with the name of a set."""
    kind, colon, _ = text.partition(":")
    return kind if colon and kind in IMAGE_SETS else Path(text).name


def _spec(name: str, where: str) -> str:
    """A plain path as the kind of data it holds; what has a kind already, as it is."""
    path = Path(where)
    if where == "digits" or (":" in where and not path.exists()):
        return where
    if not path.exists():
        raise ValueError(f"--data-dir {name}={where}: there is no folder {where}; nothing was started")
    if name.startswith("cifar") and any((path / part).exists() for part in CIFAR_FILES):
        return f"{name}:{where}"
    shards = any(path.glob("train-*.tar*")) if path.is_dir() else False
    return f"wds:{where}" if shards else f"folder:{where}"
