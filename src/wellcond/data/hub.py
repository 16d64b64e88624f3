"""Hugging Face data sets by name, or a folder that `datasets` can load.

    source = hub_source("uoft-cs/cifar10")            # or NAME:CONFIG

The first column of images and the first of class labels are used. Requires the package `datasets`.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellcond.data.files import Listing, Source, compare_classes, decode_opened, open_file, sort_names
from wellcond.data.sources import Settings, register_source

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["hub_source"]

VALIDATION = ("validation", "val", "valid", "test")


def hub_source(name: str) -> Source:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(f"hf:{name} needs the package datasets: pip install 'wellcond[hf]'") from error
    path, _, config = name.partition(":")
    try:
        found = datasets.load_dataset(path, config or None)
    except Exception as error:  # the hub, the network, the file system and the builder all raise their own
        raise ValueError(f"hf:{name} cannot be loaded: {error}") from error
    val = next((split for split in VALIDATION if split in found), None)
    if "train" not in found or val is None:
        splits = ", ".join(map(str, found))
        raise ValueError(f"hf:{name} has the splits {splits}; train and one of {', '.join(VALIDATION)} are needed")
    train, test = found["train"], found[val]

    def listing(scratch: Path) -> Listing:
        image, label = _columns(datasets, train.features, name)
        classes = getattr(train.features[label], "names", None)
        seen = [[str(row) for row in part[label]] for part in (train, test)]
        if classes is None:
            compare_classes(*seen, where=f"hf:{name}")
            classes = sort_names(seen[0])
            place = {known: number for number, known in enumerate(classes)}
        else:
            place = {str(number): number for number in range(len(classes))}
        for rows in seen:
            unknown = next((row for row in rows if row not in place), "")
            if unknown != "":
                raise ValueError(
                    f"hf:{name} has images labelled {unknown}, which is none of its {len(classes)} classes"
                )
        parts = [
            _TablePart(part.cast_column(image, datasets.Image(decode=False)), image, [place[row] for row in rows])
            for part, rows in zip((train, test), seen, strict=True)
        ]
        return Listing(classes=[str(known) for known in classes], train=parts[0], val=parts[1], skipped=[])

    return Source(
        name=Path(path).name, where=f"hf:{name}", fingerprint=f"{train._fingerprint} {test._fingerprint}", list=listing
    )


def _columns(datasets: Any, features: Any, name: str) -> tuple[str, str]:
    images = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
    labels = [column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    labels += [column for column in ("label", "labels", "fine_label") if column in features and column not in labels]
    if not images or not labels:
        raise ValueError(
            f"hf:{name} has the columns {', '.join(features)}; one of images and one of class labels are needed"
        )
    return images[0], labels[0]


class _TablePart:
    """Images in a column of a table, stored as the bytes of their files."""

    def __init__(self, table: Any, column: str, labels: list[int]) -> None:
        self.table, self.column, self.labels = table, column, labels

    def name(self, row: int) -> str:
        return f"row {row}"

    def read(self, row: int) -> "Image":
        cell = self.table[row][self.column]
        if cell is None:
            raise ValueError("the row has no image")
        return decode_opened(
            lambda: io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else open_file(cell["path"])
        )


@register_source("hf", takes="NAME")
def _hub(rest: str, _settings: Settings) -> Source:
    return hub_source(rest)
