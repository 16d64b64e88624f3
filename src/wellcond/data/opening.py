"""A data set by its name.

data = open_data("digits", image_size=8)
"""

from pathlib import Path

from wellcond.data.dataset import DataSet, hold_out
from wellcond.data.digits import load_digits

__all__ = ["open_data"]


def open_data(
    spec: str, *, image_size: int, cache_dir: Path | None = None, holdout: float = 0.0, seed: int = 0
) -> DataSet:
    if spec != "digits":
        raise ValueError(f"unknown data {spec!r}")
    return hold_out(load_digits(image_size=image_size), holdout, seed=seed)
