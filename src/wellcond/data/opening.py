"""A data set by its name, checked before any training starts.

data = open_data("digits", image_size=8)                             # embedded
data = open_data("imagenette", image_size=64, holdout=0.1)           # a folder; 10 % of train is validation
data = open_data("wds:shards/{train,val}-*.tar.gz", image_size=32)
"""

import os
from pathlib import Path

from wellcond.data.archives import shard_source
from wellcond.data.cache import CACHE_LIMIT, Progress, default_cache_dir, open_cached
from wellcond.data.cifar import cifar_source
from wellcond.data.dataset import DataSet, hold_out
from wellcond.data.digits import load_digits
from wellcond.data.files import Source
from wellcond.data.folders import folder_source
from wellcond.data.hub import hub_source

__all__ = ["open_data"]


def open_data(
    spec: str, *, image_size: int, cache_dir: Path | None = None, holdout: float = 0.0, seed: int = 0,
    cache_limit: int = CACHE_LIMIT, progress: Progress | None = None,
) -> DataSet:  # fmt: skip
    """The data set that `spec` names:

    - `digits`: scikit-learn's, embedded, 8 × 8, one channel
    - `folder:PATH`, or a plain path: train/CLASS/FILE with val/, validation/ or test/; or train.tar with val.tar
    - `wds:PATTERN`: shards of WebDataset's form, train-*.tar[.gz] and val-*.tar[.gz]; a folder or a pattern
    - `hf:NAME`: a Hugging Face data set (`hf:NAME:CONFIG`)
    - `cifar10:PATH`, `cifar100:PATH`: the python version, as torchvision unpacks it

    Images come as RGB, the shorter side resized to `image_size` and the middle kept. Sets of up to `cache_limit` bytes
    are decoded once into `cache_dir`; larger ones are streamed from their files (`ImageFiles`). With `holdout`, that
    share of each training class, drawn by `seed`, is `val`, and the real validation part is `test`.

    Raises ValueError for a missing folder, no images, an empty class, labels that do not fit, and classes that train
    and val do not share.
    """
    if image_size < 1:
        raise ValueError(f"image_size is {image_size}; it needs to be 1 or more")
    if spec == "digits":
        data = load_digits(image_size=image_size)
    else:
        data = open_cached(
            _find(spec), image_size=image_size, cache_dir=cache_dir or default_cache_dir(), limit=cache_limit,
            progress=progress,
        )  # fmt: skip
    return hold_out(data, holdout, seed=seed)


def _find(spec: str) -> Source:
    kind, colon, rest = spec.partition(":")
    if colon and kind in ("folder", "wds", "hf", "cifar10", "cifar100"):
        if not rest:
            raise ValueError(
                f"{spec!r} names nothing after the colon; write {kind}:{'NAME' if kind == 'hf' else 'PATH'}"
            )
        if kind == "wds":
            return shard_source(os.path.expanduser(rest))
        if kind == "hf":
            return hub_source(rest)
        path = Path(rest).expanduser()
        return folder_source(path) if kind == "folder" else cifar_source(kind, path)
    if not Path(spec).expanduser().exists():
        raise ValueError(
            f"unknown data {spec!r}: there is no such folder; write digits, a path, folder:PATH, wds:PATTERN, hf:NAME, "
            "cifar10:PATH or cifar100:PATH"
        )
    return folder_source(Path(spec).expanduser())
