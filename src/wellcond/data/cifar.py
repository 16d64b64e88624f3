"""CIFAR-10 and CIFAR-100 in their Python version, as unpacked by torchvision.

    source = cifar_source("cifar10", Path("data"))      # data/cifar-10-batches-py/data_batch_1, …

These files are pickles, which can run arbitrary code. They are read by an unpickler that builds only arrays and plain
values and refuses everything else, so untrusted files do no harm.
"""

import hashlib
import pickle
from pathlib import Path
from typing import Any

from wellcond.data.files import ArrayPart, Listing, Source, stat_line
from wellcond.data.sources import Settings, register_source

__all__ = ["cifar_source", "read_arrays"]

SETS: dict[str, dict[str, Any]] = {
    "cifar10": {
        "folder": "cifar-10-batches-py", "train": [f"data_batch_{number}" for number in range(1, 6)],
        "val": ["test_batch"], "meta": "batches.meta", "labels": "labels", "names": "label_names",
    },
    "cifar100": {
        "folder": "cifar-100-python", "train": ["train"], "val": ["test"], "meta": "meta",
        "labels": "fine_labels", "names": "fine_label_names",
    },
}  # fmt: skip
ARRAYS = {"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"}
SIDE = 32


def cifar_source(which: str, path: Path) -> Source:
    """Return the source for CIFAR files; `path` is the folder that holds them, or its parent."""
    files: dict[str, Any] = SETS[which]
    folder = path / files["folder"] if (path / files["folder"]).is_dir() else path
    needed = [*files["train"], *files["val"], files["meta"]]
    missing = [name for name in needed if not (folder / name).is_file()]
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}; {which}:FOLDER is where torchvision put it, as by "
            f"torchvision.datasets.{which.upper()}({str(path)!r}, download=True); your own pictures: --data-dir FOLDER"
        )
    if missing:
        raise ValueError(
            f"{folder} has no {missing[0]}; {which} needs the python version, unpacked, with {', '.join(needed)}"
        )

    def listing(scratch: Path) -> Listing:
        classes = [str(name) for name in _field(read_arrays(folder / files["meta"]), files["names"], folder)]
        parts = {
            split: _read_part([folder / name for name in files[split]], files["labels"]) for split in ("train", "val")
        }
        return Listing(classes=classes, train=parts["train"], val=parts["val"], skipped=[])

    lines = "\n".join(f"{name} {stat_line(folder / name)}" for name in needed)
    return Source(
        name=which, where=str(folder.resolve()), fingerprint=hashlib.sha256(lines.encode()).hexdigest(), list=listing
    )


def _read_part(files: list[Path], key: str) -> ArrayPart:
    import numpy as np

    pixels, labels = [], []
    for file in files:
        batch = read_arrays(file)
        data, found = np.asarray(_field(batch, "data", file)), [int(label) for label in _field(batch, key, file)]
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * SIDE * SIDE:
            raise ValueError(
                f"{file} holds {data.dtype} of shape {data.shape}; CIFAR has uint8 rows of {3 * SIDE * SIDE}"
            )
        if len(found) != len(data):
            raise ValueError(f"{file} has {len(data)} images but {len(found)} labels; they do not fit")
        pixels.append(data)
        labels += found
    images = np.concatenate(pixels).reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return ArrayPart(np.ascontiguousarray(images), labels)


def _field(record: Any, key: str, where: Path) -> Any:
    if not isinstance(record, dict) or key not in record:
        raise ValueError(f"{where} has no {key!r}; is it another data set's file?")
    return record[key]


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0] == "numpy" and name in ARRAYS) or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is neither an array nor a plain value")


def read_arrays(file: Path) -> Any:
    """Load a pickle of arrays, lists, dicts, strings and numbers; raise ValueError for any other."""
    with open(file, "rb") as opened:
        try:
            return _ArraysOnly(opened, encoding="latin1").load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} cannot be read as CIFAR's python version: {error}; get it again") from error


@register_source("cifar10")
def _cifar10(rest: str, _settings: Settings) -> Source:
    return cifar_source("cifar10", Path(rest).expanduser())


@register_source("cifar100")
def _cifar100(rest: str, _settings: Settings) -> Source:
    return cifar_source("cifar100", Path(rest).expanduser())
