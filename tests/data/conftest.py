"""Real pictures in small: crops of scikit-learn's two photographs, as class folders."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from wellcond.data import DataSet

MakeTree = Callable[..., Path]
CheckPhotos = Callable[[DataSet, Path], None]


@pytest.fixture(scope="session")
def photos() -> dict[str, Image.Image]:
    from sklearn.datasets import load_sample_image

    return {name: Image.fromarray(load_sample_image(f"{name}.jpg")) for name in ("china", "flower")}


@pytest.fixture
def make_tree(tmp_path: Path, photos: dict[str, Image.Image]) -> MakeTree:
    """A folder with train/ and val/ of the classes china and flower: crops of 40 × 32, each at another place."""

    def make(name: str = "photos", *, train: int = 6, val: int = 3, suffix: str = ".png") -> Path:
        root = tmp_path / name
        for split, count, top in (("train", train, 0), ("val", val, 200)):
            for label, photo in photos.items():
                (root / split / label).mkdir(parents=True)
                for index in range(count):
                    crop = photo.crop((20 * index, top, 20 * index + 40, top + 32))
                    crop.save(root / split / label / f"{index:03d}{suffix}")
        return root

    return make


@pytest.fixture
def check_photos() -> CheckPhotos:
    """Whether a data set of 16 × 16 holds every picture of a tree once, under its label, in both parts."""
    return _check_photos


def _check_photos(data: DataSet, tree: Path) -> None:
    assert data.classes == ["china", "flower"]
    assert data.skipped == []
    for split, part in (("train", data.train), ("val", data.val)):
        truth = {(_expected(file).numpy().tobytes(), file.parent.name) for file in tree.glob(f"{split}/*/*")}
        found = {
            (pixels.numpy().tobytes(), data.classes[label])
            for pixels, label in zip(part.pixels, part.labels.tolist(), strict=True)  # pyright: ignore[reportAttributeAccessIssue]
        }
        assert found == truth
        assert len(part) == len(truth)


def _expected(file: Path) -> Tensor:
    """40 × 32 to 20 × 16, of which the middle 16 × 16."""
    image = Image.open(file).convert("RGB").resize((20, 16), Image.Resampling.BICUBIC).crop((2, 0, 18, 16))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
